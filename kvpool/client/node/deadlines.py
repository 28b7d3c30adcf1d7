"""Deadlines of operations that consist of several calls."""

from __future__ import annotations

import time

from kvpool.errors import DeadlineExceeded


def time_left(deadline: float) -> float:
    """Seconds until `deadline` (monotonic seconds); always more than 0.

    Raises:
        DeadlineExceeded: the deadline has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the call's deadline has passed")
    return left

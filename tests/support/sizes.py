"""How much a test does: less in `make test`, everything in `make test-full` (KVPOOL_TEST_FULL=1)."""

from __future__ import annotations

import os
import random

IS_FULL = os.environ.get("KVPOOL_TEST_FULL", "") not in ("", "0")


def scaled(quick: int, full: int, variable: str = "") -> int:
    """The size of a test in `make test`, and in `make test-full`; an environment variable overrules both."""
    return int(os.environ.get(variable) or (full if IS_FULL else quick))


def examples(count: int) -> int:
    """How many examples Hypothesis draws: `count` in `make test`, four times as many in `make test-full`."""
    return scaled(count, 4 * count)


def random_seed() -> int:
    """One fixed seed in `make test`, so that a failure fails for everybody; a fresh one in `make test-full`.

    KVPOOL_TEST_SEED repeats a run whose seed was printed.
    """
    given = os.environ.get("KVPOOL_TEST_SEED")
    if given:
        return int(given)
    return random.randrange(1 << 32) if IS_FULL else 20_260_101

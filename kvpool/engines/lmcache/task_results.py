"""Results of tasks of one kind, and the event descriptor that signals them.

Threads may share it.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

R = TypeVar("R")


class TaskResults(Generic[R]):
    """Each task puts one result, which signals once. Each result is taken once."""

    def __init__(self) -> None:
        self._notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._results: dict[int, R] = {}
        self._is_closed = False

    @property
    def fd(self) -> int:
        """The event descriptor: readable after a `put` until the caller consumes the signal."""
        return int(self._notifier.fileno())

    def put(self, task_id: int, result: R) -> None:
        """Add the result of a task that ended."""
        with self._lock:
            self._results[task_id] = result
            if not self._is_closed:
                self._notifier.notify()

    def take(self, task_id: int) -> R | None:
        """The result of a task; None if there is none yet, or if it was taken."""
        with self._lock:
            return self._results.pop(task_id, None)

    def take_all(self) -> dict[int, R]:
        """All results not taken yet, by task."""
        with self._lock:
            results, self._results = self._results, {}
            return results

    def close(self) -> None:
        """Close the descriptor; results can still be put and taken."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._notifier.close()

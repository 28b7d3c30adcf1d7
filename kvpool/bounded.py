"""Dictionaries of bounded size."""

from __future__ import annotations

from typing import TypeVar

from kvpool.errors import InvalidArgument

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(dict[K, V]):
    """A dictionary that drops the key written longest ago once it holds more than `capacity` keys.

    Writing a key again makes it the newest one. Reading changes nothing.

    Raises:
        InvalidArgument: the capacity is not positive.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InvalidArgument(f"a capacity of {capacity} entries", hint="at least 1")
        super().__init__()
        self.capacity = capacity

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self.capacity:
            del self[next(iter(self))]


class ExpiringDict(BoundedDict[K, tuple[V, float]]):
    """A `BoundedDict` of values, each with the time when it ends, in monotonic seconds.

    Entries end in the order in which they are written: all last equally long.
    """

    def expire(self, now: float) -> None:
        """Drop the entries that have ended by `now`."""
        while self:
            key = next(iter(self))
            if self[key][1] > now:
                return
            del self[key]

"""Cuts a growing text at the first of some stop strings. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Holds back as much text as could be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._keep = max((len(stop) for stop in self._stops), default=1) - 1
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """The text that became certain with `text`; nothing more comes once `is_stopped`."""
        return self._give(text, self._keep)

    def finish(self, text: str = "") -> str:
        """The rest, when `text` was the last; it may hold a stop string, too."""
        return self._give(text, 0)

    def _give(self, text: str, keep: int) -> str:
        if self.is_stopped:
            return ""
        self._held += text
        at = min((i for stop in self._stops if (i := self._held.find(stop)) >= 0), default=-1)
        if at >= 0:
            self.is_stopped = True
            given, self._held = self._held[:at], ""
            return given
        end = max(0, len(self._held) - keep)
        given, self._held = self._held[:end], self._held[end:]
        return given

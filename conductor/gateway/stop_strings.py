"""Cuts a growing text at the first stop string. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back the end of the text as long as it could be the start of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._keep = max((len(stop) for stop in self._stops), default=1) - 1
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Add `text` and return what is certain now. Returns nothing more once `is_stopped`."""
        return self._release(text, self._keep)

    def finish(self, text: str = "") -> str:
        """Add the last `text` and return the rest, up to a stop string if there is one."""
        return self._release(text, 0)

    def _release(self, text: str, keep: int) -> str:
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

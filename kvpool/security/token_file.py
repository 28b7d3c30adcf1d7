"""The file of tokens, read again when it changes: a token is taken back without a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from kvpool.errors import ConfigError
from kvpool.security.authorization import Gate
from kvpool.security.tokens import Tokens, read_tokens

log = structlog.get_logger(__name__)

CHECK_S = 1.0  # how long a token that was taken back may still be used


class TokenFile:
    """Keeps a gate's tokens those of a file; what is not valid is said once, and the old ones stay.

    Args:
        path: was just read for `gate`.
    """

    def __init__(self, path: Path, gate: Gate) -> None:
        self._path = path
        self._gate = gate
        self._seen = _stamp(path)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        """Put the file's tokens in force if it is another one than before."""
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            tokens = some_tokens(self._path)
            self._gate.replace(tokens)
        except ConfigError as error:
            # `/readyz` is open to all, and the error may name a tenant.
            self._gate.notice = "the changed file of tokens is not in force: see the log"
            log.error("the changed tokens are not in force", error=str(error))
        else:
            self._gate.notice = ""
            log.info("tokens reloaded", path=str(self._path), tokens=len(tokens))


def some_tokens(path: Path) -> Tokens:
    """The tokens of a file.

    Raises:
        ConfigError: as `read_tokens`, or there are none.
    """
    tokens = read_tokens(path)
    if not len(tokens):
        raise ConfigError(
            f"file {path} has no tokens, so nobody could call", hint="kvpool token create"
        )
    return tokens


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes with the file, also when another one takes its place; None when there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

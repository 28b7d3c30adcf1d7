"""Reload the file of tokens when it changes, so that a token is revoked without a restart."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiofiles
import aiofiles.os
import structlog

from kvpool.config.strict_yaml import MAX_FILE_BYTES, parse_yaml
from kvpool.errors import ConfigError
from kvpool.security.authorization import Authorizer
from kvpool.security.tokens import Tokens, parse_tokens, read_tokens

log = structlog.get_logger(__name__)

CHECK_S = 1.0  # how long a revoked token may still be used


class TokenFile:
    """Gives an authorizer the tokens of a file.

    If the changed file is invalid, the old tokens stay.

    Args:
        path: the file that `authorizer` has the tokens of.
    """

    def __init__(self, path: Path, authorizer: Authorizer) -> None:
        self._path = path
        self._authorizer = authorizer
        self._seen: tuple[int, int, int] | None = None
        if path.exists():
            self._seen = _stamp(path.stat())

    async def run(self) -> None:
        """Check the file every `CHECK_S` until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            await self.reload_if_changed()

    async def reload_if_changed(self) -> None:
        """Read the file again if it changed, and accept its tokens from now on."""
        try:
            stamp = _stamp(await aiofiles.os.stat(self._path))
        except OSError:
            stamp = None
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            tokens = await self._read()
            self._authorizer.replace(tokens)
        except ConfigError as error:
            # `/readyz` is open to all, and the error may name a tenant.
            self._authorizer.notice = "the changed file of tokens is not in force: see the log"
            log.error("the changed tokens are not in force", error=str(error))
        else:
            self._authorizer.notice = ""
            log.info("tokens reloaded", path=str(self._path), tokens=len(tokens))

    async def _read(self) -> Tokens:
        source = f"file {self._path}"
        try:
            async with aiofiles.open(self._path, encoding="utf-8") as file:
                text: str = await file.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {source}: {error}") from None
        return _not_empty(parse_tokens(parse_yaml(text, source), source), source)


def some_tokens(path: Path) -> Tokens:
    """Read a file that must have tokens.

    Raises:
        ConfigError: as `read_tokens`, or the file has no token.
    """
    return _not_empty(read_tokens(path), f"file {path}")


def _not_empty(tokens: Tokens, source: str) -> Tokens:
    if not len(tokens):
        raise ConfigError(
            f"{source} has no tokens, so every call would be refused", hint="kvpool token create"
        )
    return tokens


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    """Differs if the file was written, or replaced by another one."""
    return found.st_mtime_ns, found.st_size, found.st_ino

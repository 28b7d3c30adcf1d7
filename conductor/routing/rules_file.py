"""The routing rules in force: read from a file, or replaced by an operator."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import aiofiles
import aiofiles.os
import structlog

from conductor.routing.rules import (
    Facts,
    RoutingChoice,
    RoutingRules,
    choose,
    objectives_of,
    parse_rules,
)
from kvpool.errors import ConfigError

log = structlog.get_logger(__name__)

POLL_S = 0.25


class RulesFile:
    """Holds the last valid rules. A request keeps the choice that was made when it arrived.

    Args:
        path: YAML file for `load` and `watch`; None means that there is no file. The rules are
            empty at first.
        counters: where events are counted.
    """

    def __init__(self, path: Path | None = None, counters: Counter[str] | None = None) -> None:
        self.counters: Counter[str] = Counter() if counters is None else counters
        self.rules = RoutingRules()
        self.text = ""
        self.error = ""  # why the file's present content is not in force
        self.is_rolled_back = False
        self._path = path
        self._seen: tuple[int, int] | None = None

    async def load(self) -> None:
        """Read the file and put its rules in force.

        Raises:
            ConfigError: the file cannot be read, or its rules are not valid.
        """
        if self._path is not None:
            self._seen = await _stamp(self._path)
            self.replace(await _read(self._path), f"file {self._path}")

    async def watch(self) -> None:
        """Reload the file whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.reload_if_changed()

    def replace(self, text: str, source: str = "the routing rules") -> None:
        """Put other rules in force. A rollback stays in effect.

        Raises:
            ConfigError: the rules are not valid; the old ones stay in force.
        """
        rules = parse_rules(text, source)
        self.rules, self.text, self.error = rules, text, ""
        self.counters["routing:replaced"] += 1

    async def reload_if_changed(self) -> None:
        """Read the file again if it changed.

        Invalid rules are logged once, and the old ones stay in force.
        """
        if self._path is None or await _stamp(self._path) == self._seen:
            return
        try:
            await self.load()
        except ConfigError as error:
            self.error = str(error)
            self.counters["routing:refused"] += 1
            log.error("changed routing rules are invalid, the old ones stay", error=str(error))
        else:
            log.info("routing rules reloaded", path=str(self._path), rules=len(self.rules.rules))

    def rollback(self) -> None:
        """Serve every request aggregated from now on, whatever the rules say."""
        self.is_rolled_back = True
        self.counters["routing:rollbacks"] += 1
        log.warning("rolled back to aggregated serving")

    def resume(self) -> None:
        """End a rollback."""
        self.is_rolled_back = False
        log.info("rollback ended, the routing rules apply again")

    def objectives(self, facts: Facts) -> tuple[float | None, float | None]:
        """The TTFT and TPOT that the rules ask of a request, in seconds; None: they say nothing."""
        found = objectives_of(self.rules, facts)
        return found.ttft_s, found.tpot_s

    def preview(self, facts: Facts) -> RoutingChoice:
        """The choice for a request, not counted."""
        if self.is_rolled_back:
            return RoutingChoice("local", "", "rolled_back")
        return choose(self.rules, facts)

    def choose(self, facts: Facts) -> RoutingChoice:
        """The choice for a request, counted."""
        choice = self.preview(facts)
        if choice.mode == "local":
            self.counters[f"routing:local:{choice.reason}"] += 1
        if choice.rule:
            self.counters[f"routing:rule:{choice.rule}"] += 1
        return choice


async def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = await aiofiles.os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


async def _read(path: Path) -> str:
    try:
        async with aiofiles.open(path, encoding="utf-8") as file:
            text: str = await file.read()
            return text
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the routing rules {path}: {error}", hint="check conductor.rules_path"
        ) from None

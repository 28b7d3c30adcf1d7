"""The global options of the command line, and the settings that follow from them.

A command takes `ctx: typer.Context` and calls `invocation(ctx)`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import typer

from kvpool.config.loader import LoadedSettings, Override, load_settings, parse_override
from kvpool.config.settings import Settings
from kvpool.serving.log import setup_logging


@dataclass(slots=True, frozen=True)
class Invocation:
    """One call of `kvpool`: its global options, before any setting is loaded."""

    config_path: Path | None = None
    sets: tuple[str, ...] = ()
    log_level: str | None = None

    def load(
        self, extra: Iterable[Override] = (), *, config_path: Path | None = None
    ) -> LoadedSettings:
        """Load all settings.

        Args:
            extra: from the command's own flags; it wins over `--set`.
            config_path: replaces `--config`.

        Raises:
            ConfigError: a source has an unknown or wrong setting.
        """
        overrides = [parse_override(text) for text in self.sets]
        if self.log_level is not None:
            overrides.append(Override("log.level", self.log_level, "--log-level"))
        return load_settings(config_path or self.config_path, os.environ, [*overrides, *extra])

    def start(self, process: str, extra: Iterable[Override] = ()) -> Settings:
        """Load the settings and set up logging for a long-running command; return the settings.

        Raises:
            ConfigError: as `load`.
        """
        settings = self.load(extra).settings
        setup_logging(settings.log.level, settings.log.format, process)
        return settings


def invocation(ctx: typer.Context) -> Invocation:
    """The global options of this call."""
    found = ctx.find_object(Invocation)
    return found if found is not None else Invocation()


def overrides(**flags: tuple[str, object | None]) -> list[Override]:
    """Overrides from a command's own flags. A value of None means that the flag was not given.

    Args:
        flags: (dotted key, value) by the name of the flag, with underscores for dashes, as in
            `overrides(host_label=("node.host_label", host_label))`.
    """
    return [
        Override(key, value, f"--{flag.replace('_', '-')}")
        for flag, (key, value) in flags.items()
        if value is not None
    ]

"""The `kvpool` command: global options, the list of commands, and how errors end a call.

A command's module is imported when that command runs (or shows its own --help), so that `kvpool
stats` loads neither torch nor the conductor. See `kvpool.cli.commands` for how commands are found.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvpool.cli import commands
from kvpool.cli.context import Invocation
from kvpool.cli.output import print_error
from kvpool.errors import ConfigError, KvpoolError, did_you_mean

EXIT_FAILURE = 1
EXIT_USAGE = 2


class _Deferred(TyperCommand):
    """A command's line in the list. It loads the real command when it is called."""

    def __init__(self, name: str, command: commands.Command) -> None:
        text = command.help
        if name not in commands.installed():
            text += f" (not installed: extra {command.extra})"
        super().__init__(name, help=text, short_help=text, rich_help_panel=command.panel)

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        real = _load(str(self.name))
        return real.make_context(info_name, args, parent=parent, **extra)


class _LazyGroup(TyperGroup):
    """All commands, with none of them imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(dict.fromkeys([*commands.COMMANDS, *sorted(commands.installed())]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = commands.find(cmd_name)
        return None if command is None else _Deferred(cmd_name, command)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and commands.find(args[0]) is None:
            hint = did_you_mean(args[0], self.list_commands(ctx))
            ctx.fail(f"no such command {args[0]!r}: {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            raise commands.not_installed(ctx.invoked_subcommand, str(error.name)) from error


def _load(name: str) -> Any:
    """Import a command. Raises KvpoolError if it is not installed."""
    entry = commands.installed().get(name)
    if entry is None:
        raise commands.not_installed(name)
    target = entry.load()
    if isinstance(target, typer.Typer):
        return typer.main.get_group(target)
    single = typer.Typer(add_completion=False)
    single.command(name)(target)
    return typer.main.get_command(single)


def installed_version() -> str:
    """Version of the installed package; "unknown" when it runs from a bare source tree."""
    try:
        return version("kvpool")
    except PackageNotFoundError:
        return "unknown"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvpool {installed_version()}")
        raise typer.Exit


app = typer.Typer(
    cls=_LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _global_options(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="Configuration file (YAML); default: $KVPOOL_CONFIG, then ./kvpool.yaml if it "
            "exists.",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set one setting, for example node.dram_bytes=4GiB; repeatable.",
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", help="debug, info, warning or error.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """A KV-cache pool for LLM serving: pool nodes, a conductor, and prefill and decode workers."""
    ctx.obj = Invocation(config, tuple(sets or ()), log_level)


def main() -> None:
    """Run a command. An error of kvpool becomes one line on stderr.

    Exit status: 0 after success, 1 after a failure, 2 for wrong usage or configuration, 130 after
    Ctrl-C.
    """
    try:
        app(prog_name="kvpool")
    except KvpoolError as error:
        if "--debug" in sys.argv[1:]:
            raise
        print_error(str(error))
        sys.exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE)

"""The `kvpool` command: global options, the list of commands, and how errors end a call.

A command's module is imported when that command is called (or its own --help), so that `kvpool stats`
loads neither torch nor the conductor. To add a command, add a line to `COMMANDS`: its target is a
function with typer annotations, or a `typer.Typer` for a command that has commands of its own.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvpool.cli.context import Invocation
from kvpool.cli.output import print_error
from kvpool.errors import ConfigError, KvpoolError

EXIT_FAILURE = 1
EXIT_USAGE = 2


@dataclass(slots=True, frozen=True)
class Registered:
    """A command by name; `target` is "module:attribute"; `help` is its line in the list."""

    target: str
    help: str


COMMANDS: dict[str, Registered] = {
    "up": Registered("workers.cli.up:up", "Start conductor, node and workers on this machine."),
    "conductor": Registered("conductor.cli.serve:conductor", "Run the conductor."),
    "node": Registered("tiers.cli:node", "Run a pool node."),
    "worker": Registered(
        "workers.cli.worker:app", "Run a prefill or decode worker, or measure one."
    ),
    "demo": Registered("workers.cli.demo:demo", "Show what the pool is good for, on this machine."),
    "put": Registered("kvpool.cli.data.pool:put", "Write a file's bytes to the pool."),
    "get": Registered("kvpool.cli.data.pool:get", "Read bytes from the pool."),
    "lookup": Registered("kvpool.cli.data.pool:lookup", "Say what the pool has of a prompt."),
    "explain": Registered(
        "kvpool.cli.ops.explain:explain",
        "Say why a request was served as it was, and what it missed.",
    ),
    "ls": Registered("kvpool.cli.data.ls:ls", "List namespaces and blocks, node by node."),
    "engines": Registered("kvpool.cli.ops.engines:engines", "List engines' namespaces."),
    "stats": Registered("kvpool.cli.data.pool:stats", "Show nodes, tiers, and hits."),
    "bench": Registered(
        "benchmarks.cli.store:app", "Measure the store beside memcpy and its peers."
    ),
    "protect": Registered("kvpool.cli.ops.protect:protect", "Keep a prompt's blocks in the pool."),
    "unprotect": Registered("kvpool.cli.ops.protect:unprotect", "End a prompt's protection."),
    "drain": Registered("kvpool.cli.ops.drain:drain", "Empty a node and let it end."),
    "policy": Registered(
        "conductor.cli.policy:app", "Check, change or explain the routing policy."
    ),
    "plan": Registered("planner.cli.plan:app", "Size KV, links and deployments."),
    "simulate": Registered(
        "planner.cli.simulate:simulate", "Simulate a cluster over a trace, by the real scheduler."
    ),
    "resize": Registered("kvpool.cli.ops.resize:resize", "Give a node more or less DRAM."),
    "token": Registered("kvpool.cli.ops.token:app", "Make API tokens."),
    "replay": Registered("planner.cli.replay:replay", "Try eviction policies on a trace."),
    "trace": Registered("planner.cli.trace:app", "Describe a trace, or make one."),
    "config": Registered("kvpool.cli.ops.config:app", "Show or check the configuration."),
    "doctor": Registered("kvpool.cli.ops.doctor:doctor", "Check what this machine offers."),
}


class _Deferred(TyperCommand):
    """Stands in for a command in the list; becomes the real one when it is called."""

    def __init__(self, name: str, entry: Registered) -> None:
        super().__init__(name, help=entry.help, short_help=entry.help)
        self._entry = entry

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        real = _resolve(str(self.name), self._entry)
        return real.make_context(info_name, args, parent=parent, **extra)


class _LazyGroup(TyperGroup):
    """The commands of `COMMANDS`, none of them imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else _Deferred(cmd_name, entry)


def _resolve(name: str, entry: Registered) -> Any:
    module_name, _, attribute = entry.target.partition(":")
    try:
        target = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        ours = (error.name or "").partition(".")[0] in (
            "kvpool",
            "tiers",
            "conductor",
            "workers",
            "planner",
            "benchmarks",
        )
        raise KvpoolError(
            f"`kvpool {name}` needs the Python module {error.name}, which is not installed",
            hint="this installation is incomplete: install kvpool again"
            if ours
            else "pip install 'kvpool[demo,redis]' installs every optional part",
        ) from error
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
            "--config", "-c", help="YAML file; else $KVPOOL_CONFIG, else ./kvpool.yaml if there."
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="One setting, e.g. node.dram_bytes=4GiB; repeatable."
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
    """A pool of KV cache for LLM serving: store, conductor, workers."""
    ctx.obj = Invocation(config, tuple(sets or ()), log_level)


def main() -> None:
    """Entry point: run a command; an error of kvpool becomes one line and an exit status.

    0: done. 1: it failed. 2: wrong usage or configuration. 130: interrupted.
    """
    try:
        app(prog_name="kvpool")
    except KvpoolError as error:
        if "--debug" in sys.argv[1:]:
            raise
        print_error(str(error))
        sys.exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE)

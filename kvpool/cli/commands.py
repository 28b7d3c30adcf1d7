"""The commands of `kvpool` by name, and the installed packages that carry them out.

Every package brings its own commands as entry points of the group `kvpool.commands`. Their targets
are functions with typer annotations, or a `typer.Typer` for a command with commands of its own.
This module knows only the texts of the overview, so that the overview imports no command, and so
that a command that is not installed can say what to install.

To add a command: write it in its package's `cli`, add the entry point, and add its line to
`COMMANDS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from kvpool.errors import KvpoolError

GROUP = "kvpool.commands"

SERVERS = "Run a pool"
DATA = "Look into a pool"
OPERATIONS = "Operate a pool"
PLANNING = "Plan and measure"
THIS_MACHINE = "Set up this machine"
OTHERS = "From other packages"


@dataclass(slots=True, frozen=True)
class Command:
    """One line of `kvpool --help`.

    Args:
        panel: the heading that it is listed under.
        extra: the extra of the package kvpool that installs it; "" for kvpool itself.
    """

    help: str
    panel: str
    extra: str = ""


COMMANDS: dict[str, Command] = {
    "up": Command("Start a conductor, nodes and workers on this machine.", SERVERS, "server"),
    "conductor": Command("Run the conductor.", SERVERS, "server"),
    "node": Command("Run a pool node.", SERVERS, "server"),
    "worker": Command("Run a prefill or decode worker, or measure one.", SERVERS, "server"),
    "demo": Command("Show on this machine what the pool saves.", SERVERS, "demo"),
    "stats": Command("Show nodes, tiers, workers and hit ratios.", DATA),
    "ls": Command("List namespaces and blocks, node by node.", DATA),
    "engines": Command("List the namespaces of engines.", DATA),
    "explain": Command("Explain how a request was served and which blocks it missed.", DATA),
    "put": Command("Write a file to the pool.", DATA),
    "get": Command("Read a file from the pool.", DATA),
    "lookup": Command("Show which blocks of a file are in the pool.", DATA),
    "protect": Command("Keep a prompt's blocks in the pool.", OPERATIONS),
    "unprotect": Command("End the protection of a prompt's blocks.", OPERATIONS),
    "drain": Command("Move all blocks off a node and stop it.", OPERATIONS),
    "resize": Command("Change the DRAM of a running node.", OPERATIONS),
    "rules": Command("Check, change or explain the routing rules.", OPERATIONS, "server"),
    "plan": Command("Size KV caches, links and deployments.", PLANNING, "planner"),
    "simulate": Command(
        "Simulate a cluster on a trace, with the real scheduler.", PLANNING, "planner"
    ),
    "replay": Command("Compare eviction policies on a trace.", PLANNING, "planner"),
    "trace": Command("Describe a trace, or generate one.", PLANNING, "planner"),
    "bench": Command("Measure the store and vLLM on this machine.", PLANNING, "server"),
    "doctor": Command("Check what this machine offers.", THIS_MACHINE),
    "config": Command("Show or check the configuration.", THIS_MACHINE),
    "token": Command("Make API tokens.", THIS_MACHINE),
}


@lru_cache(maxsize=1)
def installed() -> dict[str, EntryPoint]:
    """Entry points of the installed commands by name. Imports none of them."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def find(name: str) -> Command | None:
    """The command called `name`, installed or not; None if it is unknown."""
    known = COMMANDS.get(name)
    if known is None and name in installed():
        return Command(f"Run {installed()[name].value}.", OTHERS)
    return known


def not_installed(name: str, module: str = "") -> KvpoolError:
    """The error for a command that cannot run here.

    Args:
        module: the Python module that is missing; "" if the command itself is.
    """
    known = find(name)
    package = f"kvpool[{known.extra}]" if known is not None and known.extra else "kvpool"
    what = (
        f"`kvpool {name}` needs the Python module {module}, which" if module else f"`kvpool {name}`"
    )
    return KvpoolError(f"{what} is not installed", hint=f"pip install '{package}'")

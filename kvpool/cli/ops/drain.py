"""`kvpool drain`: move all blocks off a node and stop it, so that its host can be removed."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli.connect import Conductor, open_pool
from kvpool.cli.ids import full_id
from kvpool.cli.output import AsJson, console, format_seconds, print_json
from kvpool.wire.json_view import named


def drain(
    ctx: typer.Context,
    node: Annotated[str, typer.Argument(help="The node's id, or a prefix of it.")],
    drop: Annotated[
        bool, typer.Option("--drop", help="Drop its blocks instead of moving them.")
    ] = False,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", min=0.1, help="Seconds after which the node stops in any case."),
    ] = 60.0,
    conductor: Conductor = None,
    as_json: AsJson = False,
) -> None:
    """Move a node's blocks to other nodes, wait for its readers, and stop it."""
    with open_pool(ctx, conductor) as pool:
        node_id = full_id(node, [info.descriptor.node_id for info in pool.nodes()])
        reply = pool.drain(node_id, drop=drop, timeout_s=timeout_s)
    if as_json:
        print_json({"node": node_id, **named(reply)})
        return
    lost = ", ".join(f"{count} {reason}" for reason, count in sorted(reply.lost.items()))
    console().print(
        f"node {node_id} stops after {format_seconds(reply.elapsed_s)}: {reply.moved} blocks moved,"
        f" {reply.elsewhere} already elsewhere, {sum(reply.lost.values())} lost"
        + (f" ({lost})" if lost else "")
    )
    if reply.leases_left:
        console().print(f"{reply.leases_left} leases had not ended by the deadline")

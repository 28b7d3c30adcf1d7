"""`kvpool drain`: empty a node and let it end, so that its host can be taken away."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli.context import invocation, overrides
from kvpool.cli.ids import full_id
from kvpool.cli.output import console, format_seconds, print_json
from kvpool.client import Pool
from kvpool.security.credentials import credentials_of
from kvpool.wire.json_view import named


def drain(
    ctx: typer.Context,
    node: Annotated[str, typer.Argument(help="Node's id, or a beginning that only it has.")],
    drop: Annotated[
        bool, typer.Option("--drop", help="Let its blocks go instead of moving them.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds; the node ends after them anyway.")
    ] = 60.0,
    conductor: Annotated[
        str | None,
        typer.Option("--conductor", help="Conductor's wire address; default: configured."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Move a node's blocks to other nodes, wait for its readers, and let it end."""
    given = overrides(conductor=("client.conductor", conductor))
    settings = invocation(ctx).load(given).settings.client
    with Pool(
        conductor=settings.conductor,
        timeout_s=settings.timeout_s,
        credentials=credentials_of(settings),
    ) as pool:
        node_id = full_id(node, [info.descriptor.node_id for info in pool.nodes()])
        reply = pool.drain(node_id, drop=drop, timeout_s=timeout_s)
    if as_json:
        print_json({"node": node_id, **named(reply)})
        return
    lost = ", ".join(f"{count} {reason}" for reason, count in sorted(reply.lost.items()))
    console().print(
        f"node {node_id} ends after {format_seconds(reply.elapsed_s)}: {reply.moved} blocks moved,"
        f" {reply.elsewhere} stood elsewhere, {sum(reply.lost.values())} lost"
        + (f" ({lost})" if lost else "")
    )
    if reply.leases_left:
        console().print(f"{reply.leases_left} leases were still in force at the end of the time")

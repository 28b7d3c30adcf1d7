"""`kvpool resize`: change the DRAM of a running node."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli.connect import Conductor, open_pool
from kvpool.cli.ids import full_id
from kvpool.cli.output import AsJson, console, format_bytes, print_json
from kvpool.config.loader import parse_bytes
from kvpool.errors import InvalidArgument
from kvpool.wire.json_view import named


def resize(
    ctx: typer.Context,
    node: Annotated[str, typer.Argument(help="The node's id, or a prefix of it.")],
    size: Annotated[str, typer.Argument(help="The new amount of DRAM, e.g. 4GiB.")],
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds to wait for new memory.")
    ] = 120.0,
    conductor: Conductor = None,
    as_json: AsJson = False,
) -> None:
    """Grow or shrink a node's DRAM while it serves.

    Memory to remove is emptied in the background.
    """
    try:
        wanted = parse_bytes(size)
    except ValueError as error:
        raise InvalidArgument(f"{size}: {error}") from None
    with open_pool(ctx, conductor) as pool:
        node_id = full_id(node, [info.descriptor.node_id for info in pool.nodes()])
        reply = pool.resize(node_id, wanted, timeout_s=timeout_s)
    if as_json:
        print_json({"node": node_id, **named(reply)})
        return
    console().print(
        f"node {node_id}: {format_bytes(reply.before_bytes)} of DRAM before,"
        f" {format_bytes(reply.capacity_bytes)} now"
    )
    if reply.evacuating_bytes:
        console().print(
            f"{format_bytes(reply.evacuating_bytes)} are being emptied. They are freed when the "
            "last reader and"
            " writer has finished."
        )

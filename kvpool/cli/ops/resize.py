"""`kvpool resize`: give a running node more or less DRAM."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli.context import invocation, overrides
from kvpool.cli.ids import full_id
from kvpool.cli.output import console, format_bytes, print_json
from kvpool.client import Pool
from kvpool.config.loader import parse_bytes
from kvpool.errors import InvalidArgument
from kvpool.security.credentials import credentials_of
from kvpool.wire.json_view import named


def resize(
    ctx: typer.Context,
    node: Annotated[str, typer.Argument(help="Node's id, or a beginning that only it has.")],
    size: Annotated[str, typer.Argument(help="DRAM that it shall have, e.g. 4GiB.")],
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds for new memory to be set up.")
    ] = 120.0,
    conductor: Annotated[
        str | None,
        typer.Option("--conductor", help="Conductor's wire address; default: configured."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Grow or shrink a node's DRAM while it serves; what has to go is emptied in the background."""
    try:
        wanted = parse_bytes(size)
    except ValueError as error:
        raise InvalidArgument(f"{size}: {error}") from None
    given = overrides(conductor=("client.conductor", conductor))
    settings = invocation(ctx).load(given).settings.client
    with Pool(
        conductor=settings.conductor,
        timeout_s=settings.timeout_s,
        credentials=credentials_of(settings),
    ) as pool:
        node_id = full_id(node, [info.descriptor.node_id for info in pool.nodes()])
        reply = pool.resize(node_id, wanted, timeout_s=timeout_s)
    if as_json:
        print_json({"node": node_id, **named(reply)})
        return
    console().print(
        f"node {node_id}: {format_bytes(reply.before_bytes)} of DRAM before,"
        f" {format_bytes(reply.capacity_bytes)} now"
    )
    if reply.retiring_bytes:
        console().print(
            f"{format_bytes(reply.retiring_bytes)} are being emptied, and are given back when nobody"
            " reads or writes there any more"
        )

"""`kvpool ls`: list each node's namespaces and blocks, with sizes, ages, pins and protection."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvpool.cli.connect import Conductor, open_pool
from kvpool.cli.ids import full_id
from kvpool.cli.output import AsJson, console, format_seconds, print_json, print_table
from kvpool.client.admin.listing import NodeListing, SpaceListing
from kvpool.wire import messages as m
from kvpool.wire.json_view import named

SHOWN_HASH = 12  # hex digits, enough to tell blocks apart


def ls(
    ctx: typer.Context,
    node: Annotated[
        str, typer.Option("--node", help="Only this node: its id, or a prefix of it.")
    ] = "",
    model: Annotated[
        str,
        typer.Option("--model", help="Only this model, model@revision, or namespace id in hex."),
    ] = "",
    limit: Annotated[
        int, typer.Option("--limit", min=0, help="Blocks to list of each namespace on each node.")
    ] = 50,
    conductor: Conductor = None,
    as_json: AsJson = False,
) -> None:
    """List namespaces and blocks, node by node, oldest first.

    This does not count as a use of the blocks.
    """
    with open_pool(ctx, conductor) as pool:
        node_id = ""
        if node:
            node_id = full_id(node, [info.descriptor.node_id for info in pool.nodes()])
        nodes = pool.list_blocks(node_id=node_id, model=model, limit=limit)
    if as_json:
        print_json({"nodes": [_plain(listing) for listing in nodes]})
        return
    if not any(listing.namespaces for listing in nodes):
        console().print(
            f"no blocks of {model}; `kvpool ls` lists all models" if model else "the pool is empty"
        )
    for listing in nodes:
        for space in listing.namespaces:
            _show(listing, space)


def _plain(listing: NodeListing) -> dict[str, Any]:
    return {
        "node_id": listing.node_id,
        "host": listing.host,
        "namespaces": [
            {**named(space.usage), "listed": [named(block) for block in space.blocks]}
            for space in listing.namespaces
        ],
    }


def _show(listing: NodeListing, space: SpaceListing) -> None:
    usage = space.usage
    resident = ", ".join(f"{count} in {tier}" for tier, count in usage.resident.items())
    console().print(
        f"{listing.node_id[:8]} on {listing.host}: {usage.name}"
        f" ({usage.namespace_id.hex()[:SHOWN_HASH]}), {usage.blocks} blocks of"
        f" {usage.block_tokens} tokens" + (f": {resident}" if resident else "")
    )
    if space.blocks:
        numbers = ("depth", "parts", "KiB", "pins", "protected", "idle")
        print_table(
            ("block", "parent", "tiers", *numbers),
            [_row(block, usage.tp_size) for block in space.blocks],
            right=numbers,
        )
        left = usage.blocks - len(space.blocks)
        if left > 0:
            console().print(f"and {left} more (raise --limit)")
    console().print()


def _row(block: m.BlockInfo, tp_size: int) -> tuple[object, ...]:
    protected = {0.0: "forever", -1.0: ""}.get(block.retained_s)
    return (
        block.block_hash.hex()[:SHOWN_HASH],
        block.parent.hex()[:SHOWN_HASH] or "-",
        "+".join(map(str, block.tiers)) or "being written",
        block.depth,
        f"{block.parts}/{tp_size}",
        f"{block.size_bytes / 1024:.1f}",
        block.pins,
        format_seconds(block.retained_s) if protected is None else protected,
        format_seconds(block.idle_s),
    )

"""`kvpool engines`: list the engines' namespaces in the form of `conductor.engines`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvpool.blocks.layout import Namespace
from kvpool.cli.connect import Conductor, open_pool
from kvpool.cli.output import AsJson, console, print_json, print_table


def engines(
    ctx: typer.Context,
    model: Annotated[str, typer.Option("--model", help="Only namespaces of this model.")] = "",
    conductor: Conductor = None,
    as_json: AsJson = False,
) -> None:
    """List the namespaces in the pool, as entries for the setting conductor.engines.

    Salts are not shown.
    """
    with open_pool(ctx, conductor) as pool:
        spaces = [space for space in pool.namespaces() if not model or space.model == model]
    if as_json:
        print_json({"engines": [entry_of(space) for space in spaces]})
        return
    if not spaces:
        console().print(
            f"no engine of {model}; `kvpool engines` lists all"
            if model
            else "no engine has registered yet"
        )
        return
    print_table(
        ("model", "revision", "tenant", "dtype", "layers", "heads", "dim", "tokens", "tp", "order"),
        [_row(space) for space in spaces],
        right=("layers", "heads", "dim", "tokens", "tp"),
    )


def entry_of(space: Namespace) -> dict[str, Any]:
    """The part of an entry of `conductor.engines` that identifies the blocks of an engine."""
    layout = space.layout
    return {
        "namespace_model": space.model,
        "revision": space.revision,
        "dtype": layout.dtype,
        "layers": layout.layers,
        "kv_heads": layout.kv_heads,
        "head_dim": layout.head_dim,
        "block_tokens": layout.block_tokens,
        "tp_size": layout.tp_size,
        "kv_per_token": layout.kv_per_token,
        "order": layout.order,
        "tenant": space.tenant,
        "hash_algorithm": space.hash_algorithm,
    }


def _row(space: Namespace) -> tuple[object, ...]:
    layout = space.layout
    return (
        *(space.model, space.revision, space.tenant or "-", layout.dtype, layout.layers),
        *(layout.kv_heads, layout.head_dim, layout.block_tokens, layout.tp_size, layout.order),
    )

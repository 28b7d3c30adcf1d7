"""`kvpool protect` and `kvpool unprotect`: keep the blocks of a prompt in the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvpool.blocks.hashing import HASH_BYTES, hash_chain
from kvpool.blocks.layout import Namespace
from kvpool.cli.connect import Conductor, open_pool
from kvpool.cli.data.pool import FILE_NAMESPACE, file_hashes
from kvpool.cli.output import AsJson, console, print_json, print_table
from kvpool.client import Pool
from kvpool.errors import InvalidArgument, NotFound

Key = Annotated[str | None, typer.Argument(help="Key that `kvpool put` printed.")]
System = Annotated[
    str | None,
    typer.Option("--system", help="A system prompt; the model's chat template is applied."),
]
Text = Annotated[str | None, typer.Option("--text", help="A plain prompt, or the start of one.")]
Tokens = Annotated[
    Path | None,
    typer.Option(
        "--tokens",
        exists=True,
        dir_okay=False,
        help="File with token ids: a JSON list, or numbers with spaces.",
    ),
]
Hashes = Annotated[
    list[str] | None,
    typer.Option(
        "--hash", help="A block's hash in hex; repeat for each block of the chain, in order."
    ),
]
Model = Annotated[
    str,
    typer.Option("--model", help="Model or model@revision; default: the only one in the pool."),
]


def protect(
    ctx: typer.Context,
    key: Key = None,
    system: System = None,
    text: Text = None,
    tokens: Tokens = None,
    hashes: Hashes = None,
    model: Model = "",
    ttl_s: Annotated[
        float | None,
        typer.Option(
            "--ttl",
            help="Seconds during which the blocks are evicted last; default: never evict them.",
        ),
    ] = None,
    conductor: Conductor = None,
    as_json: AsJson = False,
) -> None:
    """Keep the full blocks of one prompt on the nodes that hold them.

    Blocks not in the pool are skipped.
    """
    with open_pool(ctx, conductor) as pool:
        space, chain = _chain(pool, key, system, text, tokens, hashes, model)
        counts = pool.protect(space, chain, ttl_s=ttl_s)
    _report(counts, len(chain), "protected", as_json)


def unprotect(
    ctx: typer.Context,
    key: Key = None,
    system: System = None,
    text: Text = None,
    tokens: Tokens = None,
    hashes: Hashes = None,
    model: Model = "",
    conductor: Conductor = None,
    as_json: AsJson = False,
) -> None:
    """End the protection of one prompt's blocks.

    Blocks shared with another protected prompt stay protected.
    """
    with open_pool(ctx, conductor) as pool:
        space, chain = _chain(pool, key, system, text, tokens, hashes, model)
        counts = pool.unprotect(space, chain)
    _report(counts, len(chain), "unprotected", as_json)


def _chain(
    pool: Pool,
    key: str | None,
    system: str | None,
    text: str | None,
    tokens: Path | None,
    hashes: list[str] | None,
    model: str,
) -> tuple[Namespace, list[bytes]]:
    """The namespace and the hashes of the blocks that the options name."""
    given = [name for name in (key, system, text, tokens, hashes or None) if name is not None]
    if len(given) != 1:
        raise InvalidArgument(
            f"{len(given)} prompts are given",
            hint="give exactly one of KEY, --system, --text, --tokens, --hash",
        )
    if key is not None:
        return FILE_NAMESPACE, file_hashes(key)[1]
    space = _namespace(pool, model)
    if hashes:
        return space, [_hash(value) for value in hashes]
    if tokens is not None:
        ids = _token_ids(tokens)
    elif system is not None:
        ids = pool.tokenize(system, is_system_prompt=True)
    else:
        ids = pool.tokenize(text or "")
    chain = hash_chain(space, ids)
    if not chain:
        raise InvalidArgument(
            f"the prompt has {len(ids)} tokens", hint=f"a block has {space.layout.block_tokens}"
        )
    return space, chain


def _namespace(pool: Pool, model: str) -> Namespace:
    known = [space for space in pool.namespaces() if space != FILE_NAMESPACE]
    found = [space for space in known if not model or model in (space.model, space.name)]
    if not found:
        names = ", ".join(sorted({space.model for space in known})) or "none"
        raise NotFound(f"the pool has no blocks of model {model!r}", hint=f"its models: {names}")
    if len(found) > 1:
        names = ", ".join(space.name for space in found)
        raise InvalidArgument("several namespaces match", hint=f"--model with one of {names}")
    return found[0]


def _token_ids(file: Path) -> list[int]:
    data = file.read_bytes()
    try:
        if data.lstrip().startswith(b"["):
            return msgspec.json.decode(data, type=list[int])
        return [int(word) for word in data.split()]
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidArgument(f"{file} does not hold token ids: {error}") from error


def _hash(text: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != HASH_BYTES:
        raise InvalidArgument(f"{text!r} is not a block hash", hint=f"{2 * HASH_BYTES} hex digits")
    return value


def _report(counts: dict[str, int], blocks: int, what: str, as_json: bool) -> None:
    if as_json:
        print_json({"blocks": blocks, what: counts})
        return
    console().print(f"the prompt has {blocks} full blocks")
    print_table(("node", what), sorted(counts.items()), right=(what,))

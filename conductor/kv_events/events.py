"""The KV events that engines publish, read into three plain shapes. Pure; sockets are `kv_feed`'s.

vLLM and SGLang send msgpack batches in which both the batch and its events come as arrays (older ones) or as
maps tagged `type` (vLLM since mid-2026). Hashes are signed or unsigned 64-bit numbers or bytes. Later versions
append fields; those unknown here are passed over. Only what stands in an engine's device memory is kept: the
scheduler wants to know what a prefill there need not fetch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvpool.errors import ProtocolError

MAX_BATCH_BYTES = 64 << 20
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx", "locality")
_FULL_ATTENTION = (None, "full_attention", "mla_attention", "mla")

PageHash = int | bytes


@dataclass(slots=True, frozen=True)
class Stored:
    """Pages that follow on each other; `parent` is the page before the first, None at the start."""

    pages: tuple[PageHash, ...]
    parent: PageHash | None
    token_ids: tuple[int, ...]
    page_tokens: int


@dataclass(slots=True, frozen=True)
class Removed:
    """Pages that left the engine's device memory."""

    pages: tuple[PageHash, ...]


@dataclass(slots=True, frozen=True)
class Cleared:
    """Nothing stands there any more."""


KvEvent = Stored | Removed | Cleared


@dataclass(slots=True, frozen=True)
class Batch:
    """What one message carried; `ts` is the publisher's clock."""

    ts: float
    events: tuple[KvEvent, ...]
    ignored: int  # of another memory, of an adapter, of a window, or of an unknown kind


def parse_batch(payload: bytes) -> Batch:
    """Read one message.

    Raises:
        ProtocolError: it is no batch of events.
    """
    if len(payload) > MAX_BATCH_BYTES:
        raise ProtocolError(f"a batch of KV events of {len(payload)} bytes")
    try:
        raw = msgspec.msgpack.decode(payload)
        ts, items = (raw["ts"], raw["events"]) if isinstance(raw, dict) else (raw[0], raw[1])
        events: list[KvEvent] = []
        ignored = 0
        for item in items:
            event = _event(item)
            if event is None:
                ignored += 1
            else:
                events.append(event)
        return Batch(float(ts), tuple(events), ignored)
    except ProtocolError:
        raise
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ProtocolError(f"no batch of KV events: {type(error).__name__}: {error}") from error


def _event(item: Any) -> KvEvent | None:
    if isinstance(item, Mapping):
        kind, fields = item["type"], item
    else:
        kind = item[0]
        names = _STORED_FIELDS if kind == "BlockStored" else _REMOVED_FIELDS
        fields = dict(zip(names, item[1:], strict=False))
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind not in ("BlockStored", "BlockRemoved") or not _is_here(fields):
        return None
    pages = tuple(_hash(page) for page in fields["block_hashes"])
    if kind == "BlockRemoved":
        return Removed(pages)
    if not _is_plain(fields):
        return None
    token_ids = tuple(fields["token_ids"])
    page_tokens = int(fields["block_size"])
    if page_tokens < 1 or len(token_ids) != page_tokens * len(pages):
        raise ProtocolError(
            f"{len(token_ids)} tokens for {len(pages)} pages of {page_tokens} tokens"
        )
    if not all(isinstance(token, int) and 0 <= token < 1 << 32 for token in token_ids):
        raise ProtocolError("token ids must be 32-bit numbers")
    parent = fields["parent_block_hash"]
    return Stored(pages, None if parent is None else _hash(parent), token_ids, page_tokens)


def _is_here(fields: Mapping[str, Any]) -> bool:
    """In device memory of the publisher itself."""
    medium = fields.get("medium")
    return (medium is None or str(medium).upper() in ("GPU", "HBM")) and (
        fields.get("locality") in (None, "LOCAL")
    )


def _is_plain(fields: Mapping[str, Any]) -> bool:
    """Of the base model and of tokens alone, with KV of every token: what our hashes can name."""
    # SGLang puts a map of its own where vLLM has the adapter's name.
    adapter = fields.get("lora_name")
    if fields.get("lora_id") is not None or isinstance(adapter, (str, bytes)):
        return False
    extra: Sequence[Any] = fields.get("extra_keys") or ()
    return not any(extra) and fields.get("kv_cache_spec_kind") in _FULL_ATTENTION


def _hash(value: Any) -> PageHash:
    if isinstance(value, bytes):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return value & 0xFFFF_FFFF_FFFF_FFFF  # some publishers count as signed, some do not
    raise ProtocolError(f"a block hash of type {type(value).__name__}")

"""Parses the KV events that engines publish. Pure.

vLLM and SGLang send msgpack batches. Batches and events are arrays, or maps with a field `type`
(vLLM since mid-2026). Hashes are bytes, or signed or unsigned 64-bit numbers. Later versions append
fields; unknown fields are ignored. Only events about an engine's device memory are kept, because
the scheduler needs to know what a prefill there does not have to fetch.
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
class PagesStored:
    """Consecutive pages.

    `parent` is the page before the first one; None at the start of a prompt.
    """

    pages: tuple[PageHash, ...]
    parent: PageHash | None
    token_ids: tuple[int, ...]
    page_tokens: int


@dataclass(slots=True, frozen=True)
class PagesRemoved:
    """Pages that left the engine's device memory."""

    pages: tuple[PageHash, ...]


@dataclass(slots=True, frozen=True)
class PagesCleared:
    """The engine's device memory holds no pages any more."""


KvEvent = PagesStored | PagesRemoved | PagesCleared


@dataclass(slots=True, frozen=True)
class EventBatch:
    """The content of one message. `ts` is by the publisher's clock."""

    ts: float
    events: tuple[KvEvent, ...]
    ignored: int  # events of other memory, an adapter or a window, or of an unknown kind


def parse_batch(payload: bytes) -> EventBatch:
    """Parse one message.

    Raises:
        ProtocolError: the message is not a batch of events.
    """
    if len(payload) > MAX_BATCH_BYTES:
        raise ProtocolError(
            f"a batch of KV events has {len(payload)} bytes", hint=f"the limit is {MAX_BATCH_BYTES}"
        )
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
        return EventBatch(float(ts), tuple(events), ignored)
    except ProtocolError:
        raise
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ProtocolError(f"not a batch of KV events: {type(error).__name__}: {error}") from error


def _event(item: Any) -> KvEvent | None:
    if isinstance(item, Mapping):
        kind, fields = item["type"], item
    else:
        kind = item[0]
        names = _STORED_FIELDS if kind == "BlockStored" else _REMOVED_FIELDS
        fields = dict(zip(names, item[1:], strict=False))
    if kind == "AllBlocksCleared":
        return PagesCleared()
    if kind not in ("BlockStored", "BlockRemoved") or not _is_here(fields):
        return None
    pages = tuple(_hash(page) for page in fields["block_hashes"])
    if kind == "BlockRemoved":
        return PagesRemoved(pages)
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
    return PagesStored(pages, None if parent is None else _hash(parent), token_ids, page_tokens)


def _is_here(fields: Mapping[str, Any]) -> bool:
    """Whether the event is about the publisher's own device memory."""
    medium = fields.get("medium")
    return (medium is None or str(medium).upper() in ("GPU", "HBM")) and (
        fields.get("locality") in (None, "LOCAL")
    )


def _is_plain(fields: Mapping[str, Any]) -> bool:
    """Whether prefix hashes can name the pages: base model, tokens only, KV of every token."""
    # SGLang has a map in the place of vLLM's adapter name.
    adapter = fields.get("lora_name")
    if fields.get("lora_id") is not None or isinstance(adapter, (str, bytes)):
        return False
    extra: Sequence[Any] = fields.get("extra_keys") or ()
    return not any(extra) and fields.get("kv_cache_spec_kind") in _FULL_ATTENTION


def _hash(value: Any) -> PageHash:
    if isinstance(value, bytes):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return value & 0xFFFF_FFFF_FFFF_FFFF  # some publishers send signed numbers
    raise ProtocolError(f"a block hash has type {type(value).__name__}")

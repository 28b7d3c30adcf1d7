"""Engines' KV events: every format, their effect, and the repair of gaps."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from conductor.kv_events.engine_blocks import EngineBlocks
from conductor.kv_events.events import PagesCleared, PagesRemoved, PagesStored, parse_batch
from conductor.kv_events.feeds import EngineFeeds
from conductor.kv_events.subscriber import KvEventSubscriber
from kvpool.blocks.hashing import hash_chain
from kvpool.blocks.layout import Layout, Namespace
from kvpool.errors import ProtocolError
from kvpool.wire import messages as m

LAYOUT = Layout("bfloat16", layers=1, kv_heads=1, head_dim=8, block_tokens=64)
SPACE = Namespace("model", "r", LAYOUT)
PAGE = 16
TOKENS = list(range(1000, 1000 + 5 * 64))
CHAIN = hash_chain(SPACE, TOKENS)
encode = msgspec.msgpack.encode


def stored_array(pages: list[Any], parent: Any, tokens: list[int], *more: Any) -> list[Any]:
    return ["BlockStored", pages, parent, tokens, len(tokens) // len(pages), None, *more]


def stored_map(pages: list[Any], parent: Any, tokens: list[int], **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": pages,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": len(tokens) // len(pages),
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize(
    "batch",
    [
        [1.0, [stored_array([1, 2], None, TOKENS[:32])]],
        [1.0, [stored_array([1, 2], None, TOKENS[:32], "GPU", None)], 0],
        [1.0, [stored_array([1, 2], None, TOKENS[:32], "GPU", {"cache_salt": None})], 0],
        [1.0, [stored_map([1, 2], None, TOKENS[:32])], 0],
        {"ts": 1.0, "events": [stored_map([1, 2], None, TOKENS[:32])], "data_parallel_rank": 0},
        {"ts": 1.0, "events": [stored_map([1, 2], None, TOKENS[:32], session_id="s", new=1)]},
    ],
)
def test_every_form_of_a_batch_is_read_alike(batch: Any) -> None:
    parsed = parse_batch(encode(batch))
    assert parsed.events == (PagesStored((1, 2), None, tuple(TOKENS[:32]), 16),)
    assert parsed.ignored == 0


def test_hashes_are_numbers_of_either_sign_or_bytes() -> None:
    events = [stored_array([-1, (1 << 64) - 2, b"h"], -3, TOKENS[:48])]
    [event] = parse_batch(encode([1.0, events])).events
    assert isinstance(event, PagesStored)
    assert event.pages == ((1 << 64) - 1, (1 << 64) - 2, b"h")
    assert event.parent == (1 << 64) - 3


def test_removals_and_clearing_are_read() -> None:
    events = [
        ["BlockRemoved", [1]],
        {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"},
        ["AllBlocksCleared"],
        {"type": "AllBlocksCleared"},
    ]
    parsed = parse_batch(encode([1.0, events]))
    assert parsed.events == (PagesRemoved((1,)), PagesRemoved((2,)), PagesCleared(), PagesCleared())


@pytest.mark.parametrize(
    "event",
    [
        stored_map([1], None, TOKENS[:16], medium="CPU"),
        stored_map([1], None, TOKENS[:16], locality="REMOTE"),
        stored_map([1], None, TOKENS[:16], lora_name="sql"),
        stored_map([1], None, TOKENS[:16], lora_id=3),
        stored_map([1], None, TOKENS[:16], extra_keys=[["salt"]]),
        stored_map([1], None, TOKENS[:16], kv_cache_spec_kind="sliding_window"),
        stored_array([1], None, TOKENS[:16], "GPU", "sql"),
        ["BlockRemoved", [1], "STORAGE"],
        {"type": "SomethingNew"},
    ],
)
def test_pages_that_prefix_hashes_cannot_name_are_ignored_and_counted(event: Any) -> None:
    parsed = parse_batch(encode([1.0, [event]]))
    assert parsed.events == ()
    assert parsed.ignored == 1


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        encode(7),
        encode([1.0]),
        encode(["x", []]),
        encode([1.0, [stored_array([1, 2], None, [*TOKENS[:31], 1 << 40])]]),
        encode([1.0, [["BlockStored", [1], None, TOKENS[:16], 15, None]]]),
        encode([1.0, [["BlockStored", [1.5], None, TOKENS[:16], 16, None]]]),
        encode([1.0, [["BlockStored"]]]),
    ],
)
def test_a_payload_that_is_no_batch_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_batch(payload)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(payload: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        parse_batch(payload)


# ---------------------------------------------------------------- blocks of pages


def pages_of(blocks: EngineBlocks, page: int, count: int, start: int = 0) -> list[int]:
    """Store `count` pages of `page` tokens of TOKENS, one event each; returns their hashes."""
    names = [page * 1000 + start + i for i in range(count)]
    for i, name in enumerate(names):
        at = (start + i) * page
        parent = name - 1 if start + i else None
        blocks.apply(PagesStored((name,), parent, tuple(TOKENS[at : at + page]), page))
    return names


@pytest.mark.parametrize("page", [16, 32, 64, 128, 48])
def test_pages_of_any_size_become_the_pools_blocks(page: int) -> None:
    blocks = EngineBlocks(SPACE)
    count = len(TOKENS) // page
    pages_of(blocks, page, count)
    assert blocks.leading(CHAIN) == count * page // 64


def test_a_block_is_present_while_all_its_pages_are() -> None:
    for lost in range(4):
        blocks = EngineBlocks(SPACE)
        names = pages_of(blocks, PAGE, 7)
        assert blocks.leading(CHAIN) == 1
        names += pages_of(blocks, PAGE, 1, start=7)
        assert blocks.leading(CHAIN) == 2
        blocks.apply(PagesRemoved((names[4 + lost],)))
        assert blocks.leading(CHAIN) == 1
        blocks.apply(PagesRemoved((names[lost],)))
        assert blocks.leading(CHAIN) == 0


def test_a_large_page_takes_all_of_its_blocks_with_it() -> None:
    blocks = EngineBlocks(SPACE)
    names = pages_of(blocks, 128, 2)
    assert blocks.leading(CHAIN) == 4
    blocks.apply(PagesRemoved((names[1],)))
    assert blocks.leading(CHAIN) == 2


def test_pages_of_an_unknown_parent_are_not_believed() -> None:
    blocks = EngineBlocks(SPACE)
    blocks.apply(PagesStored((5,), 4, tuple(TOKENS[:64]), 64))
    assert blocks.leading(CHAIN) == 0
    assert blocks.unknown_parents == 1


def test_memory_is_bounded() -> None:
    blocks = EngineBlocks(SPACE, max_pages=3)
    pages_of(blocks, 64, 5)
    assert blocks.pages == 3
    assert blocks.overflowed == 1
    assert blocks.leading(CHAIN) == 3


def test_clearing_forgets_everything() -> None:
    blocks = EngineBlocks(SPACE)
    pages_of(blocks, 64, 5)
    blocks.apply(PagesCleared())
    assert (blocks.leading(CHAIN), blocks.pages, len(blocks)) == (0, 0, 0)


# ---------------------------------------------------------------- following a publisher


class Publisher:
    """A publisher like an engine's: PUB for events, ROUTER for replays."""

    def __init__(self, kept: int = 100) -> None:
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.router = self.context.socket(zmq.ROUTER)
        self.endpoint = f"tcp://127.0.0.1:{self.pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replays = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self.next = 0
        self.kept = kept
        self.history: list[tuple[int, bytes]] = []
        self.task = asyncio.create_task(self.serve())

    async def publish(self, event: Any, *, is_lost: bool = False) -> None:
        payload = encode([time.time(), [event], 0])
        self.history = [*self.history, (self.next, payload)][-self.kept :]
        if not is_lost:
            await self.pub.send_multipart([b"", self.next.to_bytes(8, "big"), payload])
        self.next += 1

    async def page(self, index: int, **how: Any) -> None:
        parent = index - 1 if index else None
        tokens = TOKENS[index * 64 : index * 64 + 64]
        await self.publish(stored_map([index], parent, tokens), **how)

    async def serve(self) -> None:
        while True:
            who, _, first = await self.router.recv_multipart()
            for sequence, payload in self.history:
                if sequence >= int.from_bytes(first, "big"):
                    number = sequence.to_bytes(8, "big")
                    await self.router.send_multipart([who, b"", number, payload])
            await self.router.send_multipart([who, b"", (-1).to_bytes(8, "big", signed=True), b""])

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.context.destroy(linger=0)


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    publisher = Publisher()
    yield publisher
    await publisher.close()


async def until(claim: Callable[[], bool], act: Callable[[], Any] | None = None) -> None:
    """Repeat `act` until `claim`: a subscriber has to connect to its publisher first."""
    deadline = time.monotonic() + 20
    while not claim():
        assert time.monotonic() < deadline, "not within 20 s"
        if act is not None:
            await act()
        await asyncio.sleep(0.02)


@pytest.fixture
async def feed(publisher: Publisher) -> AsyncIterator[KvEventSubscriber]:
    counters: Counter[str] = Counter()
    feed = KvEventSubscriber(
        "e", publisher.endpoint, publisher.replays, EngineBlocks(SPACE), counters
    )
    assert not counters
    task = asyncio.create_task(feed.run())
    yield feed
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def nothing(publisher: Publisher) -> Callable[[], Any]:
    return lambda: publisher.publish({"type": "BlockRemoved", "block_hashes": [], "medium": None})


async def test_earlier_events_are_replayed_and_later_ones_follow(
    publisher: Publisher, feed: KvEventSubscriber
) -> None:
    await publisher.page(0)  # nobody listens yet
    await until(lambda: feed.blocks.leading(CHAIN) == 1, nothing(publisher))
    await publisher.page(1)
    await until(lambda: feed.blocks.leading(CHAIN) == 2)
    await publisher.publish({"type": "AllBlocksCleared"})
    await until(lambda: feed.blocks.leading(CHAIN) == 0)
    assert feed.is_synchronised


async def test_a_gap_is_healed_by_replay(publisher: Publisher, feed: KvEventSubscriber) -> None:
    await until(lambda: feed.is_synchronised, nothing(publisher))
    await publisher.page(0, is_lost=True)
    await publisher.page(1)
    await until(lambda: feed.blocks.leading(CHAIN) == 2)
    assert feed._counters["kv_events:gaps"] == 1


async def test_a_gap_that_cannot_be_healed_clears_the_engine(publisher: Publisher) -> None:
    counters: Counter[str] = Counter()
    feed = KvEventSubscriber("e", publisher.endpoint, "", EngineBlocks(SPACE), counters)
    task = asyncio.create_task(feed.run())
    try:
        await until(lambda: feed.is_synchronised, nothing(publisher))
        await publisher.page(0)
        await until(lambda: feed.blocks.leading(CHAIN) == 1)
        await publisher.publish({"type": "BlockRemoved", "block_hashes": [0]}, is_lost=True)
        await publisher.publish({"type": "BlockRemoved", "block_hashes": [], "medium": None})
        await until(lambda: counters["kv_events:lost"] > 1)
        assert feed.blocks.leading(CHAIN) == 0
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_unreadable_events_drop_all_blocks_and_are_repaired(
    publisher: Publisher, feed: KvEventSubscriber
) -> None:
    await publisher.page(0)
    await until(lambda: feed.blocks.leading(CHAIN) == 1, nothing(publisher))
    await publisher.pub.send_multipart([b"", publisher.next.to_bytes(8, "big"), b"\xc1"])
    await until(lambda: not feed.is_synchronised)
    assert feed.blocks.leading(CHAIN) == 0
    await until(lambda: feed.blocks.leading(CHAIN) == 1, nothing(publisher))


async def test_a_restarted_publisher_is_noticed(
    publisher: Publisher, feed: KvEventSubscriber
) -> None:
    await publisher.page(0)
    await publisher.page(1)
    await until(lambda: feed.blocks.leading(CHAIN) == 2, nothing(publisher))
    publisher.next, publisher.history = 0, []
    await publisher.page(0)
    await until(lambda: feed.blocks.leading(CHAIN) == 1)


async def test_engines_are_followed_while_they_are_members(publisher: Publisher) -> None:
    engines = EngineFeeds()
    worker = m.WorkerDescriptor(
        *("w", 1, "both", "h", "a", SPACE, "model", 100),
        kv_events=publisher.endpoint,
        kv_replay=publisher.replays,
    )
    silent = m.WorkerDescriptor("s", 1, "both", "h", "a", SPACE, "model", 100)
    try:
        engines.follow([worker, silent])
        await publisher.page(0)
        await until(
            lambda: engines.leading(SPACE.namespace_id, CHAIN) == {"w": 1}, nothing(publisher)
        )
        assert engines.stats()["kv_events:engines"] == 1
        assert engines.leading(b"other", CHAIN) == {}
        engines.follow([silent])
        assert engines.leading(SPACE.namespace_id, CHAIN) == {}
    finally:
        await engines.close()

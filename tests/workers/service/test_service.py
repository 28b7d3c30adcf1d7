"""The load that a worker reports while it serves, and the deadline of what it was granted."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import workers.service.service
from kvpool.blocks.hashing import hash_chain, pack_hashes, token_bytes
from kvpool.blocks.layout import Namespace
from kvpool.client import AsyncPool
from kvpool.config.settings import FakeEngineConfig
from kvpool.errors import InvalidArgument, Overloaded
from kvpool.wire import messages as m
from workers.engine.fake_engine import FakeEngine
from workers.engine.prefix_cache import LocalPrefixCache
from workers.service.load import Load
from workers.service.service import WorkerService

CONFIG = FakeEngineConfig(layers=1, bytes_per_token=16)
PROMPT = np.arange(40)
BLOCK = 16


class Gate:
    """Replaces the engine's work: a call waits until the gate is opened."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.open = threading.Event()

    def sleep(self, _seconds: float) -> None:
        self.arrived.set()
        assert self.open.wait(10)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


def service_of(gate: Gate, max_concurrent: int = 4) -> tuple[WorkerService, Namespace]:
    engine = FakeEngine(CONFIG, block_tokens=BLOCK, sleep=gate.sleep)
    space = Namespace("fake", "r", engine.layout)
    pool = AsyncPool(node="127.0.0.1:9", host_label="here")  # no process listens there
    cache = LocalPrefixCache(0, BLOCK)
    return WorkerService(engine, space, pool, cache, max_concurrent=max_concurrent), space


def generate(space: Namespace, max_tokens: int = 3) -> m.Generate:
    hashes = pack_hashes(hash_chain(space, PROMPT))
    tokens, sampling = bytes(token_bytes(PROMPT)), m.Sampling(max_tokens, ignore_eos=True)
    ids = space.namespace_id
    return m.Generate("r", ids, tokens, hashes, [], [], sampling, 10.0, use_pool=False)


async def arrived(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.arrived.wait, 10)
    gate.arrived.clear()


async def test_a_prompt_is_queued_until_its_prefill_has_ended(gate: Gate) -> None:
    service, space = service_of(gate)
    assert service.load.report().running == 0
    stream = service.generate(generate(space))
    first = asyncio.ensure_future(anext(stream))
    await arrived(gate)  # the prefill runs
    load = service.load.report()
    assert (load.running, load.queued_prefill_tokens, load.decode_sequences) == (1, len(PROMPT), 0)
    gate.open.set()
    await first  # the first token: the whole prompt is computed
    load = service.load.report()
    assert (load.running, load.queued_prefill_tokens, load.decode_sequences) == (1, 0, 1)
    assert load.decode_context_tokens == len(PROMPT)
    async for _ in stream:
        pass
    load = service.load.report()
    assert (load.running, load.decode_sequences, load.decode_context_tokens) == (0, 0, 0)
    assert service.counters["requests"] == 1
    service.close()


async def test_a_request_that_fails_leaves_no_load(gate: Gate) -> None:
    service, space = service_of(gate)
    gate.open.set()
    wrong = generate(space, max_tokens=-1)
    with pytest.raises(InvalidArgument):
        await anext(service.generate(wrong))
    load = service.load.report()
    assert (load.running, load.queued_prefill_tokens) == (0, 0)
    service.close()


def test_requests_beyond_the_limit_are_refused_and_counted() -> None:
    counters: Counter[str] = Counter()
    load = Load(1, counters)
    with load.admitted(5):
        with pytest.raises(Overloaded), load.admitted(5):
            pass
        assert load.report().queued_prefill_tokens == 5
    with load.admitted(5):
        pass
    assert counters == {"requests": 2, "refused": 1}


async def test_a_grants_deadline_counts_from_when_it_was_requested(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[float] = []

    class Caught(Exception):
        pass

    def sender(_link: Any, reservation: Any, *_rest: Any) -> None:
        deadlines.append(reservation.deadline)
        raise Caught

    monkeypatch.setattr(workers.service.service, "LayerSender", sender)
    service, space = service_of(gate)
    node = m.NodeDescriptor("n", 1, "here", "127.0.0.1:9")
    hashes = hash_chain(space, PROMPT)
    granted = m.ReserveReply(1, bytes(2), bytes(32), 4096, 20.0)
    grant = m.Grant(node, granted, np.arange(2, dtype="<u4").tobytes(), age_s=7.0)
    tokens = bytes(token_bytes(PROMPT))
    request = m.Prefill("r", space.namespace_id, tokens, pack_hashes(hashes), [], [], grant, 10.0)
    before = time.monotonic()
    with pytest.raises(Caught):
        await service.prefill(request)
    assert before + 13.0 <= deadlines[0] <= time.monotonic() + 13.0
    service.close()

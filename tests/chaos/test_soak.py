"""Lookups of every kind, a hundred thousand in full, against one node: nothing stays pinned, nothing grows, nothing is lost.

Whoever only asks must not wear the pool out: probes take no lease, pins that nobody reads or releases end by
themselves, callers that give up or go away leave nothing behind.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from kvpool import AsyncPool
from kvpool.blocks.hashing import pack_hashes
from kvpool.errors import BlockMiss, DeadlineExceeded
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from tests.chaos.keyed import NAMESPACE, content, contents, prompt
from tests.support.process_cluster import Cluster, wait_until
from tests.support.sizes import random_seed, scaled

LOOKUPS = scaled(25_000, 100_000, "KVPOOL_SOAK_LOOKUPS")
PROMPTS = 20
PROMPT_BLOCKS = 15
AT_ONCE = 64
MAX_GROWTH_BYTES = 32 << 20
SPACE = NAMESPACE.namespace_id
TIMEOUT_S = 20.0
# 300 blocks, all of them on NVMe, 200 slots in DRAM: lookups move blocks, and lose none. Ten slots a slab.
SETTINGS = (
    *("node.dram_bytes=4800KiB", "node.advanced.slab_bytes=240KiB", "node.nvme_bytes=9600KiB"),
    *(
        "node.advanced.lease_s=1",
        "node.advanced.grace_s=0.2",
        "node.advanced.quarantine_s=0.5",
        "node.transports=shm",
    ),
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    with running.supervisor:
        running.start_node("n0", *SETTINGS, f"node.nvme_directories={tmp_path / 'nvme'}")
        yield running


class Soaker:
    """Looks up the blocks of a node, in every possible way."""

    def __init__(self, address: str, prompts: list[list[bytes]], rng: random.Random) -> None:
        self.outcomes: Counter[str] = Counter()
        self._address = address
        self._prompts = prompts
        self._rng = rng
        self._wire = WireClient(address, "soaker")
        self._passing = 0

    async def close(self) -> None:
        await self._wire.close()

    async def one(self) -> None:
        """One lookup of a random kind."""
        kinds = (
            *[self.probe] * 40,
            *[self.pin_and_release] * 20,
            *[self.pin_twice] * 10,
            *[self.prefetch] * 10,
            *[self.get] * 8,
            *[self.pin_of_a_run_with_a_hole] * 6,
            *[self.pin_and_forget] * 3,
            *[self.pin_and_give_up] * 2,
            self.pin_and_disconnect,
        )
        kind = self._rng.choice(kinds)
        # A few prompts are asked for most of the time, as everywhere.
        number = min(int(self._rng.expovariate(0.4)), PROMPTS - 1)
        await kind(self._prompts[number][: self._rng.randint(1, PROMPT_BLOCKS)])
        self.outcomes[kind.__name__] += 1

    async def probe(self, hashes: Sequence[bytes]) -> None:
        """Ask for the blocks that are there."""
        reply = await self._wire.call(m.NodeLookup(SPACE, pack_hashes(hashes)), TIMEOUT_S)
        assert reply.found == len(hashes)

    async def _pin(self, hashes: Sequence[bytes], ttl_s: float = 1.0) -> m.PinReply:
        request = m.Pin(SPACE, pack_hashes(hashes), ttl_s)
        reply: m.PinReply = await self._wire.call(request, TIMEOUT_S)
        return reply

    async def pin_and_release(self, hashes: Sequence[bytes]) -> None:
        """Hold blocks, read nothing, let go."""
        reply = await self._pin(hashes)
        await self._wire.send(m.Release([reply.lease_id]))

    async def pin_twice(self, hashes: Sequence[bytes]) -> None:
        """The same request twice, as a retry does; released both, in the other order, one of them twice."""
        first, second = await asyncio.gather(self._pin(hashes), self._pin(hashes))
        await self._wire.send(m.Release([second.lease_id, second.lease_id, first.lease_id]))

    async def pin_and_forget(self, hashes: Sequence[bytes]) -> None:
        """Hold blocks and never come back to them."""
        await self._pin(hashes, ttl_s=self._rng.uniform(0.01, 0.1))

    async def pin_and_give_up(self, hashes: Sequence[bytes]) -> None:
        """A caller whose patience ends before the answer may have come."""
        request = m.Pin(SPACE, pack_hashes(hashes), 1.0)
        try:
            await self._wire.call(request, self._rng.uniform(0.0, 0.002))
        except DeadlineExceeded:
            self.outcomes["given up"] += 1

    async def pin_and_disconnect(self, hashes: Sequence[bytes]) -> None:
        """A client that goes away with what it holds."""
        self._passing += 1
        wire = WireClient(self._address, f"passing-{self._passing}")
        await wire.call(m.Pin(SPACE, pack_hashes(hashes), 1.0), TIMEOUT_S)
        await wire.close()

    async def pin_of_a_run_with_a_hole(self, hashes: Sequence[bytes]) -> None:
        """A run that is not all here: what leads it is held, and a reason is given for the rest."""
        unknown = self._rng.randbytes(16)
        reply = await self._pin([*hashes, unknown, *hashes])
        assert reply.found <= len(hashes)
        assert reply.miss_reason
        if reply.lease_id:
            await self._wire.send(m.Release([reply.lease_id]))

    async def prefetch(self, hashes: Sequence[bytes]) -> None:
        """Have blocks brought into DRAM and do not read them."""
        reply = await self._wire.call(m.Prefetch(SPACE, pack_hashes(hashes)), TIMEOUT_S)
        assert reply.accepted + reply.resident + reply.declined == len(hashes)

    async def get(self, hashes: Sequence[bytes]) -> None:
        """Read one block for its bytes."""
        try:
            reply = await self._wire.call(m.GetInline(SPACE, hashes[-1]), TIMEOUT_S)
        except BlockMiss:
            self.outcomes["get: no room in DRAM just now"] += 1
        else:
            assert reply.data == content(hashes[-1])

    async def hits(self) -> list[tuple[int, int]]:
        """How much of each prompt is found, and can be held."""
        found = []
        for hashes in self._prompts:
            probed = await self._wire.call(m.NodeLookup(SPACE, pack_hashes(hashes)), TIMEOUT_S)
            pinned = await self._pin(hashes)
            await self._wire.call(m.Release([pinned.lease_id]), TIMEOUT_S)
            found.append((probed.found, pinned.found))
        return found


@pytest.mark.slow
async def test_lookups_of_every_kind_leave_the_node_as_it_was(cluster: Cluster) -> None:
    seed = random_seed()
    print(f"{LOOKUPS} lookups, seed {seed}")
    address = cluster.nodes["n0"]["wire"]
    prompts = [prompt(number, PROMPT_BLOCKS) for number in range(PROMPTS)]

    def on_disk() -> int:
        return sum(t["blocks"] for t in cluster.node_stats("n0")["tiers"] if t["tier"] == "nvme")

    async with AsyncPool(node=address, host_label="here") as pool:
        for count, hashes in enumerate(prompts, 1):
            await pool.put(NAMESPACE, hashes, contents(hashes))
            # DRAM holds two thirds of them: a disk that is behind would lose those that make room.
            wanted = count * PROMPT_BLOCKS
            await asyncio.to_thread(
                wait_until, lambda wanted=wanted: on_disk() == wanted, "all is written through"
            )

    node = psutil.Process(cluster.member("n0").process.pid)
    soaker = Soaker(address, prompts, random.Random(seed))
    at_first = await soaker.hits()
    assert at_first == [(PROMPT_BLOCKS, PROMPT_BLOCKS)] * PROMPTS
    warm_bytes = 0
    for done in range(0, LOOKUPS, AT_ONCE):
        await asyncio.gather(*(soaker.one() for _ in range(AT_ONCE)))
        if not warm_bytes and done >= LOOKUPS // 10:
            warm_bytes = node.memory_info().rss
    grown = node.memory_info().rss - warm_bytes
    wait_until(lambda: cluster.is_settled("n0"), "nothing is pinned", 20)
    assert await soaker.hits() == at_first
    await soaker.close()
    wait_until(lambda: cluster.is_settled("n0"), "nothing is pinned", 20)
    counters = cluster.node_stats("n0")["counters"]
    print(f"{grown >> 10} KiB more; {dict(soaker.outcomes)}")
    print({name: count for name, count in counters.items() if "miss" in name or "evict" in name})
    assert grown < MAX_GROWTH_BYTES
    assert counters.get("corrupt_blocks", 0) == counters.get("disk_errors", 0) == 0
    assert counters["promoted"] > 100  # the lookups did move blocks between the tiers
    assert soaker.outcomes["given up"] > 0
    assert "Traceback" not in cluster.member("n0").log_path.read_text()

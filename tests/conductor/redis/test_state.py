"""Two conductors of one pool in this process, on a real Valkey, share their state."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from conductor.cluster.cluster import Cluster
from conductor.cluster.members import Members
from conductor.gateway.gateway import Gateway
from conductor.index.contract import Holders
from conductor.index.memory import MemoryIndex
from conductor.members.membership import MembershipConfig, State
from conductor.redis.client import RedisClient
from conductor.redis.state import RedisState
from conductor.requests.admission import AdmissionLimits
from conductor.requests.lifecycle import Patience
from conductor.requests.request_log import RequestLog
from conductor.scheduling.scheduler import SchedulerConfig
from kvpool.blocks.hashing import hash_chain, pack_hashes
from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import LayoutMismatch, UnknownNamespace
from kvpool.wire import messages as m
from tests.conductor.index.test_conformance import CHAIN
from tests.support import valkey
from tests.support.scripted import generation_request
from tests.support.virtual_gateway import VirtualNode, VirtualWorker

NAMESPACE = Namespace("m", "r", Layout("bfloat16", 2, 2, 8, block_tokens=4))
LIMITS = MembershipConfig(suspect_after_s=4.0, dead_after_s=20.0, sweep_s=1.0, stall_s=100.0)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def shared_cluster(
    name: str, client: RedisClient, pool: str, clock: Callable[[], float] = time.monotonic
) -> tuple[Cluster, RedisState]:
    members = Members.none_yet(LIMITS, clock())
    counters: Counter[str] = Counter()
    state = RedisState(client, name, members, MemoryIndex(), counters, pool=pool, clock=clock)
    cluster = Cluster(name, 1, members, state, SchedulerConfig(), counters=counters, clock=clock)
    return cluster, state


class Two:
    """Conductors `a` and `b`, and a clock that only `tick` moves."""

    def __init__(self, clients: tuple[RedisClient, RedisClient], pool: str) -> None:
        self.clock = Clock()
        (self.a, self.state_a), (self.b, self.state_b) = (
            shared_cluster(name, client, pool, self.clock)
            for name, client in zip("ab", clients, strict=True)
        )

    async def tick(self, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        a, b = (self.a, self.state_a), (self.b, self.state_b)
        for cluster, state in (a, b, a):
            await cluster.sweep()
            await state.tend()


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    clients = (
        RedisClient(valkey.standalone(), timeout_s=5),
        RedisClient(valkey.standalone(), timeout_s=5),
    )
    yield Two(clients, valkey.new_pool())
    for client in clients:
        await client.close()


def node(epoch: int = 1) -> m.NodeJoin:
    return m.NodeJoin(m.NodeDescriptor("n", epoch, "host", "127.0.0.1:1"), [NAMESPACE])


def report(
    sequence: int, hashes: list[bytes], epoch: int = 1, kind: str = "stored"
) -> m.NodeEvents:
    events = [m.BlockEvent(kind, NAMESPACE.namespace_id, pack_hashes(hashes), Tier.DRAM)]
    return m.NodeEvents("n", epoch, sequence, events, kind == "stored", kind == "stored")


def beat(epoch: int = 1, sequence: int = 1) -> m.NodeHeartbeat:
    stats = m.NodeStatsReply("n", epoch, "host", 1.0, [], 0, 0, 0, {})
    return m.NodeHeartbeat("n", epoch, sequence, stats)


def worker(layout: Layout = NAMESPACE.layout, epoch: int = 1) -> m.WorkerJoin:
    namespace = Namespace("m", "r", layout)
    return m.WorkerJoin(
        m.WorkerDescriptor("w", epoch, "decode", "h", "127.0.0.1:2", namespace, "m", 4096)
    )


def look(hashes: list[bytes] = CHAIN) -> m.Lookup:
    return m.Lookup(NAMESPACE.namespace_id, pack_hashes(hashes))


async def test_a_member_of_one_conductor_is_a_member_of_the_other(two: Two) -> None:
    await two.a.node_reports.join(node())
    await two.a.node_reports.events(report(1, CHAIN))
    await two.a.worker_reports.join(worker())
    load = m.WorkerLoad(3, 100, 2, 64, 0.0, 0.0)
    two.a.worker_reports.heartbeat(m.WorkerHeartbeat("w", 1, load))
    await two.tick()
    assert (await two.b.lookups.lookup(look())).found == len(CHAIN)
    assert two.b.overview.index_blocks() == two.b.overview.stats().index_blocks == len(CHAIN)
    assert two.b.view.inputs().workers["w"].load == load
    assert two.b.overview.node_list().nodes[0].descriptor == node().descriptor


async def test_a_namespace_registered_at_one_conductor_is_found_by_the_other_at_once(
    two: Two,
) -> None:
    with pytest.raises(UnknownNamespace):
        await two.b.lookups.lookup(look())
    await two.a.namespaces.register(m.RegisterNamespace(NAMESPACE))
    assert (await two.b.lookups.lookup(look())).found == 0


async def test_two_layouts_of_one_owner_are_refused_across_conductors(two: Two) -> None:
    await two.a.worker_reports.join(worker())
    other = Layout("float16", 2, 2, 8, block_tokens=4)
    with pytest.raises(LayoutMismatch):
        await two.b.worker_reports.join(worker(other))
    assert len(two.b.members.workers) == 0


async def test_a_member_that_speaks_to_another_conductor_has_to_join_there(two: Two) -> None:
    await two.a.node_reports.join(node())
    await two.a.node_reports.events(report(1, CHAIN))
    await two.tick()
    assert two.b.node_reports.heartbeat(beat()).resync
    assert (await two.b.node_reports.events(report(2, CHAIN[:1], kind="removed"))).resync
    await two.b.node_reports.join(node())
    await two.b.node_reports.events(report(2, CHAIN[:3]))
    await two.tick()
    assert not two.b.node_reports.heartbeat(beat()).resync
    assert two.a.node_reports.heartbeat(beat()).resync  # and has left the first
    for cluster in (two.a, two.b):
        assert (await cluster.lookups.lookup(look())).found == 3


async def test_an_older_life_cannot_join_at_another_conductor(two: Two) -> None:
    await two.a.node_reports.join(node(epoch=2))
    assert (await two.b.node_reports.join(node(epoch=1))).resync
    assert len(two.b.members.nodes) == 0


async def test_silence_is_seen_by_all_and_death_is_agreed_on(two: Two) -> None:
    await two.a.node_reports.join(node())
    await two.a.node_reports.events(report(1, CHAIN))
    await two.tick()
    await two.tick(5)
    assert [c.members.nodes.members()[0].state for c in (two.a, two.b)] == [State.SUSPECT] * 2
    assert (await two.b.lookups.lookup(look())).found == 0
    two.a.node_reports.heartbeat(beat())
    await two.tick()
    assert [c.members.nodes.members()[0].state for c in (two.a, two.b)] == [State.LIVE] * 2
    await two.tick(25)
    await two.tick()
    assert len(two.a.members.nodes) == len(two.b.members.nodes) == 0
    assert two.state_a.index.blocks() == 0


async def test_a_conductor_that_is_gone_takes_no_member_with_it(two: Two) -> None:
    await two.a.node_reports.join(node())
    await two.a.node_reports.events(report(1, CHAIN))
    await two.tick()
    two.clock.now += 3  # `a` is gone from here on; its node turns to `b`
    await two.b.node_reports.join(node())
    await two.b.node_reports.events(report(1, CHAIN))
    for _ in range(10):
        two.clock.now += 3
        two.b.node_reports.heartbeat(beat())
        await two.b.sweep()
        await two.state_b.tend()
    assert [n.state for n in two.b.members.nodes] == [State.LIVE]
    assert (await two.b.lookups.lookup(look())).found == len(CHAIN)
    assert two.state_b.shared.conductors == [""]  # `a` is no longer listed


async def test_leaving_one_conductor_is_leaving_all(two: Two) -> None:
    await two.a.node_reports.join(node())
    await two.a.node_reports.events(report(1, CHAIN))
    await two.a.worker_reports.join(worker())
    await two.tick()
    await two.a.node_reports.leave(m.NodeLeave("n", 1))
    await two.a.worker_reports.leave(m.WorkerLeave("w", 1))
    await two.tick()
    assert len(two.b.members.nodes) == len(two.b.members.workers) == 0
    assert (await two.b.lookups.lookup(look())).found == 0


async def test_draining_reported_to_another_conductor_reaches_all(two: Two) -> None:
    await two.a.node_reports.join(node())
    await two.tick()
    await two.b.node_reports.draining(m.NodeDraining("n", 1))
    for _ in range(2):
        two.clock.now += 0.1
        two.a.node_reports.heartbeat(beat())
        await two.tick()
    assert [c.members.nodes.members()[0].state for c in (two.a, two.b)] == [State.DRAINING] * 2


async def test_a_report_that_redis_missed_ends_in_a_full_report(two: Two) -> None:
    await two.a.node_reports.join(node())
    await two.a.node_reports.events(report(1, CHAIN[:2]))
    two.state_a.redis._failed("test")
    reply = await two.a.node_reports.events(report(2, CHAIN[:1], kind="removed"))
    assert not reply.resync  # there is nobody to report to
    assert "Redis is down" in two.a.overview.notice()
    assert (await two.a.lookups.lookup(look())).found == 0  # it knows better than Redis
    await two.tick()  # the probe is answered
    assert two.a.overview.notice() == ""
    assert two.a.node_reports.heartbeat(beat(sequence=2)).resync
    await two.a.node_reports.join(node())
    await two.a.node_reports.events(report(3, CHAIN[1:3]))
    assert not two.a.node_reports.heartbeat(beat(sequence=3)).resync
    assert (await two.b.lookups.lookup(look(CHAIN[1:]))).found == 2


@pytest.mark.parametrize("mode", ["local", "disaggregated"])
async def test_a_request_without_trouble_asks_redis_for_its_chain_once(mode: str) -> None:
    client = RedisClient(valkey.standalone(), timeout_s=5)
    cluster, state = shared_cluster("a", client, valkey.new_pool())
    gateway = Gateway(cluster, RequestLog(), AdmissionLimits(4), patience=Patience())
    for name, role in (("p", "prefill"), ("d", "decode")):
        gateway.connections.add(name, VirtualWorker(name, role, prefill_s=0.0, first_s=0.0))
        descriptor = m.WorkerDescriptor(name, 1, role, "host", name, NAMESPACE, "m", 4096)
        await cluster.worker_reports.join(m.WorkerJoin(descriptor))
    gateway.connections.add("127.0.0.1:1", VirtualNode("n"))
    prompt = list(range(42))
    known = hash_chain(NAMESPACE, prompt)[:4]
    await cluster.node_reports.join(node())
    await cluster.node_reports.events(report(1, known))
    asked = 0
    holders = state.index.holders

    async def counted(namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        nonlocal asked
        asked += 1
        return await holders(namespace_id, hashes)

    state.index.holders = counted  # type: ignore[method-assign]
    run = await gateway.admit(generation_request(prompt, mode=mode, max_tokens=3))
    while await run.next_item() is not None:
        pass
    assert run.lifecycle.status == "ok"
    assert run.lifecycle.measured.is_prefilled_remotely == (mode == "disaggregated")
    assert asked == 1
    await gateway.close()
    await client.close()

"""Two conductors of one pool in this process, on a real Valkey, share their state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from conductor.gateway.gateway import Gateway
from conductor.index.contract import Holders
from conductor.index.memory import MemoryIndex
from conductor.members.membership import MembershipConfig, State
from conductor.redis.client import RedisClient
from conductor.redis.shared_state import SharedCluster
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


class Two:
    """Conductors `a` and `b`, and a clock that only `tick` moves."""

    def __init__(self, clients: tuple[RedisClient, RedisClient], pool: str) -> None:
        self.clock = Clock()
        self.a, self.b = (
            SharedCluster(
                name,
                1,
                MemoryIndex(),
                LIMITS,
                SchedulerConfig(),
                client,
                pool=pool,
                clock=self.clock,
            )
            for name, client in zip("ab", clients, strict=True)
        )

    async def tick(self, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        for cluster in (self.a, self.b, self.a):
            cluster.sweep()
            await cluster.tend()


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
    await two.a.join_node(node())
    await two.a.take_events(report(1, CHAIN))
    await two.a.join_worker(worker())
    load = m.WorkerLoad(3, 100, 2, 64, 0.0, 0.0)
    two.a.worker_heartbeat(m.WorkerHeartbeat("w", 1, load))
    await two.tick()
    assert (await two.b.answer_lookup(look())).found == len(CHAIN)
    assert two.b.index_blocks() == two.b.stats().index_blocks == len(CHAIN)
    assert two.b.scheduling_inputs().workers["w"].load == load
    assert two.b.node_list().nodes[0].descriptor == node().descriptor


async def test_a_namespace_registered_at_one_conductor_is_found_by_the_other_at_once(
    two: Two,
) -> None:
    with pytest.raises(UnknownNamespace):
        await two.b.answer_lookup(look())
    await two.a.answer_registration(m.RegisterNamespace(NAMESPACE))
    assert (await two.b.answer_lookup(look())).found == 0


async def test_two_layouts_of_one_owner_are_refused_across_conductors(two: Two) -> None:
    await two.a.join_worker(worker())
    other = Layout("float16", 2, 2, 8, block_tokens=4)
    with pytest.raises(LayoutMismatch):
        await two.b.join_worker(worker(other))
    assert len(two.b.workers) == 0


async def test_a_member_that_speaks_to_another_conductor_has_to_join_there(two: Two) -> None:
    await two.a.join_node(node())
    await two.a.take_events(report(1, CHAIN))
    await two.tick()
    assert two.b.node_heartbeat(beat()).resync
    assert (await two.b.take_events(report(2, CHAIN[:1], kind="removed"))).resync
    await two.b.join_node(node())
    await two.b.take_events(report(2, CHAIN[:3]))
    await two.tick()
    assert not two.b.node_heartbeat(beat()).resync
    assert two.a.node_heartbeat(beat()).resync  # and has left the first
    for cluster in (two.a, two.b):
        assert (await cluster.answer_lookup(look())).found == 3


async def test_an_older_life_cannot_join_at_another_conductor(two: Two) -> None:
    await two.a.join_node(node(epoch=2))
    assert (await two.b.join_node(node(epoch=1))).resync
    assert len(two.b.nodes) == 0


async def test_silence_is_seen_by_all_and_death_is_agreed_on(two: Two) -> None:
    await two.a.join_node(node())
    await two.a.take_events(report(1, CHAIN))
    await two.tick()
    await two.tick(5)
    assert [c.nodes.members()[0].state for c in (two.a, two.b)] == [State.SUSPECT] * 2
    assert (await two.b.answer_lookup(look())).found == 0
    two.a.node_heartbeat(beat())
    await two.tick()
    assert [c.nodes.members()[0].state for c in (two.a, two.b)] == [State.LIVE] * 2
    await two.tick(25)
    await two.tick()
    assert len(two.a.nodes) == len(two.b.nodes) == 0
    assert two.a.shared_index.blocks() == 0


async def test_a_conductor_that_is_gone_takes_no_member_with_it(two: Two) -> None:
    await two.a.join_node(node())
    await two.a.take_events(report(1, CHAIN))
    await two.tick()
    two.clock.now += 3  # `a` is gone from here on; its node turns to `b`
    await two.b.join_node(node())
    await two.b.take_events(report(1, CHAIN))
    for _ in range(10):
        two.clock.now += 3
        two.b.node_heartbeat(beat())
        two.b.sweep()
        await two.b.tend()
    assert [n.state for n in two.b.nodes] == [State.LIVE]
    assert (await two.b.answer_lookup(look())).found == len(CHAIN)
    assert two.b.shared_members.conductors == [""]  # `a` is no longer listed


async def test_leaving_one_conductor_is_leaving_all(two: Two) -> None:
    await two.a.join_node(node())
    await two.a.take_events(report(1, CHAIN))
    await two.a.join_worker(worker())
    await two.tick()
    two.a.node_leave(m.NodeLeave("n", 1))
    two.a.worker_leave(m.WorkerLeave("w", 1))
    await two.tick()
    assert len(two.b.nodes) == len(two.b.workers) == 0
    assert (await two.b.answer_lookup(look())).found == 0


async def test_draining_reported_to_another_conductor_reaches_all(two: Two) -> None:
    await two.a.join_node(node())
    await two.tick()
    await two.b.drain_node(m.NodeDraining("n", 1))
    for _ in range(2):
        two.clock.now += 0.1
        two.a.node_heartbeat(beat())
        await two.tick()
    assert [c.nodes.members()[0].state for c in (two.a, two.b)] == [State.DRAINING] * 2


async def test_a_report_that_redis_missed_ends_in_a_full_report(two: Two) -> None:
    await two.a.join_node(node())
    await two.a.take_events(report(1, CHAIN[:2]))
    two.a.redis._failed("test")
    reply = await two.a.take_events(report(2, CHAIN[:1], kind="removed"))
    assert not reply.resync  # there is nobody to report to
    assert "Redis is down" in two.a.notice()
    assert (await two.a.answer_lookup(look())).found == 0  # it knows better than Redis
    await two.tick()  # the probe is answered
    assert two.a.notice() == ""
    assert two.a.node_heartbeat(beat(sequence=2)).resync
    await two.a.join_node(node())
    await two.a.take_events(report(3, CHAIN[1:3]))
    assert not two.a.node_heartbeat(beat(sequence=3)).resync
    assert (await two.b.answer_lookup(look(CHAIN[1:]))).found == 2


@pytest.mark.parametrize("mode", ["local", "disaggregated"])
async def test_a_request_without_trouble_asks_redis_for_its_chain_once(mode: str) -> None:
    client = RedisClient(valkey.standalone(), timeout_s=5)
    cluster = SharedCluster(
        "a", 1, MemoryIndex(), LIMITS, SchedulerConfig(), client, pool=valkey.new_pool()
    )
    gateway = Gateway(cluster, RequestLog(), AdmissionLimits(4), patience=Patience())
    for name, role in (("p", "prefill"), ("d", "decode")):
        gateway.connections.add(name, VirtualWorker(name, role, prefill_s=0.0, first_s=0.0))
        descriptor = m.WorkerDescriptor(name, 1, role, "host", name, NAMESPACE, "m", 4096)
        await cluster.join_worker(m.WorkerJoin(descriptor))
    gateway.connections.add("127.0.0.1:1", VirtualNode("n"))
    prompt = list(range(42))
    known = hash_chain(NAMESPACE, prompt)[:4]
    await cluster.join_node(node())
    await cluster.take_events(report(1, known))
    asked = 0
    holders = cluster.shared_index.holders

    async def counted(namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        nonlocal asked
        asked += 1
        return await holders(namespace_id, hashes)

    cluster.shared_index.holders = counted  # type: ignore[method-assign]
    run = await gateway.admit(generation_request(prompt, mode=mode, max_tokens=3))
    while await run.next_item() is not None:
        pass
    assert run.lifecycle.status == "ok"
    assert run.lifecycle.measured.is_prefilled_remotely == (mode == "disaggregated")
    assert asked == 1
    await gateway.close()
    await client.close()

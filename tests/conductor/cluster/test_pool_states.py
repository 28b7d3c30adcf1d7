"""Conformance of pool states: whatever a cluster is told, it answers the same with every state."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.cluster.cluster import Cluster
from conductor.cluster.members import Members
from conductor.cluster.pool_state import LocalState
from conductor.index.memory import MemoryIndex
from conductor.members.membership import MembershipConfig
from conductor.redis.client import RedisClient
from conductor.redis.state import RedisState
from conductor.scheduling.scheduler import SchedulerConfig
from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, KvpoolError, LayoutMismatch, UnknownNamespace
from kvpool.wire import messages as m
from tests.support import valkey
from tests.support.sizes import examples

LAYOUT = Layout("bfloat16", 2, 2, 8, block_tokens=4)
SPACE = Namespace("m", "r", LAYOUT)
CONTRADICTING = Namespace("m", "r", Layout("float16", 2, 2, 8, block_tokens=4))
CHAIN = [bytes([number]) * 16 for number in range(6)]
TIMES = MembershipConfig(stall_s=1000.0, isolated_factor=1.0)


class Told:
    """A cluster and its clock."""

    def __init__(self, state_of: Any) -> None:
        self.now = 100.0
        members = Members.none_yet(TIMES, self.now)
        counters: Counter[str] = Counter()
        self.state = state_of(members, counters, lambda: self.now)
        self.cluster = Cluster(
            "c",
            1,
            members,
            self.state,
            SchedulerConfig(),
            counters=counters,
            clock=lambda: self.now,
        )

    async def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        await self.cluster.sweep()
        if isinstance(self.state, RedisState):
            await self.state.tend()

    async def tell(self, message: m.Message) -> Any:
        """What the cluster's table of handlers answers, or the kind of error that it raises."""
        try:
            answer = self.cluster.handlers()[type(message)](message, None)  # type: ignore[arg-type]
            return answer if isinstance(answer, m.Reply) else await answer  # type: ignore[misc]
        except KvpoolError as error:
            return type(error)

    async def found(self, chain: list[bytes] = CHAIN, **options: Any) -> Any:
        reply = await self.tell(m.Lookup(SPACE.namespace_id, pack_hashes(chain), **options))
        return reply if isinstance(reply, type) else (reply.found, reply.segments)

    async def copies(self, *exclude: str) -> Any:
        reply = await self.tell(
            m.CountCopies(SPACE.namespace_id, pack_hashes(CHAIN), list(exclude))
        )
        return reply if isinstance(reply, type) else list(reply.copies)


def in_memory() -> Told:
    return Told(lambda _members, _counters, _clock: LocalState(MemoryIndex()))


def in_redis(client: RedisClient) -> Told:
    def state(members: Members, counters: Counter[str], clock: Any) -> RedisState:
        return RedisState(
            client,
            "c",
            members,
            MemoryIndex(),
            counters,
            pool=valkey.new_pool(),
            clock=clock,
        )

    return Told(state)


@pytest.fixture(params=["memory", "redis"])
async def told(request: pytest.FixtureRequest) -> AsyncIterator[Told]:
    if request.param == "memory":
        yield in_memory()
        return
    client = RedisClient(valkey.standalone(), timeout_s=5)
    yield in_redis(client)
    await client.close()


def join(node: str = "n", epoch: int = 1, space: Namespace = SPACE) -> m.NodeJoin:
    return m.NodeJoin(m.NodeDescriptor(node, epoch, f"host-{node}", "h:1"), [space])


def batch(
    sequence: int,
    blocks: list[bytes],
    *,
    node: str = "n",
    epoch: int = 1,
    kind: str = "stored",
    tier: Tier | None = Tier.DRAM,
    snapshot: bool = False,
) -> m.NodeEvents:
    event = m.BlockEvent(kind, SPACE.namespace_id, pack_hashes(blocks), tier)
    return m.NodeEvents(node, epoch, sequence, [event], snapshot, snapshot)


def beat(node: str = "n", epoch: int = 1, sequence: int = 1) -> m.NodeHeartbeat:
    stats = m.NodeStatsReply(node, epoch, "h", 1.0, [], 0, 0, 0, {})
    return m.NodeHeartbeat(node, epoch, sequence, stats)


def worker(space: Namespace = SPACE, epoch: int = 1) -> m.WorkerJoin:
    return m.WorkerJoin(m.WorkerDescriptor("w", epoch, "both", "h", "h:2", space, "m", 4096))


async def holding(told: Told, blocks: list[bytes], node: str = "n") -> None:
    assert not (await told.tell(join(node))).resync
    assert not (await told.tell(batch(1, blocks, node=node, snapshot=True))).resync


# ------------------------------------------------------------ one behaviour each


async def test_reported_blocks_are_found_until_they_are_removed(told: Told) -> None:
    await holding(told, CHAIN)
    assert (await told.found())[0] == 6
    assert not (await told.tell(batch(2, CHAIN[3:4], kind="removed", tier=None))).resync
    assert (await told.found())[0] == 3
    assert (await told.found(exclude=["n"]))[0] == 0


async def test_a_gap_in_the_events_asks_for_a_full_report_which_replaces_the_first(
    told: Told,
) -> None:
    await holding(told, CHAIN)
    assert (await told.tell(batch(3, CHAIN[:1]))).resync
    assert told.cluster.counters["event_gaps"] == 1
    assert (await told.found())[0] == 6  # known blocks stay
    await holding(told, CHAIN[:2])
    assert (await told.found())[0] == 2


async def test_a_newer_epoch_voids_the_older_one_which_is_refused(told: Told) -> None:
    await holding(told, CHAIN)
    assert not (await told.tell(join(epoch=2))).resync
    assert (await told.found())[0] == 0
    for late in (join(), batch(2, CHAIN), beat()):
        assert (await told.tell(late)).resync
    assert (await told.found())[0] == 0


async def test_a_node_that_leaves_takes_its_blocks_at_once(told: Told) -> None:
    await holding(told, CHAIN)
    await told.tell(m.NodeLeave("n", 1))
    assert (await told.found())[0] == 0
    for _ in range(3):
        await told.tick()
    assert told.cluster.overview.index_blocks() == 0


async def test_a_silent_node_is_not_read_and_its_death_frees_its_blocks(told: Told) -> None:
    await holding(told, CHAIN)
    await told.tick(5)
    assert (await told.found())[0] == 0
    assert not (await told.tell(beat())).resync
    assert (await told.found())[0] == 6
    await told.tick(25)
    await told.tick()
    assert (await told.tell(beat())).resync
    assert told.cluster.overview.index_blocks() == 0


async def test_copies_are_counted_beyond_gaps_on_live_nodes_alone(told: Told) -> None:
    await holding(told, [CHAIN[0], CHAIN[4]])
    await holding(told, [CHAIN[4]], node="other")
    assert await told.copies() == [1, 0, 0, 0, 2, 0]
    assert await told.copies("n") == [0, 0, 0, 0, 1, 0]
    await told.tell(m.NodeDraining("other", 1))
    assert await told.copies() == [1, 0, 0, 0, 1, 0]
    too_many = m.CountCopies(SPACE.namespace_id, bytes(16 * 9000))
    assert await told.tell(too_many) is InvalidArgument


async def test_a_copy_that_could_not_be_read_is_left_out_for_a_while(told: Told) -> None:
    await holding(told, CHAIN)
    await told.tell(m.ReportMiss("n", SPACE.namespace_id, CHAIN[2]))
    assert (await told.found())[0] == 2
    assert (await told.copies())[2] == 0
    await told.tell(batch(2, CHAIN[2:3]))  # stored anew
    assert (await told.found())[0] == 6
    await told.tell(m.ReportMiss("n", SPACE.namespace_id, CHAIN[2]))
    await told.tick(TIMES.suspect_after_s + 0.1)
    await told.tell(beat(sequence=2))
    assert (await told.found())[0] == 6


async def test_namespaces_are_registered_before_they_are_looked_up(told: Told) -> None:
    assert await told.found() is UnknownNamespace
    assert (await told.tell(m.RegisterNamespace(SPACE))).namespace_id == SPACE.namespace_id
    assert (await told.found())[0] == 0
    assert await told.tell(m.RegisterNamespace(CONTRADICTING)) is LayoutMismatch


async def test_a_worker_of_another_layout_is_refused_and_a_node_keeps_its_other_blocks(
    told: Told,
) -> None:
    await told.tell(m.RegisterNamespace(SPACE))
    assert await told.tell(worker(CONTRADICTING)) is LayoutMismatch
    assert len(told.cluster.members.workers) == 0
    assert not (await told.tell(join(space=CONTRADICTING))).resync
    assert told.cluster.counters["layout_mismatches"] == 1
    await told.tell(batch(1, CHAIN, snapshot=True))
    assert (await told.found())[0] == 6


async def test_workers_come_report_and_go(told: Told) -> None:
    load = m.WorkerLoad(3, 100, 2, 64, 0.0, 0.0)
    assert (await told.tell(m.WorkerHeartbeat("w", 1, load))).resync  # unknown
    assert not (await told.tell(worker(epoch=2))).resync
    assert (await told.tell(worker(epoch=1))).resync
    assert not (await told.tell(m.WorkerHeartbeat("w", 2, load))).resync
    await told.tick()
    told.cluster.view.cost.observe_prefill("w", 100, 0, 1.0)
    assert told.cluster.view.inputs().workers["w"].load == load
    await told.tell(m.WorkerLeave("w", 2))
    await told.tick()
    assert not told.cluster.view.inputs().workers
    assert len(told.cluster.view._known_workers) == 0


# ------------------------------------------------------------ any sequence of messages

NODES = st.sampled_from(["n", "o"])
EPOCHS = st.integers(1, 2)
BLOCKS = st.lists(st.sampled_from(CHAIN), max_size=4, unique=True)
MESSAGES = st.one_of(
    st.builds(join, NODES, EPOCHS),
    st.builds(
        batch,
        st.integers(1, 4),
        BLOCKS,
        node=NODES,
        epoch=EPOCHS,
        kind=st.just("stored"),
        tier=st.sampled_from([Tier.DRAM, Tier.NVME]),
        snapshot=st.booleans(),
    ),
    st.builds(
        batch,
        st.integers(1, 4),
        BLOCKS,
        node=NODES,
        epoch=EPOCHS,
        kind=st.sampled_from(["removed", "cleared"]),
        tier=st.sampled_from([Tier.DRAM, Tier.NVME, None]),
    ),
    st.builds(beat, NODES, EPOCHS, st.integers(1, 4)),
    st.builds(m.NodeDraining, NODES, EPOCHS),
    st.builds(m.NodeLeave, NODES, EPOCHS),
    st.builds(
        lambda node, block: m.ReportMiss(node, SPACE.namespace_id, block),
        NODES,
        st.sampled_from(CHAIN),
    ),
    st.floats(0.0, 6.0),  # seconds that pass
)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(MESSAGES, max_size=25))
def test_every_sequence_of_messages_is_answered_alike(messages: list[Any]) -> None:
    async def compare() -> None:
        client = RedisClient(valkey.standalone(), timeout_s=5)
        both = [in_memory(), in_redis(client)]
        for told in both:
            await told.tell(m.RegisterNamespace(SPACE))
        for message in messages:
            answers = []
            for told in both:
                if isinstance(message, float):
                    await told.tick(message)
                    said = None
                else:
                    said = await told.tell(message)
                answers.append((said, await told.found(), await told.copies()))
            assert answers[0] == answers[1], message
        await client.close()

    valkey.run(compare())

"""Conformance of block indexes: this file tests every backend of the index contract."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.index.contract import Holder, cover_run
from conductor.index.memory import MemoryIndex, complete
from kvpool.blocks.records import BlockEvent
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, StaleEpoch
from tests.support import valkey
from tests.support.driven import Driven
from tests.support.sizes import examples
from tests.support.valkey import driven_index

NS = b"n" * 16
NS2 = b"m" * 16
NODES = ("node-a", "node-b", "node-c")
HOSTS = {"node-a": "host-1", "node-b": "host-2", "node-c": "host-1"}
ALL = 1_000_000

BACKENDS: dict[str, Callable[..., Driven]] = {
    "memory": lambda **options: Driven(MemoryIndex(**options), complete),
    "redis": lambda **options: driven_index(valkey.standalone(), **options),
    "redis-cluster": lambda **options: driven_index(valkey.cluster(), **options),
}
EXAMPLES = {"memory": 200, "redis": 40, "redis-cluster": 10}  # each costs many round trips


@pytest.fixture(params=sorted(BACKENDS))
def index(request: pytest.FixtureRequest) -> Driven:
    return BACKENDS[request.param]()


def h(number: int) -> bytes:
    return number.to_bytes(16, "big")


CHAIN = [h(i) for i in range(8)]


def event(
    kind: str, hashes: Sequence[bytes], tier: Tier | None = Tier.DRAM, ns: bytes = NS
) -> BlockEvent:
    return BlockEvent(kind, ns, b"".join(hashes), tier)


def stored(hashes: Sequence[bytes], tier: Tier = Tier.DRAM, ns: bytes = NS) -> list[BlockEvent]:
    return [event("stored", hashes, tier, ns)]


def leading_run(index: Driven, namespace_id: bytes, hashes: Sequence[bytes]) -> int:
    """The number of leading blocks that any node holds."""
    return len(index.holders(namespace_id, hashes))


# ------------------------------------------------------------ lookups


def test_leading_run_ends_at_the_first_hole(index: Driven) -> None:
    index.apply("node-a", 1, stored([*CHAIN[:3], *CHAIN[4:]]))
    assert leading_run(index, NS, CHAIN) == 3
    assert leading_run(index, NS, CHAIN[4:]) == 4
    assert leading_run(index, NS, []) == 0


def test_namespaces_do_not_mix(index: Driven) -> None:
    index.apply("node-a", 1, stored(CHAIN, ns=NS))
    assert leading_run(index, NS2, CHAIN) == 0
    assert index.holders(NS2, CHAIN) == []
    assert cover_run(index.holders(NS2, CHAIN), HOSTS) == []


def test_holders_name_nodes_and_tiers_fastest_first(index: Driven) -> None:
    index.apply("node-b", 1, stored(CHAIN[:1], Tier.NVME))
    index.apply("node-b", 1, stored(CHAIN[:1], Tier.DRAM))
    index.apply("node-a", 1, stored(CHAIN[:2], Tier.NVME))
    assert index.holders(NS, CHAIN) == [
        (Holder("node-b", Tier.DRAM), Holder("node-a", Tier.NVME), Holder("node-b", Tier.NVME)),
        (Holder("node-a", Tier.NVME),),
    ]
    assert index.blocks() == 2


def test_removed_without_tier_removes_every_copy_on_the_node(index: Driven) -> None:
    index.apply("node-a", 1, stored(CHAIN, Tier.DRAM) + stored(CHAIN, Tier.NVME))
    index.apply("node-a", 1, [event("removed", CHAIN[:1], Tier.DRAM)])
    assert index.holders(NS, CHAIN[:1]) == [(Holder("node-a", Tier.NVME),)]
    index.apply("node-a", 1, [event("removed", CHAIN[:1], None)])
    assert leading_run(index, NS, CHAIN) == 0
    assert index.blocks() == len(CHAIN) - 1


def test_removing_what_is_not_there_changes_nothing(index: Driven) -> None:
    index.apply("node-a", 1, stored(CHAIN[:2]))
    index.apply("node-b", 1, [event("removed", CHAIN, Tier.DRAM)])
    index.apply("node-a", 1, [event("removed", CHAIN, Tier.NVME), event("cleared", [], None, NS2)])
    assert leading_run(index, NS, CHAIN) == 2


def test_cleared_hides_the_namespace_on_that_node_alone(index: Driven) -> None:
    index.apply("node-a", 1, stored(CHAIN) + stored(CHAIN, ns=NS2))
    index.apply("node-b", 1, stored(CHAIN[:2]))
    index.apply("node-a", 1, [event("cleared", [], None)])
    assert leading_run(index, NS, CHAIN) == 2
    assert leading_run(index, NS2, CHAIN) == len(CHAIN)
    index.apply("node-a", 1, stored(CHAIN[:3]))
    assert leading_run(index, NS, CHAIN) == 3
    assert index.reclaim(ALL)
    assert leading_run(index, NS, CHAIN) == 3


@pytest.mark.parametrize(
    "bad",
    [
        event("moved", CHAIN),
        event("stored", CHAIN, None),
        BlockEvent("stored", NS, b"short", Tier.DRAM),
        BlockEvent("stored", b"ns", CHAIN[0], Tier.DRAM),
    ],
)
def test_a_bad_event_is_refused_and_no_event_of_its_batch_is_applied(
    index: Driven, bad: BlockEvent
) -> None:
    with pytest.raises(InvalidArgument):
        index.apply("node-a", 1, [*stored(CHAIN), bad])
    assert leading_run(index, NS, CHAIN) == 0


# ------------------------------------------------------------ segments


def test_segments_prefer_the_host_then_length_then_tier_then_id(index: Driven) -> None:
    index.apply("node-b", 1, stored(CHAIN, Tier.DRAM))
    index.apply("node-a", 1, stored(CHAIN[:3], Tier.NVME))
    index.apply("node-c", 1, stored(CHAIN[:3], Tier.DRAM))

    def spans(host: str) -> list[tuple[str, int, int, Tier]]:
        found = cover_run(index.holders(NS, CHAIN), HOSTS, host)
        return [(s.node_id, s.start, s.count, s.tier) for s in found]

    assert spans("host-2") == [("node-b", 0, 8, Tier.DRAM)]
    assert spans("host-1") == [("node-c", 0, 3, Tier.DRAM), ("node-b", 3, 5, Tier.DRAM)]
    assert spans("") == [("node-b", 0, 8, Tier.DRAM)]
    index.apply("node-a", 1, stored(CHAIN[:3], Tier.DRAM))
    assert spans("host-1")[0] == ("node-a", 0, 3, Tier.DRAM)


def test_segment_tier_is_the_slowest_within_it(index: Driven) -> None:
    index.apply("node-a", 1, stored(CHAIN[:2], Tier.DRAM) + stored(CHAIN[2:], Tier.NVME))
    assert [(s.tier, s.ready) for s in cover_run(index.holders(NS, CHAIN), HOSTS)] == [
        (Tier.NVME, 2)
    ]


def test_segments_leave_out_nodes_that_may_not_be_read(index: Driven) -> None:
    index.apply("node-a", 1, stored(CHAIN[:2]))
    index.apply("node-b", 1, stored(CHAIN))
    readable = {"node-a": "host-1"}
    assert [(s.node_id, s.count) for s in cover_run(index.holders(NS, CHAIN), readable)] == [
        ("node-a", 2)
    ]


copies = st.lists(
    st.sets(st.tuples(st.sampled_from(NODES), st.sampled_from(Tier)), max_size=4), max_size=7
)


@given(copies, st.sampled_from(["", "host-1", "host-2"]))
def test_cover_is_local_where_possible_and_no_shorter_one_exists(
    blocks: list[set[tuple[str, Tier]]], prefer: str
) -> None:
    holders = [tuple(Holder(*copy) for copy in sorted(block)) for block in blocks]
    segments = cover_run(holders, HOSTS, prefer)
    choices: list[set[str]] = []
    for block in holders:
        near = {c.node_id for c in block if prefer and HOSTS[c.node_id] == prefer}
        choices.append(near or {c.node_id for c in block})
    run = next((i for i, choice in enumerate(choices) if not choice), len(choices))
    at = 0
    for segment in segments:
        assert segment.start == at
        for number in range(at, at + segment.count):
            assert segment.node_id in choices[number]
        at += segment.count
    assert at == run
    fewest = min(
        (
            1 + sum(a != b for a, b in itertools.pairwise(path))
            for path in itertools.product(*choices[:run])
        ),
        default=0,
    )
    assert len(segments) == (fewest if run else 0)


# ------------------------------------------------------------ epochs, snapshots, removal


def test_an_older_epoch_is_refused_and_a_newer_one_voids_the_older(index: Driven) -> None:
    index.apply("node-a", 2, stored(CHAIN))
    with pytest.raises(StaleEpoch):
        index.apply("node-a", 1, [event("removed", CHAIN, Tier.DRAM)])
    assert leading_run(index, NS, CHAIN) == len(CHAIN)
    index.apply("node-a", 3, stored(CHAIN[:2]))
    assert leading_run(index, NS, CHAIN) == 2
    with pytest.raises(StaleEpoch):
        index.begin_snapshot("node-a", 2)


def test_a_removed_nodes_older_epoch_stays_refused(index: Driven) -> None:
    index.apply("node-a", 2, stored(CHAIN))
    assert index.remove_node("node-a", ALL)
    with pytest.raises(StaleEpoch):
        index.apply("node-a", 1, stored(CHAIN))
    index.apply("node-a", 2, stored(CHAIN[:1]))
    assert leading_run(index, NS, CHAIN) == 1


def test_a_snapshot_keeps_known_blocks_visible_and_drops_those_that_it_lacks(index: Driven) -> None:
    index.apply("node-a", 1, stored(CHAIN))
    index.begin_snapshot("node-a", 1)
    index.apply("node-a", 1, stored(CHAIN[:2]))
    assert leading_run(index, NS, CHAIN) == len(CHAIN)
    assert index.holders(NS, CHAIN)[0] == (Holder("node-a", Tier.DRAM),)
    index.apply("node-a", 1, [event("removed", CHAIN[1:2], Tier.DRAM)])
    assert leading_run(index, NS, CHAIN) == 1
    index.apply("node-a", 1, stored(CHAIN[1:3]))
    assert index.end_snapshot("node-a")
    assert leading_run(index, NS, CHAIN) == 3
    assert index.reclaim(ALL)
    assert index.blocks() == 3


def test_a_snapshot_of_a_newer_epoch_hides_the_old_at_once(index: Driven) -> None:
    index.apply("node-a", 1, stored(CHAIN))
    index.begin_snapshot("node-a", 2)
    assert leading_run(index, NS, CHAIN) == 0


def test_a_snapshot_begun_again_forgets_the_first_attempt(index: Driven) -> None:
    index.begin_snapshot("node-a", 1)
    index.apply("node-a", 1, stored(CHAIN))
    index.begin_snapshot("node-a", 1)
    index.apply("node-a", 1, stored(CHAIN[:1]))
    assert index.end_snapshot("node-a")
    assert leading_run(index, NS, CHAIN) == 1


def test_ending_a_snapshot_that_was_not_begun_says_so(index: Driven) -> None:
    index.apply("node-a", 1, stored(CHAIN))
    assert not index.end_snapshot("node-a")
    assert not index.end_snapshot("node-z")
    assert leading_run(index, NS, CHAIN) == len(CHAIN)


def test_removal_hides_at_once_and_frees_in_slices(index: Driven) -> None:
    many = [h(i) for i in range(600)]
    index.apply("node-a", 1, stored(many))
    index.apply("node-b", 1, stored(many[:2]))
    assert not index.remove_node("node-a", 100)
    assert leading_run(index, NS, many) == 2
    slices = 1
    while not index.reclaim(100):
        slices += 1
        assert slices < 20
    assert slices >= 3
    assert index.blocks() == 2


def test_a_node_that_comes_back_during_its_removal_keeps_its_new_blocks(index: Driven) -> None:
    many = [h(i) for i in range(600)]
    index.apply("node-a", 1, stored(many))
    assert not index.remove_node("node-a", 1)
    index.apply("node-a", 1, stored(many[:3]))
    assert leading_run(index, NS, many) == 3
    assert index.reclaim(ALL)
    assert leading_run(index, NS, many) == 3
    assert index.blocks() == 3


# ------------------------------------------------------------ corrupt and suspect blocks


def test_a_copy_with_a_recorded_miss_is_left_out_until_its_time_has_passed(index: Driven) -> None:
    index.apply("node-a", 1, stored(CHAIN))
    index.record_miss("node-a", NS, CHAIN[2], until=10.0)
    assert leading_run(index, NS, CHAIN) == 2
    assert index.expire_misses(9.9) == 0
    assert leading_run(index, NS, CHAIN) == 2
    assert index.expire_misses(10.0) == 1
    assert leading_run(index, NS, CHAIN) == len(CHAIN)


def test_a_miss_counts_for_one_node_and_all_its_tiers(index: Driven) -> None:
    index.apply("node-a", 1, stored(CHAIN, Tier.DRAM) + stored(CHAIN, Tier.NVME))
    index.apply("node-b", 1, stored(CHAIN, Tier.NVME))
    index.record_miss("node-a", NS, CHAIN[0], until=10.0)
    assert index.holders(NS, CHAIN[:1]) == [(Holder("node-b", Tier.NVME),)]


def test_a_new_stored_event_drops_the_recorded_miss(index: Driven) -> None:
    index.apply("node-a", 1, stored(CHAIN))
    index.record_miss("node-a", NS, CHAIN[0], until=10.0)
    index.apply("node-a", 1, stored(CHAIN[:1]))
    assert leading_run(index, NS, CHAIN) == len(CHAIN)
    assert index.expire_misses(11.0) == 0


def test_a_recorded_miss_can_be_prolonged(index: Driven) -> None:
    index.apply("node-a", 1, stored(CHAIN))
    index.record_miss("node-a", NS, CHAIN[0], until=10.0)
    index.record_miss("node-a", NS, CHAIN[0], until=20.0)
    assert index.expire_misses(15.0) == 0
    assert leading_run(index, NS, CHAIN) == 0
    assert index.expire_misses(20.0) == 1


# ------------------------------------------------------------ against a naive model


class Model:
    """The contract as simply as possible: a set of (namespace, hash, node, tier)."""

    def __init__(self) -> None:
        self.old: set[tuple[bytes, bytes, str, Tier]] = set()
        self.new: set[tuple[bytes, bytes, str, Tier]] = set()
        self.snapshots: set[str] = set()
        self.epochs: dict[str, int] = {}

    def admit(self, node: str, epoch: int) -> None:
        if epoch < self.epochs.get(node, epoch):
            raise StaleEpoch("old")
        if epoch > self.epochs.get(node, epoch):
            self.drop_node(node)
        self.epochs[node] = epoch

    def drop_node(self, node: str) -> None:
        self.old = {c for c in self.old if c[2] != node}
        self.new = {c for c in self.new if c[2] != node}
        self.snapshots.discard(node)

    def apply(self, node: str, epoch: int, e: BlockEvent, hashes: Sequence[bytes]) -> None:
        self.admit(node, epoch)
        tiers = (e.tier,) if e.tier is not None else tuple(Tier)
        if e.kind == "stored":
            assert e.tier is not None
            side = self.new if node in self.snapshots else self.old
            side |= {(e.namespace_id, x, node, e.tier) for x in hashes}
            return
        for side in (self.old, self.new):
            for copy in list(side):
                hit = copy[0] == e.namespace_id and copy[2] == node and copy[3] in tiers
                if hit and (e.kind == "cleared" or copy[1] in hashes):
                    side.discard(copy)

    def begin(self, node: str, epoch: int) -> None:
        self.admit(node, epoch)
        self.new = {c for c in self.new if c[2] != node}
        self.snapshots.add(node)

    def end(self, node: str) -> None:
        if node in self.snapshots:
            self.snapshots.discard(node)
            self.old = {c for c in self.old if c[2] != node}
            self.old |= {c for c in self.new if c[2] == node}
            self.new = {c for c in self.new if c[2] != node}

    def holders(self, ns: bytes, block: bytes) -> set[Holder]:
        return {Holder(c[2], c[3]) for c in self.old | self.new if c[:2] == (ns, block)}


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("event"),
            st.sampled_from(NODES),
            st.integers(1, 3),
            st.sampled_from(["stored", "stored", "stored", "removed", "cleared"]),
            st.lists(st.integers(0, 7), max_size=5),
            st.sampled_from(Tier),
            st.sampled_from([NS, NS2]),
        ),
        st.tuples(st.just("begin"), st.sampled_from(NODES), st.integers(1, 3)),
        st.tuples(st.just("end"), st.sampled_from(NODES)),
        st.tuples(st.just("remove"), st.sampled_from(NODES)),
        st.tuples(st.just("reclaim"), st.integers(0, 4)),
    ),
    max_size=30,
)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_index_agrees_with_a_naive_model_under_any_order_of_events(backend: str) -> None:
    check = settings(max_examples=examples(EXAMPLES[backend]), deadline=None)(
        given(script=steps)(_agree)
    )
    check(backend=backend)


def _agree(backend: str, script: list[tuple[object, ...]]) -> None:
    index, model = BACKENDS[backend](), Model()
    for step in script:
        match step:
            case (
                "event",
                str(node),
                int(epoch),
                str(kind),
                list(numbers),
                Tier() as tier,
                bytes(ns),
            ):
                hashes = [h(n) for n in numbers]
                e = event(kind, hashes, tier, ns)
                _same(
                    partial(index.apply, node, epoch, [e]),
                    partial(model.apply, node, epoch, e, hashes),
                )
            case ("begin", str(node), int(epoch)):
                _same(partial(index.begin_snapshot, node, epoch), partial(model.begin, node, epoch))
            case ("end", str(node)):
                index.end_snapshot(node)
                model.end(node)
            case ("remove", str(node)):
                index.remove_node(node, 1)
                model.drop_node(node)
                assert node not in {s.node_id for s in cover_run(index.holders(NS, CHAIN), HOSTS)}
            case ("reclaim", int(count)):
                index.reclaim(count)
        for ns in (NS, NS2):
            for block in CHAIN:
                found = index.holders(ns, [block])
                assert set(found[0] if found else ()) == model.holders(ns, block)
        if isinstance(index.whole, MemoryIndex):
            index.check_integrity()
    while not index.reclaim(5):
        pass
    assert index.blocks() == len({c[:2] for c in model.old | model.new})


def _same(real: Callable[[], None], model: Callable[[], None]) -> None:
    """Either both raise, or neither does."""
    refused = False
    try:
        model()
    except StaleEpoch:
        refused = True
    if refused:
        with pytest.raises(StaleEpoch):
            real()
    else:
        real()


# ------------------------------------------------------------ bounds


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_entries_are_bounded_and_dropped_ones_counted(backend: str) -> None:
    index = BACKENDS[backend](max_blocks=3)
    index.apply("node-a", 1, stored(CHAIN))
    assert index.blocks() == 3
    assert leading_run(index, NS, CHAIN) == 3
    index.apply("node-b", 1, stored(CHAIN[:3]))
    assert index.holders(NS, CHAIN)[0] == (Holder("node-a", Tier.DRAM), Holder("node-b", Tier.DRAM))


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_recorded_misses_are_bounded(backend: str) -> None:
    index = BACKENDS[backend](max_misses=2)
    index.apply("node-a", 1, stored(CHAIN))
    for i in range(3):
        index.record_miss("node-a", NS, CHAIN[i], until=10.0 + i)
    assert leading_run(index, NS, CHAIN) == 1
    assert index.expire_misses(100.0) == 2

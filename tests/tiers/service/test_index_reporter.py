"""How a node cuts what happened into messages for the conductor."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpool.blocks.hashing import unpack_hashes
from kvpool.blocks.tier import Tier
from tiers.service.index_reporter import BATCH_RUNS, SLICE_BLOCKS, batches
from tiers.store.blocks import StoreEvent

SPACE = bytes(16)


def event(number: int, kind: str = "stored", tier: Tier = Tier.DRAM) -> StoreEvent:
    return StoreEvent(kind, SPACE, number.to_bytes(16, "little"), tier)


def told(events: list[StoreEvent]) -> list[StoreEvent]:
    return [
        StoreEvent(run.kind, run.namespace_id, block_hash, run.tier)
        for batch in batches(events)
        for run in batch
        if run.tier is not None
        for block_hash in unpack_hashes(run.hashes)
    ]


@given(
    st.lists(
        st.tuples(st.sampled_from(["stored", "removed"]), st.sampled_from([Tier.DRAM, Tier.HBM]))
    )
)
def test_every_event_is_reported_once_and_in_order(kinds: list[tuple[str, Tier]]) -> None:
    events = [event(number, *kind) for number, kind in enumerate(kinds)]
    assert told(events) == events


def test_events_of_changing_kind_are_cut_into_messages_of_few_runs() -> None:
    kinds = ("stored", "removed")
    events = [event(number, kinds[number % 2]) for number in range(2 * BATCH_RUNS + 5)]
    assert [len(batch) for batch in batches(events)] == [BATCH_RUNS, BATCH_RUNS, 5]
    assert told(events) == events


def test_a_long_run_is_cut_at_what_one_message_may_hold() -> None:
    events = [event(number) for number in range(SLICE_BLOCKS + 1)]
    assert [len(unpack_hashes(run.hashes)) for [run] in batches(events)] == [SLICE_BLOCKS, 1]

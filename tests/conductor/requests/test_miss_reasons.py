"""Every miss has a reason: last events, other namespaces, declined and failed reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.index.block_history import BlockHistory, LastEvent
from conductor.index.memory import complete
from conductor.requests.miss_reasons import (
    Miss,
    differing_fields,
    in_other_namespace,
    of_known_blocks,
    of_unknown_blocks,
)
from kvpool.blocks.hashing import hash_chain, pack_hashes
from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument
from kvpool.wire import messages as m
from tests.support.scripted import NAMESPACE, Conductor, ScriptedWorker, conductor

CHAIN = [bytes([number]) * 16 for number in range(1, 9)]


def event(kind: str, hashes: list[bytes]) -> m.BlockEvent:
    return m.BlockEvent(kind, b"n" * 16, pack_hashes(hashes), Tier.DRAM)


# ------------------------------------------------------------ block history


def test_the_last_event_of_a_block_is_kept_with_its_node() -> None:
    history = BlockHistory(1024)
    history.record("n1", [event("stored", CHAIN[:4])])
    history.record("n2", [event("stored", CHAIN[2:4]), event("removed", CHAIN[3:4])])
    assert [history.last_event(h) for h in CHAIN[:5]] == [
        LastEvent("stored", "n1"),
        LastEvent("stored", "n1"),
        LastEvent("stored", "n2"),
        LastEvent("removed", "n2"),
        None,
    ]


def test_a_newer_block_takes_the_slot_of_an_older_one() -> None:
    history = BlockHistory(1)
    history.record("n", [event("stored", [CHAIN[0]])])
    history.record("n", [event("stored", [CHAIN[1]])])
    assert history.last_event(CHAIN[0]) is None
    assert history.last_event(CHAIN[1]) == LastEvent("stored", "n")
    with pytest.raises(InvalidArgument):
        BlockHistory(0)


def test_more_nodes_than_numbers_reuse_the_first_and_never_break() -> None:
    history = BlockHistory(16)
    for number in range(1 << 14):
        history.record(f"n{number}", [])
    history.record("late", [event("stored", [CHAIN[0]])])
    assert history.last_event(CHAIN[0]) == LastEvent("stored", "late")


@given(st.lists(st.tuples(st.sampled_from(["stored", "removed"]), st.integers(0, 7)), max_size=30))
def test_a_kept_event_is_never_older_than_the_last_one(
    happened: list[tuple[str, int]],
) -> None:
    history, last = BlockHistory(4), {}
    for kind, number in happened:
        history.record("n", [event(kind, [CHAIN[number]])])
        last[number] = kind
    for number in range(8):
        found = history.last_event(CHAIN[number])
        assert found is None or found.kind == last[number]


# ------------------------------------------------------------ reasons


def test_missing_blocks_get_their_reason_from_the_last_event() -> None:
    heard = {
        CHAIN[1]: LastEvent("stored", "live"),
        CHAIN[2]: LastEvent("removed", "live"),
        CHAIN[3]: LastEvent("stored", "dead"),
        CHAIN[4]: LastEvent("stored", "live"),
    }
    found = of_unknown_blocks(CHAIN[:6], 1, heard.get, lambda node: node == "live")
    assert found == [
        Miss("suspect", 1),
        Miss("evicted", 1),
        Miss("node_gone", 1),
        Miss("after_gap", 1),
        Miss("never_stored", 1),
    ]
    assert of_unknown_blocks(CHAIN, 8, heard.get, lambda _: True) == []


@pytest.mark.parametrize(
    ("found", "planned", "reused", "fallback", "expected"),
    [
        (10, 10, 10, "", []),
        (10, 6, 6, "", [Miss("declined_cost", 4)]),
        (10, 10, 4, "pool_read:checksum", [Miss("checksum", 6)]),
        (10, 10, 4, "pool_read:never_stored", [Miss("evicted", 6, "never_stored")]),
        (10, 10, 0, "pool_read:unavailable", [Miss("node_gone", 10, "unavailable")]),
        (10, 10, 9, "pool_read:declined_deadline", [Miss("deadline", 1, "declined_deadline")]),
        (10, 8, 3, "pool_read:odd", [Miss("read_failed", 5, "odd"), Miss("declined_cost", 2)]),
        (10, 8, 10, "", []),  # the engine had more than was planned
        (10, 10, 4, "decode:unavailable", []),  # another worker went on: no read failed
    ],
)
def test_blocks_that_the_pool_had_were_declined_or_not_read(
    found: int, planned: int, reused: int, fallback: str, expected: list[Miss]
) -> None:
    assert of_known_blocks(found, planned, reused, fallback) == expected


def test_only_fields_that_the_caller_may_know_are_named() -> None:
    ours = Namespace("m", "r1", Layout("bfloat16", 2, 2, 8), "t", "s")
    theirs = Namespace("m", "r2", Layout("float16", 2, 2, 8), "t2", "s2", "sha256")
    assert differing_fields(ours, theirs) == "revision, hash_algorithm, layout.dtype"
    told = in_other_namespace([Miss("never_stored", 2), Miss("evicted", 1)], "revision")
    assert told == [Miss("other_namespace", 2, "revision"), Miss("evicted", 1)]


# ------------------------------------------------------------ through the gateway


async def test_a_cold_prompt_was_never_stored() -> None:
    async with conductor(ScriptedWorker("w")) as running:
        assert await missed(running) == [Miss("never_stored", 2)]
        assert running.counters["miss:never_stored"] == 2
        metrics = (await running.http.get("/metrics")).text
        assert 'kvpool_missed_blocks_total{reason="never_stored"} 2.0' in metrics


async def test_evicted_blocks_and_blocks_of_a_node_that_left_have_different_reasons() -> None:
    async with conductor(ScriptedWorker("w")) as running:
        hashes = hash_chain(NAMESPACE, [65] * 10)
        join(running, "gone", hashes[1:])
        join(running, "n", hashes[:1])
        removed = m.BlockEvent(
            "removed", NAMESPACE.namespace_id, pack_hashes(hashes[:1]), Tier.DRAM
        )
        complete(running.cluster.node_reports.events(m.NodeEvents("n", 1, 2, [removed])))
        complete(running.cluster.node_reports.leave(m.NodeLeave("gone", 1)))
        assert await missed(running) == [Miss("evicted", 1), Miss("node_gone", 1)]


async def test_the_same_prompt_under_another_revision_is_found_and_the_field_named() -> None:
    async with conductor(ScriptedWorker("w")) as running:
        other = Namespace("m", "r2", NAMESPACE.layout)
        complete(running.cluster.namespaces.register(m.RegisterNamespace(other)))
        join(running, "n", hash_chain(other, [65] * 10), other)
        assert await missed(running) == [Miss("other_namespace", 2, "revision")]


async def test_a_look_up_for_a_miss_reason_does_not_delay_the_request() -> None:
    async with conductor(ScriptedWorker("w")) as running:
        other = Namespace("m", "r2", NAMESPACE.layout)
        complete(running.cluster.namespaces.register(m.RegisterNamespace(other)))
        find, asked = running.cluster.lookups.find, asyncio.Event()

        async def find_slowly(namespace_id: bytes, hashes: Sequence[bytes]) -> Any:
            if namespace_id == other.namespace_id:
                asked.set()
                await asyncio.Event().wait()
            return await find(namespace_id, hashes)

        running.cluster.lookups.find = find_slowly  # type: ignore[method-assign]
        async with asyncio.timeout(20):
            assert await missed(running) == [Miss("never_stored", 2)]
        assert asked.is_set()


async def test_nobody_learns_what_another_tenant_or_salt_stored() -> None:
    async with conductor(ScriptedWorker("w")) as running:
        for tenant, salt in (("else", ""), ("", "pepper")):
            other = Namespace("m", "r2", NAMESPACE.layout, tenant, salt)
            complete(running.cluster.namespaces.register(m.RegisterNamespace(other)))
            join(running, f"n{tenant}{salt}", hash_chain(other, [65] * 10), other)
        assert await missed(running) == [Miss("never_stored", 2)]


async def test_reuse_that_costs_more_than_it_saves_is_declined_with_a_reason() -> None:
    async with conductor(ScriptedWorker("w")) as running:
        join(running, "n", hash_chain(NAMESPACE, [65] * 10))
        for _ in range(30):  # so slow a link was measured
            running.cluster.view.cost.observe_transfer(1000, 10.0, same_host=False)
        assert await missed(running) == [Miss("declined_cost", 2)]


async def test_a_report_says_how_far_the_prediction_was_off() -> None:
    async with conductor(ScriptedWorker("w")) as running:
        response = await running.ask()
        record = (await running.http.get(f"/v1/requests/{response.headers['X-Request-Id']}")).json()
        predicted, outcome = record["decision"], record["outcome"]
        phases = outcome["phases"]
        before_s = phases["request_read_time"] + phases["admission_wait"]  # before the decision
        assert outcome["ttft_error_ratio"] == pytest.approx(
            predicted["ttft_s"] / (outcome["ttft_s"] - before_s)
        )
        assert outcome["tpot_error_ratio"] == pytest.approx(predicted["tpot_s"] / outcome["tpot_s"])
        metrics = (await running.http.get("/metrics")).text
        for what in ("ttft", "tpot"):
            assert f'kvpool_prediction_error_ratio_count{{what="{what}"}} 1.0' in metrics


async def missed(running: Conductor) -> list[Miss]:
    response = await running.ask()
    assert response.status_code == 200
    report: list[dict[str, Any]] = response.json()["kvpool"]["misses"]
    record = await running.http.get(f"/v1/requests/{response.headers['X-Request-Id']}")
    assert record.json()["outcome"]["misses"] == report
    return [Miss(**miss) for miss in report]


def join(
    running: Conductor, node_id: str, hashes: list[bytes], namespace: Namespace = NAMESPACE
) -> None:
    """A node on another host that reports these blocks."""
    descriptor = m.NodeDescriptor(node_id, 1, "elsewhere", "127.0.0.1:1")
    complete(running.cluster.node_reports.join(m.NodeJoin(descriptor, [namespace])))
    stored = m.BlockEvent("stored", namespace.namespace_id, pack_hashes(hashes), Tier.DRAM)
    complete(running.cluster.node_reports.events(m.NodeEvents(node_id, 1, 1, [stored], True, True)))

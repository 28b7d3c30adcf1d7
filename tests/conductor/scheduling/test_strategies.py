"""The strategies: what each prefers, and what holds for all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from conductor.members.membership import State
from conductor.scheduling.decision import PrefixReplication
from conductor.scheduling.in_flight import InFlight
from conductor.scheduling.inputs import DynamoOptions, SglangOptions
from conductor.scheduling.scheduler import NodeStatus, ScheduleRequest, WorkerStatus, schedule
from conductor.scheduling.strategies import strategy_named
from conductor.server import scheduler_config
from kvpool.blocks.records import Segment
from kvpool.blocks.tier import Tier
from kvpool.config.loader import ConductorConfig
from kvpool.config.settings import STRATEGIES
from kvpool.errors import ConfigError
from tests.support.clusters import (
    BLOCK_BYTES,
    GIB,
    busy,
    check_valid,
    inputs_of,
    measured,
    nodes_lists,
    pool_has,
    request,
    requests,
    worker,
    workers_lists,
)
from tests.support.sizes import examples

ALL = ("cache-aware", "dynamo", "kv-centric", "least-loaded", "random", "round-robin", "sglang")
MIXED = tuple(worker(f"w{i}", "both", f"h{i}") for i in range(4))
NODES = tuple(NodeStatus(f"n{i}", f"h{i}", GIB) for i in range(4))
SPLIT = (
    *(worker(f"p{i}", "prefill", f"h{i}") for i in range(4)),
    *(worker(f"d{i}", "decode", f"h{i}") for i in range(3)),
)


def on(node: str, blocks: int, tier: Tier = Tier.DRAM) -> dict[str, list[Segment]]:
    return {"": [Segment(node, 0, blocks, tier)]}


# ------------------------------------------------------------ all of them


@settings(max_examples=examples(400), deadline=None)
@given(
    workers_lists,
    nodes_lists,
    st.lists(requests, min_size=1, max_size=4),
    st.sampled_from([0, 300]),
    st.sampled_from(["none", "arrival", "predicted"]),
    st.sampled_from([0.0, 0.5]),
)
def test_every_strategy_serves_by_eligible_workers_or_refuses_with_a_reason(
    workers: list[WorkerStatus],
    nodes: list[NodeStatus],
    wanted: list[ScheduleRequest],
    threshold: int,
    admission: str,
    temperature: float,
) -> None:
    """The order of the maps does not matter. If one strategy serves a request, all do."""
    in_flight = InFlight()
    config: dict[str, Any] = {
        "min_remote_prefill_tokens": threshold,
        "admission": admission,
        "dynamo": DynamoOptions(temperature=temperature),
        "sglang": SglangOptions(imbalance_requests=2),
    }
    for number, one in enumerate(wanted):
        one = replace(one, request_id=str(number))
        decisions = []
        for name in ALL:
            state = inputs_of(workers, nodes, in_flight, strategy=name, **config)
            mirrored = inputs_of(workers[::-1], nodes[::-1], in_flight, strategy=name, **config)
            decision = schedule(one, state, 5.0 + number)
            assert decision == schedule(one, mirrored, 5.0 + number)
            assert decision.strategy == name
            check_valid(one, state, decision)
            if admission == "none":
                assert decision.reason not in ("ttft_slo", "tpot_slo")
            for copy in decision.replicate:
                _check_copy(copy, nodes)
            decisions.append(decision)
        assert len({decision.is_refused for decision in decisions}) == 1
        in_flight.assigned(decisions[number % len(ALL)], 5.0 + number)


def _check_copy(copy: PrefixReplication, nodes: list[NodeStatus]) -> None:
    by_id = {node.node_id: node for node in nodes}
    source, target = by_id[copy.source], by_id[copy.target]
    assert source.host != target.host
    assert source.state is not State.SUSPECT
    assert target.state is State.LIVE
    assert target.available_bytes >= copy.count * BLOCK_BYTES > 0


@pytest.mark.parametrize("name", ALL)
def test_split_roles_prefill_apart_and_mixed_roles_serve_whole(name: str) -> None:
    """kv-centric decides by cost; the others by whether there are workers for prefill only."""
    mixed = schedule(request(), inputs_of(MIXED, NODES, strategy=name), 0.0)
    assert mixed.mode == "local"
    split = schedule(request(), inputs_of(SPLIT, NODES, strategy=name), 0.0)
    if name != "kv-centric":
        assert split.mode == "disaggregated"
    alone = schedule(request(), inputs_of(SPLIT[4:], NODES, strategy=name), 0.0)
    assert alone.mode == "local"


@pytest.mark.parametrize("name", ALL)
def test_a_short_rest_stays_with_the_decode_worker(name: str) -> None:
    state = inputs_of(SPLIT, NODES, strategy=name, min_remote_prefill_tokens=256)
    decision = schedule(request(segments=pool_has(14)), state, 0.0)
    assert (decision.mode, decision.reason) == ("local", "short")


@pytest.mark.parametrize("name", ALL)
def test_when_the_first_choice_misses_the_objective_another_is_taken(name: str) -> None:
    full = busy(queued_prefill_tokens=60_000, prefill_tokens_per_s=1000.0)
    state = measured(
        inputs_of([*(replace(w, load=full) for w in MIXED[:3]), MIXED[3]], NODES, strategy=name)
    )
    for number in range(8):
        decision = schedule(request(request_id=str(number), ttft_s=5.0), state, 0.0)
        assert decision.decode == "w3"


def test_an_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="kv-centric"):
        strategy_named("kv-centrik")


# ------------------------------------------------------------ random


def test_random_follows_from_seed_and_request_alone() -> None:
    chosen = [
        [
            schedule(
                request(request_id=str(n)), inputs_of(MIXED, NODES, strategy="random", seed=s), 0.0
            )
            for n in range(200)
        ]
        for s in (1, 1, 2)
    ]
    assert chosen[0] == chosen[1]
    assert chosen[0] != chosen[2]
    counts = Counter(decision.decode for decision in chosen[0])
    assert len(counts) == 4
    assert min(counts.values()) > 25  # of 50


def test_random_draws_prefill_and_decode_apart() -> None:
    state = inputs_of(SPLIT, NODES, strategy="random")
    pairs = {
        (d.prefill, d.decode)
        for d in (schedule(request(request_id=str(n)), state, 0.0) for n in range(200))
    }
    assert len(pairs) == 12


# ------------------------------------------------------------ round-robin, least-loaded


def test_round_robin_takes_each_in_turn_whatever_its_load() -> None:
    in_flight = InFlight()
    loaded = [replace(MIXED[0], load=busy(queued_prefill_tokens=9000)), *MIXED[1:]]
    state = inputs_of(loaded, NODES, in_flight, strategy="round-robin")
    chosen = []
    for number in range(8):
        decision = schedule(request(request_id=str(number)), state, 0.0)
        in_flight.assigned(decision, 0.0)
        chosen.append(decision.decode)
    assert chosen == ["w0", "w1", "w2", "w3"] * 2


def test_least_loaded_takes_the_shortest_queue_and_the_fewest_sequences() -> None:
    queued = busy(queued_prefill_tokens=500, prefill_tokens_per_s=1000.0)
    decoding = busy(decode_sequences=3, decode_context_tokens=100)
    workers = [
        *(replace(w, load=queued) for w in SPLIT[:3]),
        SPLIT[3],
        *(replace(w, load=decoding) for w in SPLIT[4:6]),
        SPLIT[6],
    ]
    state = inputs_of(workers, NODES, strategy="least-loaded")
    decision = schedule(request(segments=on("n0", 8)), state, 0.0)
    assert (decision.prefill, decision.decode) == ("p3", "d2")


# ------------------------------------------------------------ cache-aware, sglang


@pytest.mark.parametrize("name", ["cache-aware", "sglang"])
def test_the_longest_near_prefix_decides_regardless_of_the_queue(name: str) -> None:
    queued = busy(queued_prefill_tokens=9000, prefill_tokens_per_s=1000.0)
    workers = [*MIXED[:2], replace(MIXED[2], load=queued), MIXED[3]]
    state = inputs_of(workers, NODES, strategy=name)
    assert schedule(request(segments=on("n2", 8)), state, 0.0).decode == "w2"
    assert schedule(request(engine_blocks={"w2": 3}), state, 0.0).decode == "w2"
    both = request(segments=on("n2", 4), engine_blocks={"w1": 9})
    assert schedule(both, state, 0.0).decode == "w1"


@pytest.mark.parametrize("name", ["cache-aware", "sglang"])
def test_without_a_prefix_or_with_equal_ones_load_decides(name: str) -> None:
    running = busy(running=3, queued_prefill_tokens=900, prefill_tokens_per_s=1000.0)
    state = inputs_of(
        [*(replace(w, load=running) for w in MIXED[:3]), MIXED[3]], NODES, strategy=name
    )
    assert schedule(request(), state, 0.0).decode == "w3"
    equal = {f"w{i}": 5 for i in range(4)}
    assert schedule(request(engine_blocks=equal), state, 0.0).decode == "w3"


def test_sglang_leaves_the_prefix_when_queues_are_out_of_balance() -> None:
    def decode_with(running: int, others: int, **options: float) -> str | None:
        workers = [
            replace(w, load=busy(running=running if w.worker_id == "w2" else others)) for w in MIXED
        ]
        sglang = SglangOptions(**options)  # type: ignore[arg-type]
        state = inputs_of(workers, NODES, strategy="sglang", sglang=sglang)
        return schedule(request(segments=on("n2", 8)), state, 0.0).decode

    bounds: dict[str, float] = {"imbalance_requests": 10, "imbalance_ratio": 2.0}
    assert decode_with(10, 0, **bounds) == "w2"  # not above the absolute bound
    assert decode_with(11, 0, **bounds) == "w0"
    assert decode_with(31, 20, **bounds) == "w2"  # not above the relative one
    assert decode_with(41, 20, **bounds) == "w0"


# ------------------------------------------------------------ dynamo


def test_dynamo_weighs_overlap_by_location() -> None:
    workers = MIXED[:2]
    for tier, engine_needed in ((Tier.DRAM, 13), (Tier.NVME, 5)):
        # 16 blocks near at w1: worth 12 in memory and 4 on disk.
        segments = {"h1": on("n1", 16, tier)[""]}
        state = inputs_of(workers, NODES, strategy="dynamo")
        wanted = request(segments=segments, engine_blocks={"w0": engine_needed})
        assert schedule(wanted, state, 0.0).decode == "w0"
        wanted = replace(wanted, engine_blocks={"w0": engine_needed - 2})
        assert schedule(wanted, state, 0.0).decode == "w1"


def test_dynamo_weighs_overlap_against_decodes_in_use() -> None:
    decoding = busy(decode_sequences=2, decode_context_tokens=64 * 10)
    workers = [MIXED[0], replace(MIXED[1], load=decoding)]
    near = request(engine_blocks={"w1": 8})
    assert schedule(near, inputs_of(workers, NODES, strategy="dynamo"), 0.0).decode == "w0"
    scaled = inputs_of(workers, NODES, strategy="dynamo", dynamo=DynamoOptions(prefill_scale=2.0))
    assert schedule(near, scaled, 0.0).decode == "w1"


def test_dynamo_spreads_by_temperature_and_the_cheaper_gets_more() -> None:
    hot = inputs_of(MIXED, NODES, strategy="dynamo", dynamo=DynamoOptions(temperature=0.5))
    engine = {"w0": 16, "w1": 8}
    chosen = [
        schedule(request(request_id=str(n), engine_blocks=engine), hot, 0.0).decode
        for n in range(1000)
    ]
    counts = Counter(chosen)
    # Normalised costs 0, 1/2, 1, 1: softmax gives 0.61, 0.22, 0.08, 0.08.
    assert 550 < counts["w0"] < 670
    assert 170 < counts["w1"] < 280
    cold = replace(hot, config=replace(hot.config, dynamo=DynamoOptions()))
    assert {
        schedule(request(request_id=str(n), engine_blocks=engine), cold, 0.0).decode
        for n in range(20)
    } == {"w0"}


# ------------------------------------------------------------ kv-centric: hot prefixes


def hot_prefix(queue_tokens: int, **config: Any) -> tuple[PrefixReplication, ...]:
    """The prefix is on w0's host, where so many tokens are queued; all others are idle."""
    queued = busy(queued_prefill_tokens=queue_tokens, prefill_tokens_per_s=1000.0)
    state = inputs_of([replace(MIXED[0], load=queued), *MIXED[1:]], NODES, **config)
    return schedule(request(segments=on("n0", 10)), state, 0.0).replicate


def test_a_hot_prefix_is_replicated_toward_the_idle_worker() -> None:
    assert hot_prefix(5000) == (PrefixReplication("n0", "n1", 0, 10),)


def test_nothing_is_replicated_to_the_prefixs_own_host_or_when_switched_off() -> None:
    assert hot_prefix(0) == ()
    assert hot_prefix(5000, balancing_threshold=0.0) == ()


def test_the_balancing_threshold_bounds_replication() -> None:
    queued = busy(queued_prefill_tokens=9000, prefill_tokens_per_s=1000.0)
    segments = {
        "h1": [Segment("n1", 0, 5, Tier.DRAM), Segment("n0", 5, 5, Tier.DRAM)],
        "": [Segment("n0", 0, 10, Tier.DRAM)],
    }
    workers = [replace(MIXED[0], load=queued), MIXED[1]]
    wanted = request(segments=segments)
    assert schedule(wanted, inputs_of(workers, NODES, balancing_threshold=2.5), 0.0).replicate == ()
    decision = schedule(wanted, inputs_of(workers, NODES, balancing_threshold=1.5), 0.0)
    assert decision.replicate == (PrefixReplication("n0", "n1", 5, 5),)


def test_nothing_is_replicated_to_a_full_or_a_draining_node() -> None:
    queued = busy(queued_prefill_tokens=5000, prefill_tokens_per_s=1000.0)
    workers = [replace(MIXED[0], load=queued), MIXED[1]]
    for other in (
        NodeStatus("n1", "h1", 9 * BLOCK_BYTES),
        NodeStatus("n1", "h1", GIB, State.DRAINING),
    ):
        state = inputs_of(workers, [NODES[0], other])
        assert schedule(request(segments=on("n0", 10)), state, 0.0).replicate == ()


# ------------------------------------------------------------ admission


def test_admission_looks_at_no_load_at_that_of_now_or_at_that_to_come() -> None:
    in_flight = InFlight()
    soon = schedule(request(), inputs_of(MIXED[:1], NODES), 0.0)
    for number in range(5):
        soon = replace(soon, request_id=str(number), output_tokens=1000, work_s=0.0)
        in_flight.assigned(soon, 0.0)
    assert in_flight.decoding("w0", 0.0, 0.0)[0] == 0  # they all prefill still

    def reason(admission: str, tpot_s: float) -> str:
        state = measured(inputs_of(MIXED[:1], NODES, in_flight, admission=admission))
        return schedule(request(tpot_s=tpot_s, output_tokens=1000), state, 0.0).reason

    assert reason("predicted", 0.0135) == "tpot_slo"  # six sequences: 16 ms
    assert reason("arrival", 0.0135) == "cost"  # one: 11 ms
    assert reason("arrival", 0.0105) == "tpot_slo"
    assert reason("none", 0.0105) == "cost"


# ------------------------------------------------------------ configuration


def test_every_strategy_can_be_configured_and_every_option_reaches_the_policy() -> None:
    assert set(STRATEGIES) == set(ALL)
    for name in STRATEGIES:
        assert scheduler_config(ConductorConfig(strategy=name)).strategy == name
    config = scheduler_config(
        ConductorConfig(
            admission="none",
            advanced={
                "strategy_seed": 7,
                "balancing_threshold": 3.0,
                "stall_weight": 0.7,
                "dynamo_temperature": 0.5,
                "dynamo_engine_credit": 0.9,
                "dynamo_host_credit": 0.8,
                "dynamo_remote_credit": 0.7,
                "dynamo_disk_credit": 0.6,
                "dynamo_prefill_scale": 2.0,
                "sglang_imbalance_requests": 5,
                "sglang_imbalance_ratio": 2.0,
            },
        )
    )
    assert (config.admission, config.seed, config.balancing_threshold) == ("none", 7, 3.0)
    assert config.stall_weight == 0.7
    assert config.dynamo == DynamoOptions(0.9, 0.8, 0.7, 0.6, 2.0, 0.5)
    assert config.sglang == SglangOptions(5, 2.0)
    with pytest.raises(ValidationError, match="did you mean kv-centric"):
        ConductorConfig(strategy="kv-centrik")

"""The scheduler: what it chooses, declines and refuses, and its invariants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conductor.members.membership import State
from conductor.scheduling.cost_model import CostModel, LinkProfile
from conductor.scheduling.decision import Decision
from conductor.scheduling.in_flight import InFlight
from conductor.scheduling.scheduler import (
    NodeStatus,
    ScheduleRequest,
    SchedulingInputs,
    refuse,
    register_strategy,
    schedule,
    strategies,
)
from kvpool.blocks.records import Segment
from kvpool.blocks.tier import Tier
from kvpool.errors import ConfigError, InvalidArgument
from tests.support.clusters import (
    BLOCK,
    BLOCK_BYTES,
    GIB,
    PROFILE,
    busy,
    inputs_of,
    measured,
    pool_has,
    request,
    worker,
)

PD = (worker("p1", "prefill"), worker("p2", "prefill"), worker("d1", "decode", "h2"))


# ------------------------------------------------------------ where to prefill


def test_an_idle_cluster_prefills_on_the_decode_worker() -> None:
    decision = schedule(request(), inputs_of(PD), 0.0)
    assert (decision.mode, decision.prefill, decision.decode) == ("local", None, "d1")
    assert decision.ttft_s == pytest.approx(1.034, rel=0.01)


def test_prefill_goes_elsewhere_when_the_decode_worker_has_a_queue() -> None:
    slow = replace(PD[2], load=busy(queued_prefill_tokens=10_000, prefill_tokens_per_s=1000.0))
    queued = replace(PD[0], load=busy(queued_prefill_tokens=20_000, prefill_tokens_per_s=1000.0))
    decision = schedule(request(), inputs_of([queued, PD[1], slow]), 0.0)
    assert (decision.mode, decision.prefill, decision.decode) == ("disaggregated", "p2", "d1")
    assert decision.target_node == "n2"


def test_prefill_goes_elsewhere_when_it_would_stall_running_decodes() -> None:
    decoding = replace(PD[2], load=busy(decode_sequences=8, decode_context_tokens=8000))
    state = measured(inputs_of([PD[0], decoding]))
    decision = schedule(request(tpot_s=0.02), state, 0.0)
    assert decision.mode == "disaggregated"
    local = next(c for c in decision.candidates if c.mode == "local")
    assert local.rejected == "tpot_slo"


def test_the_stall_of_decoding_sequences_counts_against_a_local_prefill() -> None:
    """1,034 tokens are computed in 1.03 s.

    Here that is 2.4 s later elsewhere, and 8 sequences would pause.
    """
    queued = [replace(p, load=busy(queued_prefill_tokens=2400)) for p in PD[:2]]
    for sequences, weight, mode in (
        (0, 1.0, "local"),
        (8, 0.0, "local"),
        (8, 0.1, "local"),  # 0.83 s of theirs
        (8, 1.0, "disaggregated"),  # 8.3 s
        (40, 0.1, "disaggregated"),
    ):
        load = busy(decode_sequences=sequences, decode_context_tokens=1000 * sequences)
        state = inputs_of([*queued, replace(PD[2], load=load)], stall_weight=weight)
        decision = schedule(request(), state, 0.0)
        assert decision.mode == mode, (sequences, weight)
        local = next(c for c in decision.candidates if c.mode == "local")
        assert local.stalls_s == pytest.approx(sequences * local.prefill_s)
        # Its own decoding begins after its prefill, which therefore does not slow it.
        assert local.tpot_s == pytest.approx(0.01 + 0.001 * (sequences + 1), rel=0.01)


def test_a_remote_prefill_stalls_the_sequences_that_decode_on_its_worker() -> None:
    load = busy(decode_sequences=8, decode_context_tokens=8000)
    both = worker("b1", "both", load=load)
    state = inputs_of([both, PD[0], PD[2]], stall_weight=0.1)
    found = schedule(request(mode="disaggregated", pin_decode="d1"), state, 0.0).candidates
    stalls = {c.prefill: c.stalls_s for c in found}
    assert stalls["b1"] == pytest.approx(8 * 1.024, rel=0.01)
    assert stalls["p1"] == 0
    assert found[0].prefill == "p1"


def test_a_link_slower_than_the_prefill_is_charged_with_all_that_lags_behind() -> None:
    """Layers are sent while others compute.

    The link's backlog shows as soon as it is the slower one.
    """
    one, size = request(), 16 * BLOCK_BYTES
    for rate, shown_s in (
        (1e9, 1e-3 + size / 30 / 1e9),
        (1e7, 1e-3 + size / 1e7 - 1.024 * 29 / 30),
    ):
        state = inputs_of(PD[1:])
        state = replace(state, cost=CostModel(replace(PROFILE, other_host=LinkProfile(1e-3, rate))))
        decision = schedule(replace(one, mode="disaggregated"), state, 0.0)
        assert decision.candidates[0].send_s == pytest.approx(shown_s, rel=0.01)
        mixed = schedule(one, state, 0.0)
        assert mixed.mode == "local"


def test_a_queue_is_worked_off_as_its_report_ages() -> None:
    load = busy(queued_prefill_tokens=5000, prefill_tokens_per_s=1000.0)
    state = inputs_of([worker("w", load=load, reported_at=100.0)])
    assert schedule(request(), state, 100.0).candidates[0].queue_s == pytest.approx(5.0)
    assert schedule(request(), state, 103.0).candidates[0].queue_s == pytest.approx(2.0)
    assert schedule(request(), state, 200.0).candidates[0].queue_s == 0.0


def test_a_short_rest_is_prefilled_locally_at_any_cost() -> None:
    slow = replace(PD[2], load=busy(queued_prefill_tokens=10_000, prefill_tokens_per_s=1000.0))
    state = inputs_of([PD[0], slow], min_remote_prefill_tokens=256)
    short = schedule(request(segments=pool_has(14)), state, 0.0)
    assert (short.mode, short.reason) == ("local", "short")
    assert schedule(request(), state, 0.0).mode == "disaggregated"


def test_a_short_rest_goes_elsewhere_when_locally_it_misses_the_objective() -> None:
    queued = replace(PD[2], load=busy(queued_prefill_tokens=100, prefill_tokens_per_s=1000.0))
    state = measured(inputs_of([PD[0], queued], min_remote_prefill_tokens=256))
    assert schedule(request(blocks=2), state, 0.0).reason == "short"
    decision = schedule(request(blocks=2, ttft_s=0.2), state, 0.0)
    assert (decision.mode, decision.reason) == ("disaggregated", "cost")


# ------------------------------------------------------------ reuse or recompute


def test_the_prefix_in_the_pool_is_reused_when_fetching_is_cheaper() -> None:
    decision = schedule(request(segments=pool_has(10)), inputs_of(PD), 0.0)
    assert decision.reuse_blocks == 10
    best = decision.candidates[0]
    assert best.prefill_s == pytest.approx((6 * BLOCK + 10) * 1e-3, rel=0.01)
    assert best.fetch_s == pytest.approx(1e-3 + 10 * BLOCK_BYTES / 1e9, rel=0.01)


def test_reuse_is_declined_when_fetching_costs_more_than_computing() -> None:
    state = inputs_of(PD)
    slow_link = replace(PROFILE, other_host=LinkProfile(1e-3, 1e6))
    state = replace(state, cost=CostModel(slow_link))
    decision = schedule(request(segments=pool_has(10)), state, 0.0)
    assert decision.reuse_blocks == 0
    assert decision.candidates[0].fetch_s == 0.0


def test_reuse_can_be_forced_at_any_cost() -> None:
    slow_link = replace(PROFILE, other_host=LinkProfile(1e-3, 1e6))
    insists = replace(inputs_of(PD).config, always_reuse=True)
    state = replace(inputs_of(PD), cost=CostModel(slow_link), config=insists)
    assert schedule(request(segments=pool_has(10)), state, 0.0).reuse_blocks == 10


def test_only_the_segment_that_pays_is_reused() -> None:
    slow_link = replace(PROFILE, other_host=LinkProfile(1e-3, 1e6))
    state = replace(inputs_of(PD), cost=CostModel(slow_link))
    segments = {"h2": [Segment("n2", 0, 6, Tier.DRAM), Segment("n1", 6, 6, Tier.DRAM)]}
    assert schedule(request(segments=segments), state, 0.0).reuse_blocks == 6


def test_a_disk_is_priced_as_its_node_measured_it() -> None:
    segments = pool_has(10, tier=Tier.NVME)
    slow_s = 10 * BLOCK_BYTES / 1e9
    fast = [NodeStatus("n1", "h1", GIB, read_bytes_per_s={Tier.NVME: 1e9})]
    decision = schedule(request(segments=segments), inputs_of(PD, fast), 0.0)
    assert decision.reuse_blocks == 10
    assert decision.candidates[0].fetch_s == pytest.approx(1e-3 + 2 * slow_s, rel=0.01)
    busy_disk = [replace(fast[0], queued_read_bytes=10 * BLOCK_BYTES)]
    decision = schedule(request(segments=segments), inputs_of(PD, busy_disk), 0.0)
    assert decision.candidates[0].fetch_s == pytest.approx(1e-3 + 3 * slow_s, rel=0.01)
    slow = [NodeStatus("n1", "h1", GIB, read_bytes_per_s={Tier.NVME: 1e6})]
    assert schedule(request(segments=segments), inputs_of(PD, slow), 0.0).reuse_blocks == 0


def test_blocks_in_memory_are_reused_even_if_the_rest_is_on_a_slow_disk() -> None:
    slow = [NodeStatus("n1", "h1", GIB, read_bytes_per_s={Tier.NVME: 1e6})]
    segments = {"": [Segment("n1", 0, 10, Tier.NVME, ready=7)]}
    decision = schedule(request(segments=segments), inputs_of(PD, slow), 0.0)
    assert decision.reuse_blocks == 7
    assert decision.candidates[0].fetch_s == pytest.approx(1e-3 + 7 * BLOCK_BYTES / 1e9, rel=0.01)


def test_a_worker_that_has_the_prefix_itself_fetches_nothing() -> None:
    workers = [worker("d1", "decode"), worker("d2", "decode")]
    decision = schedule(request(engine_blocks={"d2": 12}), inputs_of(workers), 0.0)
    assert (decision.decode, decision.reuse_blocks) == ("d2", 12)
    assert decision.candidates[0].fetch_s == 0.0


def test_a_whole_prompt_in_the_pool_still_computes_its_last_token() -> None:
    decision = schedule(request(blocks=16, tail=0, segments=pool_has(16)), inputs_of(PD), 0.0)
    assert (decision.mode, decision.reuse_blocks) == ("local", 15)


def test_segments_of_a_silent_node_and_what_follows_are_not_reused() -> None:
    nodes = [NodeStatus("n1", "h1", GIB, State.SUSPECT), NodeStatus("n2", "h2", GIB)]
    segments = {"": [Segment("n1", 0, 5, Tier.DRAM), Segment("n2", 5, 5, Tier.DRAM)]}
    assert schedule(request(segments=segments), inputs_of(PD, nodes), 0.0).reuse_blocks == 0


# ------------------------------------------------------------ where to decode, where to reserve


def test_the_least_burdened_decode_worker_is_chosen() -> None:
    loaded = worker("d1", "decode", load=busy(decode_sequences=20, decode_context_tokens=9000))
    decision = schedule(request(), inputs_of([loaded, worker("d2", "decode")]), 0.0)
    assert decision.decode == "d2"


def test_a_worker_without_free_places_gets_no_request() -> None:
    in_flight = InFlight()
    load = busy(places=2)
    state = inputs_of([worker(f"d{i}", "decode", load=load) for i in range(2)], in_flight=in_flight)
    for number in range(4):
        decision = schedule(request(request_id=str(number)), state, 0.0)
        assert not decision.is_refused
        in_flight.assigned(decision, 0.0)
    assert [in_flight.outstanding(each) for each in ("d0", "d1")] == [2, 2]
    refused = schedule(request(), state, 0.0)
    assert (refused.mode, refused.reason) == ("refused", "no_place")
    assert refused.retry_after_s > 0
    in_flight.finished("2")
    assert not schedule(request(), state, 0.0).is_refused


def test_equal_requests_rotate_over_equal_workers() -> None:
    in_flight = InFlight()
    state = inputs_of([worker(f"d{i}", "decode") for i in range(3)], in_flight=in_flight)
    chosen = []
    for number in range(6):
        decision = schedule(request(request_id=str(number)), state, float(number * 100))
        in_flight.assigned(decision, float(number * 100))
        in_flight.finished(str(number))
        chosen.append(decision.decode)
    assert chosen == ["d0", "d1", "d2"] * 2


def test_prefill_and_decode_workers_rotate_each_on_their_own() -> None:
    in_flight = InFlight()
    prefillers = [worker(f"p{i}", "prefill") for i in range(2)]
    decoders = [worker(f"d{i}", "decode") for i in range(3)]
    state = inputs_of([*prefillers, *decoders], in_flight=in_flight)
    chosen = []
    for number in range(6):
        one = request(request_id=str(number), mode="disaggregated")
        decision = schedule(one, state, float(number * 100))
        in_flight.assigned(decision, float(number * 100))
        in_flight.finished(str(number))
        chosen.append((decision.prefill, decision.decode))
    assert [d for _, d in chosen] == ["d0", "d1", "d2"] * 2
    assert [p for p, _ in chosen] == ["p0", "p1"] * 3


def test_requests_sent_and_not_yet_reported_count_as_queue() -> None:
    in_flight = InFlight()
    state = inputs_of([worker("d1", "decode"), worker("d2", "decode")], in_flight=in_flight)
    first = schedule(request(request_id="1"), state, 0.0)
    in_flight.assigned(first, 0.0)
    second = schedule(request(request_id="2"), state, 0.0)
    assert (first.decode, second.decode) == ("d1", "d2")
    queued = next(c for c in second.candidates if c.decode == "d1")
    assert queued.queue_s == pytest.approx(first.ttft_s, rel=0.01)


def test_work_that_the_worker_has_reported_is_not_counted_twice() -> None:
    in_flight = InFlight()
    state = inputs_of([worker("d1", "decode")], in_flight=in_flight)
    first = schedule(request(request_id="1"), state, 0.0)
    in_flight.assigned(first, 0.0)
    load = busy(queued_prefill_tokens=1034, prefill_tokens_per_s=1000.0)
    reported = inputs_of([worker("d1", "decode", load=load, reported_at=0.1)], in_flight=in_flight)
    second = schedule(request(request_id="2"), reported, 0.1)
    assert second.candidates[0].queue_s == pytest.approx(1.034, rel=0.01)


def test_slots_are_reserved_on_the_decode_host_or_where_space_is() -> None:
    force: dict[str, Any] = {"mode": "disaggregated"}
    assert schedule(request(**force), inputs_of(PD), 0.0).target_node == "n2"
    full = [
        NodeStatus("n1", "h1", GIB),
        NodeStatus("n2", "h2", 10),
        NodeStatus("n3", "h3", 2 * GIB),
    ]
    assert schedule(request(**force), inputs_of(PD, full), 0.0).target_node == "n3"
    twins = [NodeStatus("n2", "h2", GIB), NodeStatus("n3", "h2", 2 * GIB)]
    assert schedule(request(**force), inputs_of(PD, twins), 0.0).target_node == "n3"


def test_no_reservation_no_remote_prefill() -> None:
    full = [NodeStatus("n1", "h1", 10)]
    decision = schedule(request(mode="disaggregated"), inputs_of(PD, full), 0.0)
    assert (decision.mode, decision.reason) == ("refused", "no_room")
    assert schedule(request(), inputs_of(PD, full), 0.0).mode == "local"
    assert schedule(request(mode="disaggregated"), inputs_of(PD, []), 0.0).reason == "no_room"


def test_a_decode_worker_without_kv_room_is_not_chosen() -> None:
    load = busy(decode_sequences=1, decode_context_tokens=3500)
    full = worker("d1", "decode", kv_capacity_tokens=4000, load=load)
    assert schedule(request(), inputs_of([full]), 0.0).reason == "no_kv_room"


# ------------------------------------------------------------ refusing early


def test_a_request_that_no_worker_can_serve_in_time_is_refused_with_when_to_retry() -> None:
    load = busy(queued_prefill_tokens=10_000, prefill_tokens_per_s=1000.0)
    state = inputs_of([worker("w", load=load)])
    decision = schedule(request(ttft_s=2.0), state, 0.0)
    assert (decision.mode, decision.reason) == ("refused", "ttft_slo")
    assert decision.retry_after_s == pytest.approx(9.034, rel=0.01)
    assert (decision.prefill, decision.decode, decision.target_node) == (None, None, None)
    assert schedule(request(ttft_s=12.0), state, 0.0).mode == "local"


def test_load_predicted_for_the_end_of_the_prefill_decides_not_the_load_now() -> None:
    """Nothing decodes at d1 yet, but a request that is being prefilled for it will."""
    in_flight = InFlight()
    coming = Decision("x", "local", None, "d1", 0, None, 0.5, 0.01, "", output_tokens=1000)
    for number in range(5):
        in_flight.assigned(replace(coming, request_id=str(number)), 0.0)
    state = measured(inputs_of([worker("d1", "decode")], in_flight=in_flight))
    assert in_flight.decoding("d1", 0.0, 0.0)[0] == 0
    # Five others and this one: 10 + 6 ms, and its own prefill stalls them 1.03 s over 1000 tokens.
    decision = schedule(request(tpot_s=0.0165, output_tokens=1000), state, 0.0)
    assert (decision.mode, decision.reason) == ("refused", "tpot_slo")
    alone = measured(inputs_of([worker("d1", "decode")]))
    assert schedule(request(tpot_s=0.0165, output_tokens=1000), alone, 0.0).mode == "local"


def test_decodes_that_end_before_the_prefill_does_are_not_counted() -> None:
    in_flight = InFlight()
    short = Decision("x", "local", None, "d1", 0, None, 0.1, 0.01, "", output_tokens=10)
    for number in range(5):
        in_flight.assigned(replace(short, request_id=str(number)), 0.0)
    state = measured(inputs_of([worker("d1", "decode")], in_flight=in_flight))
    assert in_flight.decoding("d1", 0.15, 0.0)[0] == 5
    assert schedule(request(tpot_s=0.0125), state, 0.0).tpot_s == pytest.approx(0.011, rel=0.01)


def test_an_idle_worker_that_was_never_measured_is_given_a_chance() -> None:
    state = inputs_of([worker("w")])
    assert schedule(request(ttft_s=0.1, tpot_s=0.001), state, 0.0).mode == "local"
    queue = busy(queued_prefill_tokens=1000)
    waiting = inputs_of([PD[0], replace(PD[2], load=queue)])
    assert schedule(request(ttft_s=0.1), waiting, 0.0).reason == "ttft_slo"
    assert schedule(request(ttft_s=0.1), measured(state), 0.0).reason == "ttft_slo"
    assert schedule(request(tpot_s=0.001), measured(state), 0.0).reason == "tpot_slo"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"excluded": frozenset(["d1"])}, "no_decode_worker"),
        ({"pin_decode": "p1"}, "no_decode_worker"),
        ({"namespace_id": b"x" * 16}, "no_decode_worker"),
        ({"mode": "disaggregated", "pin_prefill": "p9"}, "no_prefill_choice"),
        ({"mode": "local", "pin_prefill": "p1"}, "no_prefill_choice"),
    ],
)
def test_a_refusal_says_why(changes: dict[str, Any], reason: str) -> None:
    decision = schedule(request(**changes), inputs_of(PD), 0.0)
    assert (decision.mode, decision.reason) == ("refused", reason)


@pytest.mark.parametrize(
    "changes",
    [
        {"excluded": frozenset(["p1", "p2"])},
        {"prompt_tokens": BLOCK - 1},
        {"segments": pool_has(16)},
    ],
    ids=["nobody prefills", "no full block", "all blocks stored"],
)
def test_a_forced_remote_prefill_of_nothing_is_served_locally(changes: dict[str, Any]) -> None:
    decision = schedule(request(mode="disaggregated", **changes), inputs_of(PD), 0.0)
    assert (decision.mode, decision.decode, decision.reason) == ("local", "d1", "nothing_remote")


def test_a_prompt_longer_than_every_model_is_refused_for_good() -> None:
    decision = schedule(request(), inputs_of([worker("w", max_model_tokens=1000)]), 0.0)
    assert (decision.reason, decision.retry_after_s) == ("prompt_too_long", 0.0)


def test_pins_are_kept() -> None:
    state = inputs_of([*PD, worker("d2", "decode", "h2")])
    decision = schedule(request(pin_prefill="p2", pin_decode="d2"), state, 0.0)
    assert (decision.mode, decision.prefill, decision.decode) == ("disaggregated", "p2", "d2")
    assert schedule(request(pin_decode="d2", mode="local"), state, 0.0).decode == "d2"


def test_senseless_requests_are_an_error() -> None:
    senseless: tuple[dict[str, Any], ...] = (
        {"prompt_tokens": 0},
        {"layers": 0},
        {"mode": "remote"},
        {"ttft_s": -1.0},
    )
    for changes in senseless:
        with pytest.raises(InvalidArgument):
            request(**changes)


# ------------------------------------------------------------ the decision's record


def test_a_candidates_parts_add_up_to_its_ttft() -> None:
    decision = schedule(request(segments=pool_has(4)), inputs_of(PD), 0.0)
    assert {c.mode for c in decision.candidates} == {"local", "disaggregated"}
    for c in decision.candidates:
        parts = c.queue_s + c.fetch_s + c.prefill_s + c.send_s + c.load_s + c.tail_s
        assert c.ttft_s == pytest.approx(parts)


def test_candidates_are_bounded_and_begin_with_the_chosen_one() -> None:
    decision = schedule(request(), inputs_of(PD, max_candidates=2), 0.0)
    assert len(decision.candidates) == 2
    assert decision.candidates[0].decode == decision.decode
    assert decision.candidates[0].ttft_s == decision.ttft_s


# ------------------------------------------------------------ strategies


def test_another_strategy_can_be_registered_and_chosen() -> None:
    class Refuser:
        def decide(self, request: ScheduleRequest, state: SchedulingInputs, now: float) -> Decision:
            return refuse(request, "because", 5.0)

    if "refuser" not in strategies():
        register_strategy("refuser", Refuser())
    assert schedule(request(), inputs_of(PD, strategy="refuser"), 0.0).reason == "because"
    with pytest.raises(ConfigError):
        register_strategy("kv-centric", Refuser())
    with pytest.raises(ConfigError):
        schedule(request(), inputs_of(PD, strategy="unheard-of"), 0.0)

"""Whole simulated clusters: equal seeds give equal results, no request is lost, known comparisons hold."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from conductor.roles.controller import RoleLimits
from conductor.routing.rules import parse_rules
from conductor.scheduling.scheduler import register_strategy, strategies
from conductor.scheduling.strategies import strategy_named
from kvpool.config.profile_file import write_profile_file
from kvpool.errors import ConfigError
from planner.simulator import sweeps
from planner.simulator.policy_cache import cache_factory
from planner.simulator.run_summary import summary
from planner.simulator.scenario import Group, Scenario, groups_of, setup_of
from planner.simulator.setup import SERVINGS
from planner.simulator.simulation import Simulation
from planner.simulator.workload import Arrival, Shape, arrivals, synthetic
from planner.sizing.crossover import crossover, least_bandwidth
from planner.sizing.hardware import GPUS, fitting, link_named
from planner.sizing.measured_profile import read_profile
from planner.sizing.model_presets import model_named
from planner.traces import TraceRequest
from tests.support.fork_server import run_kvpool
from workers.service.profile_fit import fit_profile

LLAMA = model_named("llama-3-70b")
LRU = cache_factory("prefix-lru")
BASE = Scenario(LLAMA, (Group(2),), (Group(2),), gpu="h100", tp=8, slo_ttft_s=5, slo_tpot_s=0.05)


def load(
    rate: float = 4, prompt: float = 6000, output: float = 150, seconds: float = 60, seed: int = 1
) -> list[Arrival]:
    return arrivals(synthetic([Shape(rate, prompt, output, seconds)], seed, shared_prefixes=6))


def row(scenario: Scenario, came: list[Arrival]) -> dict[str, Any]:
    return sweeps.row_of(scenario, came, LRU)


@pytest.mark.parametrize("serving", SERVINGS)
@pytest.mark.parametrize("admission", ["none", "late", "arrival", "predicted"])
def test_every_request_is_served_or_refused_with_a_reason(serving: Any, admission: Any) -> None:
    came = load(rate=12, seconds=30)
    scenario = replace(BASE, serving=serving, admission=admission)
    simulation = Simulation(setup_of(scenario), came, LRU)
    result = simulation.run()
    for request in result.requests:
        assert request.is_served != bool(request.refused)
        if request.is_served:
            assert request.arrival.at_s < request.first_at <= request.finished_at
            tokens = request.reused_tokens + request.computed_tokens
            assert tokens >= request.arrival.prompt_tokens
    assert len(simulation.state.in_flight) == 0
    assert not any(simulation.state.reserved_bytes.values())
    if admission == "none":
        assert not any(o.refused for o in result.requests)


def test_equal_seeds_give_equal_results_and_other_seeds_do_not() -> None:
    scenario = replace(BASE, strategy="random", seed=3)
    first, again = (row(scenario, load()) for _ in range(2))
    assert first == again
    assert row(replace(scenario, seed=4), load()) != first
    assert row(scenario, load(seed=2)) != first


def test_the_real_strategies_decide_and_so_does_a_new_one() -> None:
    asked = []

    class Spy:
        def decide(self, request: Any, state: Any, now: float) -> Any:
            asked.append(request.request_id)
            return strategy_named("kv-centric").decide(request, state, now)

    if "spy-of-simulation" not in strategies():
        register_strategy("spy-of-simulation", Spy())
    came = load(seconds=10)
    spied = row(replace(BASE, strategy="spy-of-simulation"), came)
    assert asked == [arrival.request_id for arrival in came]
    assert spied["ttft_s"] == row(BASE, came)["ttft_s"]


def test_a_lone_request_takes_what_the_profile_says() -> None:
    came = [Arrival("r", 0.0, 8192, 101, tuple(n.to_bytes(16, "big") for n in range(16)))]
    scenario = replace(
        BASE, decode=(Group(1),), prefill=(Group(1),), routing=parse_rules("mode: disaggregated")
    )
    setup = setup_of(scenario)
    [request] = Simulation(setup, came, LRU).run().requests
    cost = setup.instances[0].cost
    prefill_s = cost.prefill_base_s + 8192 * cost.prefill_token_s
    prefill_s += cost.prefill_attention_s * 8192 * 4096
    kv_bytes = 8192 * 327_680
    last_layer_s = 2e-4 + kv_bytes / 80 / 100e9
    load_s = 1e-4 + kv_bytes / 200e9
    tail_s = cost.tpot_base_s + cost.prefill_attention_s * 8192
    assert request.ttft_s == pytest.approx(prefill_s + last_layer_s + load_s + tail_s, rel=1e-3)
    step_s = cost.tpot_base_s + cost.tpot_sequence_s + cost.tpot_context_s * (8192 + 50)
    assert request.tpot_s == pytest.approx(step_s, rel=1e-3)


def test_layerwise_sends_hide_what_a_slow_link_would_show() -> None:
    came = load(rate=1, seconds=40)
    slow = replace(
        BASE,
        link_bytes_per_s=link_named("25GbE").bytes_per_s,
        routing=parse_rules("mode: disaggregated"),
    )
    overlapped = row(slow, came)["ttft_s"]["mean"]
    assert row(replace(slow, is_overlapped=False), came)["ttft_s"]["mean"] > 1.1 * overlapped


def test_the_pool_reuses_what_disaggregation_alone_computes_again() -> None:
    came = load()
    rows = {
        serving: row(replace(BASE, serving=serving, engine_share=0.02), came)
        for serving in ("disaggregated", "pooled")
    }
    assert rows["pooled"]["hit_ratio"] > rows["disaggregated"]["hit_ratio"] + 0.05
    assert rows["pooled"]["computed_tokens"] < rows["disaggregated"]["computed_tokens"]


def test_kv_centric_beats_the_rules_and_random_is_last() -> None:
    """The order of Mooncake's comparison (FAST'25, section 8): random, load balancing, KV-centric."""
    came = load(rate=9, prompt=8000, seconds=90)
    scenario = replace(BASE, prefill=(Group(4),), decode=(Group(4),), hosts=4)
    ttft = {
        name: row(replace(scenario, strategy=name), came)["ttft_s"]["mean"]
        for name in ("random", "least-loaded", "kv-centric")
    }
    assert ttft["kv-centric"] < ttft["least-loaded"] < ttft["random"]


def test_predicted_admission_wastes_no_prefill_where_late_checks_do() -> None:
    came = load(rate=14, prompt=3000, output=900, seconds=60)
    scenario = replace(BASE, decode=(Group(1),), prefill=(Group(3),), slo_tpot_s=0.03)
    late = row(replace(scenario, admission="late"), came)
    predicted = row(replace(scenario, admission="predicted"), came)
    assert late["wasted_prefills"] > 10
    assert predicted["wasted_prefills"] < late["wasted_prefills"] / 4
    assert predicted["goodput_per_s"] >= 0.95 * late["goodput_per_s"]


def test_roles_follow_a_shift_and_are_not_worse_than_the_split_they_began_with() -> None:
    shapes = [Shape(1, 2000, 500, 60), Shape(9, 9000, 20, 150)]
    came = arrivals(synthetic(shapes, 5))
    scenario = replace(
        BASE,
        prefill=(Group(1),),
        decode=(Group(5),),
        slo_ttft_s=2,
        roles=RoleLimits(),
        routing=parse_rules("mode: disaggregated"),
    )
    dynamic = row(scenario, came)
    assert dynamic["role_changes"]
    assert {change["role"] for change in dynamic["role_changes"]} >= {"prefill"}
    assert dynamic["slo_share"] > row(replace(scenario, roles=None), came)["slo_share"]


def test_a_queue_keeps_requests_that_would_be_refused() -> None:
    came = load(rate=20, prompt=2000, output=800, seconds=15)
    crowded = replace(BASE, admission="arrival", slo_ttft_s=30, slo_tpot_s=0.014)
    refused = row(crowded, came)
    waited = row(replace(crowded, max_waiting=500), came)
    assert refused["rejected"] > 10
    assert waited["rejected"] < refused["rejected"]


def test_mixed_hardware_is_distinguished() -> None:
    setup = setup_of(
        replace(BASE, tp=None, prefill=groups_of("1@h100:8,1@h20:8"), decode=groups_of("2@h20:4"))
    )
    kinds = [instance.kind for instance in setup.instances]
    assert kinds == ["h100 x8", "h20 x8", "h20 x4", "h20 x4"]
    simulation = Simulation(setup, load(rate=3, seconds=40), LRU)
    result = simulation.run()
    by_worker = [
        sum(o.decision.prefill == w.worker_id for o in result.requests if o.decision)
        for w in setup.instances[:2]
    ]
    assert by_worker[0] > by_worker[1]


def test_a_split_is_green_where_most_requests_meet_both_objectives_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = iter((0.89, 0.9, 1.0))
    monkeypatch.setattr(
        sweeps,
        "row_of",
        lambda *_: {"ttft_met": 0.95, "tpot_met": 0.94, "slo_share": next(shares)},
    )
    rows = sweeps.ratio_sweep(replace(BASE, slo_ttft_s=3), [], LRU)
    assert [row["meets_both"] for row in rows] == [False, True, True]


def test_a_ratio_sweep_tries_every_split_and_says_which_meet_both_objectives() -> None:
    rows = sweeps.ratio_sweep(replace(BASE, slo_ttft_s=3), load(seconds=15), LRU)
    assert [(r["prefill"], r["decode"]) for r in rows] == [(1, 3), (2, 2), (3, 1)]
    assert all(isinstance(r["meets_both"], bool) for r in rows)
    with pytest.raises(ConfigError, match="objectives"):
        sweeps.ratio_sweep(replace(BASE, slo_ttft_s=0), load(seconds=5), LRU)


def test_transfers_pay_for_long_batches_and_fast_links() -> None:
    machine = fitting(LLAMA, GPUS["h100"], 8)
    slow, fast = (crossover(machine, link_named(n), 8192) for n in ("10GbE", "8x400Gb"))
    assert not slow.is_worth_it
    assert fast.is_worth_it
    needed = least_bandwidth(machine, 8192)
    assert needed is not None
    assert 1.25e9 < needed < 400e9
    busier = least_bandwidth(machine, 8192, batch=128)
    assert busier is not None
    assert busier < needed


def test_traces_are_scaled_in_time_and_cut_into_smaller_blocks() -> None:
    trace = [TraceRequest(1, 1100, 5, [7, 8, 9]), TraceRequest(3, 700, 0, [7, 10])]
    first, second = arrivals(trace, speed=2, block_tokens=128)
    assert (first.at_s, second.at_s) == (0.0, 1.0)
    assert (len(first.hashes), len(second.hashes)) == (8, 5)
    assert first.hashes[:4] == second.hashes[:4]
    assert not set(first.hashes[4:]) & set(second.hashes)
    assert second.output_tokens == 1
    with pytest.raises(ConfigError, match="divide"):
        arrivals(trace, block_tokens=100)


def test_a_measured_profile_replaces_the_computed_one(tmp_path: Path) -> None:
    """The file is the one that `kvpool worker profile` writes."""
    samples = [(new, 0, 0.001 + 0.001 * new) for new in (100, 400, 1600)]
    steps = [(context, 1, 0.02 + 1e-7 * context) for context in (100, 1000, 10_000)]
    path = tmp_path / "p.yaml"
    write_profile_file(path, fit_profile(samples, steps, "tiny", "cpu"))
    figures = yaml.safe_load(path.read_text())
    setup = setup_of(BASE)
    link = setup.instances[0].cost.other_host
    measured = read_profile(path, setup.same_host, link)
    instance = setup_of(replace(BASE, measured=measured)).instances[0]
    assert instance.cost.prefill_token_s == pytest.approx(0.001, rel=0.01)
    assert instance.cost.other_host == link
    assert instance.kv_capacity_tokens == setup.instances[0].kv_capacity_tokens
    path.write_text(yaml.safe_dump(figures | {"kv_capacity_tokens": 100_000}))
    measured = read_profile(path, setup.same_host, link)
    assert setup_of(replace(BASE, measured=measured)).instances[0].kv_capacity_tokens == 100_000
    for broken in ({"tpot": {"base_s": -1}}, {"kv_capacity_tokens": -1}, {"more": 1}):
        path.write_text(yaml.safe_dump(figures | broken))
        with pytest.raises(ConfigError, match=r"p\.yaml is not a profile"):
            read_profile(path, setup.same_host, link)


def test_figures_count_refused_requests_against_the_objectives() -> None:
    came = load(rate=30, seconds=10)
    scenario = replace(BASE, admission="predicted", slo_ttft_s=1)
    result = sweeps.run(scenario, came, LRU)
    figures = summary(result, 1, 0.05)
    assert figures["rejected"] > 0
    assert figures["slo_share"] <= figures["served"] / figures["requests"]
    assert sum(figures["rejections"].values()) == figures["rejected"]


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_kvpool("simulate", *arguments, timeout_s=120)


def test_the_command_prints_one_document_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    done = run_command(
        *("--load", "2,3000,50,20", "--prefill", "1", "--decode", "1", "--slo-ttft", "2000"),
        *("--slo-tpot", "50", "--strategy", "random,kv-centric", "--json", "--plot", str(picture)),
    )
    document = json.loads(done.stdout)
    assert [r["strategy"] for r in document["rows"]] == ["random", "kv-centric"]
    assert {"ttft_s", "tpot_s", "goodput_per_s", "hit_ratio", "moved_bytes", "rejected"} <= set(
        document["rows"][0]
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_says_why_requests_were_refused_and_shows_no_latency_if_none_was_served() -> None:
    done = run_command("--load", "1,9000000,5,5", "--prefill", "1", "--decode", "1")
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("pooled")).split()
    assert row[row.index("yes") + 1] == "0"  # served
    assert " - " in done.stdout
    assert "rejected: " in done.stdout


@pytest.mark.parametrize(
    "bad",
    [
        [],
        ["/does/not/exist"],
        ["--load", "1,2"],
        ["--load", "0,1,1,1"],
        ["--load", "4,1000,50,5", "--strategy", "kv-centrik"],
        ["--load", "4,1000,50,5", "--prefill", "x"],
        ["--load", "4,1000,50,5", "--decode", "0"],
        ["--load", "4,1000,50,5", "--dram", "much"],
        ["--load", "4,1000,50,5", "--sweep", "all"],
        ["--load", "4,1000,50,5", "--model", "gpt-9"],
        ["--load", "4,1000,50,5", "--tp", "1"],
        ["--load", "4,1000,50,5", "--eviction", "oldest"],
        ["--load", "4,1000,50,5", "--speed", "0"],
        ["--load", "4,1000,50,5", "--sweep", "ratio"],
        ["--load", "4,1000,50,5", "--dram", "0"],
        ["--load", "4,1000,50,5", "--plot", "no/such.png"],
        ["--load", "4,1000,50,5", "--plot", "picture.doc"],
        ["--load", "4,1000,50,5", "--rules", "absent.yaml"],
    ],
)
def test_bad_input_ends_with_one_line_and_status_2(bad: list[str]) -> None:
    done = run_command(*bad)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stdout == ""

"""The search of placements: which are tried, what is found, and files that kvpool itself accepts."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from conductor.routing.rules import parse_rules
from kvpool.config.loader import load_settings
from kvpool.errors import ConfigError
from planner.simulator import advice, pool_size
from planner.simulator.placement_search import placements, search
from planner.simulator.policy_cache import cache_factory
from planner.simulator.scenario import Scenario
from planner.simulator.workload import Arrival, Shape, arrivals, synthetic
from planner.sizing.model_presets import model_named
from tests.support.fork_server import run_kvpool

LRU = cache_factory("prefix-lru")
BASE = Scenario(model_named("llama-3-8b"), gpu="a100", slo_ttft_s=1.0, slo_tpot_s=0.03)


def load(rate: float, prompt: float, output: float, requests: int = 150) -> list[Arrival]:
    shape = Shape(rate, prompt, output, requests / rate)
    return arrivals(synthetic([shape], 7, shared_prefixes=4))


def test_every_split_and_parallelism_that_fits_is_tried_within_the_gpus() -> None:
    found = placements(BASE, 4)
    assert {p.serving for p in found} == {"coupled", "pooled"}
    for scenario in found:
        groups = (*scenario.prefill, *scenario.decode)
        assert 0 < sum(g.count * (g.tp or 1) for g in groups) <= 4
    splits = {(p.prefill[0].count, p.decode[0].count) for p in found if p.serving == "pooled"}
    assert {(1, 3), (2, 2), (3, 1), (1, 1)} <= splits
    with pytest.raises(ConfigError, match="do not fit"):
        placements(replace(BASE, model=model_named("llama-3.1-405b")), 4)


def test_the_finalists_are_in_order_of_what_they_carry() -> None:
    found = search(BASE, 4, load(3, 4000, 100), LRU)
    assert found[0].speed / found[0].gpus == max(p.speed / p.gpus for p in found)
    assert any(p.scenario.serving == "coupled" for p in found)
    assert found[0].speed > 0
    with pytest.raises(ConfigError, match="objectives"):
        search(replace(BASE, slo_tpot_s=0), 4, load(3, 4000, 100), LRU)


def test_the_pools_curve_rises_and_sizes_are_taken_from_its_bend() -> None:
    came = load(4, 6000, 50, 200)
    hits = pool_size.curve(came, LRU)
    assert [h.blocks for h in hits] == sorted(h.blocks for h in hits)
    assert all(a.hit_ratio <= b.hit_ratio + 1e-9 for a, b in itertools.pairwise(hits))
    dram, nvme = pool_size.recommended(hits)
    assert 0 < dram <= hits[-1].blocks
    assert nvme == 0 or dram < nvme <= hits[-1].blocks
    assert pool_size.recommended([]) == (0, 0)


def test_advice_has_reasons_and_files_that_kvpool_accepts(tmp_path: Path) -> None:
    came = load(3, 4000, 100, requests=80)
    found = search(BASE, 4, came, LRU)
    answer = advice.advise(BASE, 4, came, found, pool_size.curve(came, LRU), 2.0)
    assert len(answer["reasons"]) >= 4
    assert answer["dollars_per_million_tokens"] > 0
    policy = parse_rules(advice.rules_yaml(answer))
    assert (policy.mode == "aggregated") != answer["disaggregate"]
    config = tmp_path / "kvpool.yaml"
    config.write_text(advice.settings_yaml(answer, BASE))
    settings = load_settings(config, {}).settings
    assert settings.conductor.slo_ttft_s == BASE.slo_ttft_s
    assert settings.conductor.slo_tpot_s == BASE.slo_tpot_s
    assert settings.conductor.strategy == BASE.strategy
    assert 0 < settings.node.dram_bytes <= BASE.dram_bytes
    placed = sum(answer[role]["replicas"] * answer[role]["tp"] for role in ("prefill", "decode"))
    assert 0 < placed <= 4
    slow = replace(BASE, link_bytes_per_s=1e7)
    answer = advice.advise(slow, 4, came, found, [], None)  # the same placements over a slower link
    assert any("always costs more" in reason for reason in answer["reasons"])


def test_nodes_get_no_more_memory_than_their_hosts_have() -> None:
    came = load(3, 4000, 100)
    poor = replace(BASE, dram_bytes=2 << 30)
    found = search(poor, 2, came, LRU)
    hits = [pool_size.Hits(100, 0.1), pool_size.Hits(4000, 0.4), pool_size.Hits(5000, 0.41)]
    answer = advice.advise(poor, 2, came, found, hits, None)
    node = yaml.safe_load(advice.settings_yaml(answer, poor))["node"]
    hosts = answer["prefill"]["replicas"] + answer["decode"]["replicas"]
    assert 0 < answer["pool"]["dram_bytes"] <= hosts * poor.dram_bytes
    assert answer["pool"]["nvme_bytes"] == 4000 * (64 << 20)  # a block of 512 tokens is 64 MiB
    assert node["dram_bytes"] == "2GiB"
    assert any(reason.startswith("pool: ") for reason in answer["reasons"])


def test_the_command_writes_its_files_and_refuses_in_one_line(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = synthetic([Shape(2, 3000, 50, 20)], 1)
    trace.write_text(
        "\n".join(
            json.dumps(
                {
                    "timestamp": 1000 * r.time_s,
                    "input_length": r.input_tokens,
                    "output_length": r.output_tokens,
                    "hash_ids": r.block_ids,
                }
            )
            for r in rows
        )
    )
    command = ["plan", "deploy", str(trace), "--gpus", "2"]
    command += ["--slo-ttft", "2000", "--slo-tpot", "50", "--model", "llama-3-8b", "--json"]
    done = run_kvpool(*command, "--out", str(tmp_path / "out"))
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert answer["placement"]
    files = [tmp_path / "out" / name for name in ("rules.yaml", "kvpool.yaml")]
    assert answer["files"] == [str(file) for file in files]
    assert set((tmp_path / "out").iterdir()) == set(files)
    parse_rules(files[0].read_text())
    load_settings(files[1], {})
    done = run_kvpool(*command, "--model", "llama-3-70b", "--weights", "fp32")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "do not fit" in done.stderr

"""The whole path with a tiny real model: disaggregation, reuse, fallbacks, cancellation."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch

from conductor.requests.timings import PHASES
from kvpool.errors import DeadlineExceeded
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from tests.support.process_cluster import LAYOUT, Cluster, wait_until
from tests.support.tiny_model import MAX_TOKENS, VOCABULARY, save_tiny_llama

BLOCK = LAYOUT.block_tokens
KV_LAYOUT = msgspec.structs.replace(LAYOUT, dtype="float32")  # equal on every CPU


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), dtype=torch.float32)


def start(cluster: Cluster, model: Path) -> Cluster:
    """Two hosts: a node and a decode worker on each, the prefill worker on the first."""
    cluster.start_conductor(
        "conductor.advanced.min_remote_prefill_tokens=64",
        "conductor.advanced.always_reuse=true",  # a tiny model computes faster than anything can be read
        "conductor.advanced.heartbeat_s=0.2",
        "conductor.advanced.suspect_after_s=1.5",
        "conductor.advanced.dead_after_s=4",
    )
    quick = ("node.advanced.quarantine_s=2", "node.advanced.grace_s=0.5")
    cluster.launch_node("node-a", *quick, host="host-a")
    cluster.launch_node("node-b", *quick, host="host-b")
    cache = "worker.advanced.local_cache_tokens=4096"
    cluster.launch_worker("prefill", "prefill", model, host="host-a")
    cluster.launch_worker("decode-a", "decode", model, cache, host="host-a")
    cluster.launch_worker("decode-b", "decode", model, cache, host="host-b")
    for name in ("node-a", "node-b"):
        cluster.ready_node(name)
    for name in ("prefill", "decode-a", "decode-b"):
        cluster.ready_worker(name)
    cluster.wait_joined(nodes=2, workers=3)
    return cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("serving"))
    with running.supervisor:
        yield start(running, model)


@pytest.fixture
def own_cluster(tmp_path: Path, model: Path) -> Iterator[Cluster]:
    """For tests that kill."""
    running = Cluster(tmp_path)
    with running.supervisor:
        yield start(running, model)


def prompt(seed: int, tokens: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(10, VOCABULARY, tokens).tolist()
    return ids


def body(tokens: list[int], **options: Any) -> dict[str, Any]:
    count = options.pop("max_tokens", 12)
    ask = {"prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return {**ask, "kvpool": {"return_token_ids": True, **options}}


def complete(cluster: Cluster, tokens: list[int], **options: Any) -> dict[str, Any]:
    url = f"http://{cluster.conductor['http']}/v1/completions"
    response = httpx.post(url, json=body(tokens, **options), timeout=60)
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


def test_prefill_and_decode_on_two_hosts_give_the_engines_own_tokens(cluster: Cluster) -> None:
    tokens = prompt(1, 10 * BLOCK + 7)
    target = cluster.workers["decode-b"]["id"]
    answer = complete(cluster, tokens, decode_worker=target, prefill="remote")
    done = answer["kvpool"]
    assert done["mode"] == "disaggregated"
    assert done["prefill_worker"] == cluster.workers["prefill"]["id"]
    assert done["decode_worker"] == target
    assert (done["pool_tokens"], done["computed_tokens"]) == (10 * BLOCK, 7)
    # Computed for this very request: read from the pool, and yet no hit.
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    # Reserved near the decode worker: the prefill worker writes to the other host, over NIXL.
    assert done["bytes_written"] == {"nixl": 10 * KV_LAYOUT.block_bytes}
    assert done["bytes_read"] == {"shm": 10 * KV_LAYOUT.block_bytes}
    assert (done["verified_blocks"], done["fallback_reason"]) == (10, "")
    # The same split by the engine alone: it computes the prompt, then reuses its own blocks.
    complete(cluster, tokens, decode_worker=target, pool="local")
    split = {"pool": "local", "local_prefix_tokens": 10 * BLOCK}
    local = complete(cluster, tokens, decode_worker=target, **split)["kvpool"]
    assert local["local_tokens"] == 10 * BLOCK
    assert done["token_ids"] == local["token_ids"]
    assert len(set(done["token_ids"])) > 3


def test_a_second_prompt_finds_the_shared_prefix_from_the_other_host(cluster: Cluster) -> None:
    shared = prompt(2, 8 * BLOCK)
    first, second = shared + prompt(3, 20), shared + prompt(4, 25)
    complete(cluster, first, decode_worker=cluster.workers["decode-a"]["id"])
    cluster.wait_indexed(shared)
    target = cluster.workers["decode-b"]["id"]
    hit = complete(cluster, second, decode_worker=target)
    assert hit["kvpool"]["pool_tokens"] == 8 * BLOCK
    assert hit["kvpool"]["mode"] == "local"
    assert hit["kvpool"]["bytes_read"] == {"nixl": 8 * KV_LAYOUT.block_bytes}
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] == 8 * BLOCK
    complete(cluster, first, decode_worker=target, pool="local")
    split = {"pool": "local", "local_prefix_tokens": 8 * BLOCK}
    local = complete(cluster, second, decode_worker=target, **split)["kvpool"]
    assert hit["kvpool"]["token_ids"] == local["token_ids"]


def test_with_the_pool_off_nothing_is_read_or_written(cluster: Cluster) -> None:
    tokens = prompt(5, 4 * BLOCK)
    done = complete(cluster, tokens, pool="off")["kvpool"]
    assert (done["pool_tokens"], done["computed_tokens"]) == (0, 4 * BLOCK)
    assert done["bytes_read"] == done["bytes_written"] == {}
    again = complete(cluster, tokens, pool="off")["kvpool"]
    assert again["token_ids"] == done["token_ids"]


def test_a_short_prompt_is_prefilled_by_the_decode_worker_and_stored(cluster: Cluster) -> None:
    tokens = prompt(6, BLOCK + 5)
    first = complete(cluster, tokens)["kvpool"]
    assert (first["mode"], first["computed_tokens"]) == ("local", BLOCK + 5)

    def hit() -> bool:
        return bool(complete(cluster, tokens)["kvpool"]["pool_tokens"] == BLOCK)

    wait_until(hit, "the block that the decode worker computed is found")


def test_a_prompt_of_whole_blocks_recomputes_only_its_last_token(cluster: Cluster) -> None:
    tokens = prompt(7, 6 * BLOCK)
    complete(cluster, tokens)
    cluster.wait_indexed(tokens)
    again = complete(cluster, tokens)["kvpool"]
    assert (again["pool_tokens"], again["computed_tokens"]) == (6 * BLOCK - 1, 1)


def test_a_remote_prefill_asked_for_a_stored_prompt_is_served_locally(cluster: Cluster) -> None:
    tokens = prompt(11, 6 * BLOCK + 5)
    first = complete(cluster, tokens, prefill="remote")["kvpool"]
    assert first["mode"] == "disaggregated"
    cluster.wait_indexed(tokens)
    again = complete(cluster, tokens, prefill="remote")["kvpool"]
    assert (again["mode"], again["pool_tokens"]) == ("local", 6 * BLOCK)
    assert again["token_ids"] == first["token_ids"]


def test_every_phase_of_a_disaggregated_request_is_measured_and_exported(cluster: Cluster) -> None:
    shared = prompt(15, 4 * BLOCK)
    complete(cluster, shared + prompt(16, 5))  # so that the prefill has something to read
    cluster.wait_indexed(shared)
    tokens = shared + prompt(17, 6 * BLOCK + 9)
    started = time.monotonic()
    done = complete(cluster, tokens, prefill="remote")["kvpool"]
    total_s = time.monotonic() - started
    assert done["mode"] == "disaggregated"
    phases = done["phases"]
    assert set(PHASES) <= set(phases)
    assert all(phases[name] > 0 for name in PHASES), phases
    before_first = sum(phases[name] for name in PHASES if name != "per_token_decode_time")
    assert before_first <= done["ttft_s"] + 0.001 < total_s
    assert before_first > 0.3 * done["ttft_s"]  # the rest is messages and waiting in between
    assert phases["per_token_decode_time"] * 11 < total_s
    # Of this prompt the pool had four blocks; what the decode worker read was computed for it.
    assert done["tokens_by_tier"] == {"dram": 4 * BLOCK}
    url = f"http://{cluster.conductor['http']}"
    record = httpx.get(f"{url}/v1/requests/{done['request_id']}", timeout=10).json()
    assert record["outcome"]["phases"] == phases
    assert record["outcome"]["tokens_by_tier"] == {"dram": 4 * BLOCK}
    metrics = httpx.get(f"{url}/metrics", timeout=10).text
    for name in PHASES:
        assert f'kvpool_request_phase_seconds_count{{phase="{name}"}}' in metrics
    for name in ("kvpool_ttft_seconds_count", "kvpool_tpot_seconds_count", "kvpool_goodput"):
        assert name in metrics
    for source in ("dram", "computed"):
        assert f'kvpool_prompt_tokens_total{{source="{source}"}}' in metrics
    assert "kvpool_decode_active_sequences{worker=" in metrics
    log = cluster.supervisor.members[0].log_path.read_text()
    line = next(line for line in log.splitlines() if done["request_id"] in line and "done" in line)
    assert all(name in line for name in PHASES)


def test_streaming_sends_events_and_the_report_last(cluster: Cluster) -> None:
    url = f"http://{cluster.conductor['http']}/v1/completions"
    ask = {**body(prompt(8, 40), max_tokens=5), "stream": True}
    events = []
    with httpx.stream("POST", url, json=ask, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-kvpool-mode"] == "local"
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line[6:])
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert len(last["kvpool"]["token_ids"]) == last["usage"]["completion_tokens"] == 5
    reasons = [c["finish_reason"] for e in events[:-1] for c in json.loads(e)["choices"]]
    assert reasons[-1] == "length"


def test_explain_keeps_decision_candidates_and_outcome(cluster: Cluster) -> None:
    done = complete(cluster, prompt(9, 5 * BLOCK))["kvpool"]
    url = f"http://{cluster.conductor['http']}/v1/requests/{done['request_id']}"
    record = httpx.get(url, timeout=10).json()
    assert record["decision"]["mode"] == done["mode"]
    assert len(record["decision"]["candidates"]) >= 2
    assert record["outcome"]["status"] == "ok"
    assert record["outcome"]["ttft_s"] > 0
    counters = cluster.stats()["counters"]
    assert 1 <= counters["goodput_requests"] <= counters["requests:ok"]


def test_a_client_that_leaves_frees_the_worker(cluster: Cluster) -> None:
    url = f"http://{cluster.conductor['http']}/v1/completions"
    before = cluster.stats()["counters"].get("requests:cancelled", 0)
    ask = {**body(prompt(10, 40), max_tokens=400), "stream": True}
    with httpx.stream("POST", url, json=ask, timeout=60) as response:
        next(response.iter_lines())

    def cancelled() -> bool:
        # Both: the workers' last report may be from before the request.
        stats = cluster.stats()
        is_idle = all(w["load"]["running"] == 0 for w in stats["workers"])
        return is_idle and stats["counters"].get("requests:cancelled", 0) == before + 1

    wait_until(cancelled, "the decode stops when its reader is gone")


def test_a_client_that_leaves_without_streaming_frees_the_worker_too(cluster: Cluster) -> None:
    url = f"http://{cluster.conductor['http']}/v1/completions"
    before = cluster.stats()["counters"].get("requests:cancelled", 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body(prompt(12, 40), max_tokens=400), timeout=0.15)

    def cancelled() -> bool:
        stats = cluster.stats()
        is_idle = all(w["load"]["running"] == 0 for w in stats["workers"])
        return is_idle and stats["counters"].get("requests:cancelled", 0) == before + 1

    wait_until(cancelled, "the decode stops when nobody waits for its answer")


def test_a_body_of_many_mistakes_holds_nobody_up(cluster: Cluster) -> None:
    url = f"http://{cluster.conductor['http']}/v1/completions"
    content = b'{"prompt":[' + b"{}," * 400_000 + b"1]}"
    started = time.monotonic()
    response = httpx.post(url, content=content, timeout=60)
    assert time.monotonic() - started < 5.0  # each of them an error: seven seconds at least
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "the prompt has 400001 items" in message
    named = httpx.post(url, content=b'{"prompt":[' + b"{}," * 100_000 + b"1]}", timeout=60)
    assert named.json()["error"]["message"].startswith("prompt[0]: expected `int`")


@pytest.mark.parametrize("change", [{"temperature": 1e-300}, {"temperature": 1, "top_p": 1e-300}])
def test_tiny_sampling_values_take_the_best_token(cluster: Cluster, change: dict[str, Any]) -> None:
    url = f"http://{cluster.conductor['http']}/v1/completions"
    tokens = prompt(13, 40)
    response = httpx.post(url, json={**body(tokens), **change}, timeout=20)
    assert response.status_code == 200, response.text
    greedy = complete(cluster, tokens)["kvpool"]["token_ids"]
    assert response.json()["kvpool"]["token_ids"] == greedy


async def test_a_worker_says_when_its_time_was_over_before_the_text(cluster: Cluster) -> None:
    client = WireClient(cluster.workers["decode-a"]["wire"], "test")
    conductor = WireClient(cluster.conductor["wire"], "test")
    stats = await conductor.call(m.PoolStats(), 5.0)
    namespace_id = stats.workers[0].descriptor.namespace.namespace_id
    tokens = np.array(prompt(14, 20), dtype="<u4").tobytes()
    sampling = m.Sampling(400, ignore_eos=True)
    request = m.Generate("r", namespace_id, tokens, b"", [], [], sampling, 0.2, use_pool=False)
    items = []

    async def read() -> None:
        async for item in client.stream(request, 10.0):
            items.append(item)

    with pytest.raises(DeadlineExceeded, match=r"of 400 tokens"):
        await read()
    assert 0 < len(items) < 400
    await client.close()
    await conductor.close()


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"prompt": []}, 400, "empty"),
        ({"prompt": [1.5]}, 400, "prompt"),
        ({"prompt": [-1] * 40}, 400, "token"),
        ({"prompt": [VOCABULARY + 1] * 40}, 400, "token"),
        ({"prompt": [5] * MAX_TOKENS}, 400, "context"),
        ({"prompt": ["a", "b"]}, 400, "one"),
        ({"model": "unknown"}, 404, "served: tiny"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"n": 2}, 400, "n"),
        ({"kvpool": {"unknown": 1}}, 400, "unknown"),
        ({"prompt": "text"}, 503, "tokenizer"),
    ],
)
def test_bad_requests_are_refused_in_openais_shape(
    cluster: Cluster, change: dict[str, Any], status: int, words: str
) -> None:
    url = f"http://{cluster.conductor['http']}/v1/completions"
    response = httpx.post(url, json={**body(prompt(1, 40)), **change}, timeout=20)
    assert (response.status_code, response.status_code == status) == (status, True), response.text
    assert words in response.json()["error"]["message"]


def test_bodies_over_the_limit_and_broken_json_are_refused(cluster: Cluster) -> None:
    url = f"http://{cluster.conductor['http']}/v1/completions"
    large = httpx.post(url, content=b"x" * (9 << 20), timeout=20)
    assert large.status_code == 413
    broken = httpx.post(url, content=b"{not json", timeout=20)
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_argument")


# ---------------------------------------------------------------- trouble


def test_a_prefill_worker_killed_in_mid_prefill_costs_no_request(own_cluster: Cluster) -> None:
    cluster = own_cluster
    cluster.kill("prefill", signal.SIGSTOP)  # it takes the request and never answers
    url = f"http://{cluster.conductor['http']}/v1/completions"
    tokens = prompt(20, 10 * BLOCK)
    with httpx.Client(timeout=60) as client:
        ask = {**body(tokens, prefill="remote"), "stream": True}
        with client.stream("POST", url, json=ask) as response:
            assert response.headers["x-kvpool-mode"] == "disaggregated"
            wait_until(lambda: cluster.stats()["node_states"], "the conductor answers meanwhile")
            cluster.kill("prefill")
            events = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    report = json.loads(events[-2])["kvpool"]
    assert report["fallback_reason"] == "prefill:unavailable"
    reference = complete(cluster, tokens, pool="off")["kvpool"]
    assert report["token_ids"] == reference["token_ids"]
    for name in ("node-a", "node-b"):

        def settled(name: str = name) -> bool:
            [dram] = [t for t in cluster.node_stats(name)["tiers"] if t["tier"] == "dram"]
            return bool(dram["reserved_bytes"] == dram["quarantined_bytes"] == 0)

        wait_until(settled, f"the dead writer's slots on {name} are free after quarantine")


def test_a_stopped_prefill_worker_costs_only_the_time_to_suspect_it(own_cluster: Cluster) -> None:
    cluster = own_cluster
    cluster.kill("prefill", signal.SIGSTOP)
    started = time.monotonic()
    done = complete(cluster, prompt(24, 10 * BLOCK), prefill="remote")["kvpool"]
    assert time.monotonic() - started < 10  # of a request timeout of 120
    assert done["fallback_reason"] == "prefill:unavailable"
    assert len(done["token_ids"]) == 12


def test_a_stopped_decode_worker_costs_no_token(own_cluster: Cluster) -> None:
    cluster = own_cluster
    tokens = prompt(25, 3 * BLOCK)
    victim = "decode-a"
    options = {"decode_worker": cluster.workers[victim]["id"], "max_tokens": 300}
    url = f"http://{cluster.conductor['http']}/v1/completions"
    ask = {**body(tokens, **options), "stream": True}
    events = []
    started = time.monotonic()
    with httpx.stream("POST", url, json=ask, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line[6:])
                if len(events) == 1:
                    cluster.kill(victim, signal.SIGSTOP)
    assert time.monotonic() - started < 20
    report = json.loads(events[-2])["kvpool"]
    assert report["decode_worker"] == cluster.workers["decode-b"]["id"]
    assert report["fallback_reason"] == "decode:unavailable"
    assert len(report["token_ids"]) == 300


def test_a_decode_worker_killed_in_mid_answer_costs_no_token(own_cluster: Cluster) -> None:
    cluster = own_cluster
    tokens = prompt(21, 3 * BLOCK)
    url = f"http://{cluster.conductor['http']}/v1/completions"
    victim = "decode-a"
    ask = {
        **body(tokens, max_tokens=400, decode_worker=cluster.workers[victim]["id"]),
        "stream": True,
    }
    events = []
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", url, json=ask) as response,
    ):
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line[6:])
                if len(events) == 1:
                    cluster.kill(victim)
    report = json.loads(events[-2])["kvpool"]
    assert report["decode_worker"] == cluster.workers["decode-b"]["id"]
    assert report["fallback_reason"].startswith("decode:unavailable")
    assert len(report["token_ids"]) == 400


def test_a_node_killed_with_the_prefix_on_it_means_recomputation(own_cluster: Cluster) -> None:
    cluster = own_cluster
    tokens = prompt(22, 9 * BLOCK + 3)
    target = cluster.workers["decode-b"]["id"]
    first = complete(cluster, tokens, decode_worker=target, prefill="remote")["kvpool"]
    assert first["pool_tokens"] == 9 * BLOCK
    cluster.wait_indexed(tokens)  # else there would be nothing to be misled by
    cluster.kill("node-b")
    started = time.monotonic()
    again = complete(cluster, tokens, decode_worker=target)["kvpool"]
    assert time.monotonic() - started < 10
    assert again["pool_tokens"] == 0
    assert again["token_ids"] == complete(cluster, tokens, pool="off")["kvpool"]["token_ids"]


def test_workers_without_any_node_serve_locally(tmp_path: Path, model: Path) -> None:
    cluster = Cluster(
        tmp_path, env={"KVPOOL_CONDUCTOR__ADVANCED__HEARTBEAT_S": "0.2", **os.environ}
    )
    with cluster.supervisor:
        cluster.start_conductor("conductor.advanced.min_remote_prefill_tokens=64")
        cluster.launch_worker("both", "both", model)
        cluster.ready_worker("both")
        cluster.wait_joined(nodes=0, workers=1)
        done = complete(cluster, prompt(23, 5 * BLOCK))["kvpool"]
    assert (done["mode"], done["pool_tokens"], done["computed_tokens"]) == ("local", 0, 5 * BLOCK)


def test_without_any_worker_a_request_is_refused_with_advice(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.supervisor:
        cluster.start_conductor()
        url = f"http://{cluster.conductor['http']}/v1/completions"
        response = httpx.post(url, json=body(prompt(1, 40)), timeout=10)
    assert response.status_code == 503
    assert "kvpool worker" in response.json()["error"]["message"]

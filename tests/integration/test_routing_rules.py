"""The routing rules in a running pool: changed, explained and rolled back from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fork_server import run_kvpool
from tests.support.process_cluster import Cluster, wait_until

ENGINE = ("fake_engine.bytes_per_token=64", "worker.block_tokens=32")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("rules")
    (directory / "rules.yaml").write_text("mode: disaggregated\n")
    running = Cluster(directory)
    with running.supervisor:
        running.start_conductor(
            f"conductor.rules_path={directory / 'rules.yaml'}",
            "conductor.advanced.min_remote_prefill_tokens=0",
        )
        running.start_node("n0")
        for role in ("prefill", "decode"):
            running.launch_fake_worker(role, role, *ENGINE)
        running.wait_joined(nodes=1, workers=2)
        yield running


def complete(cluster: Cluster, start: int, **headers: str) -> httpx.Response:
    body = {
        "model": "fake",
        "prompt": [start + i for i in range(100)],
        "max_tokens": 2,
        "kvpool": {"return_token_ids": True},
    }
    url = f"http://{cluster.conductor['http']}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer


def rules(cluster: Cluster, *arguments: str, status: int = 0) -> Any:
    to = () if arguments[0] == "check" else ("--conductor", cluster.conductor["wire"])
    done = run_kvpool("rules", *arguments, *to)
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout) if "--json" in arguments else done.stdout + done.stderr


def test_the_file_decides_and_is_read_again_when_it_changes(cluster: Cluster) -> None:
    answer = complete(cluster, 1000)
    assert answer.headers["x-kvpool-mode"] == "disaggregated"
    assert answer.headers["x-kvpool-routing"] == ":disaggregated"
    (cluster.directory / "rules.yaml").write_text(
        "rules: [{name: all, match: {endpoint: /v1/completions}, mode: aggregated}]\n"
    )
    wait_until(
        lambda: complete(cluster, 2000).headers["x-kvpool-routing"] == "all:aggregated",
        "the changed file in force",
    )
    assert complete(cluster, 3000).headers["x-kvpool-mode"] == "local"


def test_rollback_and_resume_are_one_command_each(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("mode: disaggregated\n")
    assert not rules(cluster, "apply", str(file), "--json")["is_rolled_back"]
    assert complete(cluster, 4000).headers["x-kvpool-mode"] == "disaggregated"
    assert "rolled back" in rules(cluster, "rollback")
    rolled = complete(cluster, 5000)
    assert rolled.headers["x-kvpool-mode"] == "local"
    assert rolled.headers["x-kvpool-routing"] == ":rolled_back"
    assert not rules(cluster, "resume", "--json")["is_rolled_back"]
    assert complete(cluster, 6000).headers["x-kvpool-mode"] == "disaggregated"
    assert rules(cluster, "show", "--json")["text"] == "mode: disaggregated\n"
    counters = cluster.stats()["counters"]
    assert counters["routing:rollbacks"] == 1
    assert counters["routing:local:rolled_back"] >= 1


def test_check_and_explain_say_what_would_happen(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("remote_prefill: {min_input_tokens: 512}\n")
    assert "ok, 0 rules" in rules(cluster, "check", str(file))
    rules(cluster, "apply", str(file))
    verdict = rules(cluster, "explain", "--prompt-tokens", "100", "--json")
    assert (verdict["mode"], verdict["reason"]) == ("local", "remote_prefill.min_input_tokens")
    assert rules(cluster, "explain", "--prompt-tokens", "600", "--json")["mode"] == ""
    assert "false" in rules(cluster, "explain", "--prompt-tokens", "100")
    file.write_text("remote_prefill: {min_inputs: 512}\n")
    assert "min_input_tokens" in rules(cluster, "check", str(file), status=2)
    assert "min_input_tokens" in rules(cluster, "apply", str(file), status=2)

"""A load that shifts from prefill to decode, and instances that follow it. Engines sleep; all else is real."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.process_cluster import Cluster

ENGINE = (
    "worker.max_concurrent=64",
    "fake_engine.bytes_per_token=16",
    "fake_engine.prefill_base_s=0.0",
    "fake_engine.prefill_token_s=0.003",
    "fake_engine.tpot_base_s=0.02",
    "fake_engine.tpot_sequence_s=0.02",
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    # Else a decode worker would prefill when the queues are long, and both objectives would be missed.
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules: [{name: r, match: {min_prompt_tokens: 64}, mode: disaggregated}]\n")
    with running.supervisor:
        running.start_conductor(
            "conductor.move_roles=true",
            f"conductor.rules_path={rules}",
            "conductor.slo_ttft_s=0.8",
            "conductor.slo_tpot_s=0.4",
            "conductor.admission=none",
            "conductor.advanced.min_remote_prefill_tokens=64",
            "conductor.advanced.roles_window_s=4",
            "conductor.advanced.roles_hold_s=0.5",
            "conductor.advanced.roles_cooldown_s=3",
            "conductor.advanced.roles_min_requests=4",
        )
        running.start_node("n0")
        for number, role in enumerate(("prefill", "prefill", "decode", "decode")):
            running.launch_fake_worker(f"w{number}", role, *ENGINE)
        running.wait_joined(nodes=1, workers=4)
        yield running


async def under_load(
    cluster: Cluster, prompt_tokens: int, output_tokens: int, every_s: float, wanted: dict[str, int]
) -> dict[str, Any]:
    """Send requests until `/v1/scaling` says that the instances are as wanted."""
    numbers = itertools.count(prompt_tokens * 1000)
    url = f"http://{cluster.conductor['http']}"
    tasks: set[asyncio.Task[Any]] = set()
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def one() -> None:
            start = next(numbers) % 60_000
            body = {
                "model": "fake",
                "prompt": [(start + 7 * i) % 100_000 for i in range(prompt_tokens)],
                "max_tokens": output_tokens,
                "kvpool": {"return_token_ids": True},
            }
            with contextlib.suppress(httpx.HTTPError):
                await client.post("/v1/completions", json=body)

        deadline = time.monotonic() + 60
        try:
            while True:
                scaling: dict[str, Any] = (await client.get("/v1/scaling")).json()
                if all(scaling["instances"][role] == count for role, count in wanted.items()):
                    return scaling
                assert time.monotonic() < deadline, f"wanted {wanted}: {scaling}"
                task = asyncio.create_task(one())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                await asyncio.sleep(every_s)
        finally:
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_instances_follow_a_load_that_shifts(cluster: Cluster) -> None:
    # 200 tokens take a prefill worker 0.6 s: two of them do not keep up with five a second.
    scaling = await under_load(cluster, 200, 2, 0.2, {"prefill": 3, "decode": 1})
    assert scaling["moves"][-1]["role"] == "prefill"
    # Short prompts and long answers: a single decode worker is too slow for all of them.
    scaling = await under_load(cluster, 20, 40, 0.4, {"prefill": 2, "decode": 2})
    assert scaling["moves"][-1]["role"] == "decode"
    assert "TPOT" in scaling["moves"][-1]["reason"]
    assert cluster.stats()["counters"]["roles:to_decode"] >= 1

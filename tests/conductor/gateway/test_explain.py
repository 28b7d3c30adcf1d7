"""`kvpool explain`, against a conductor in this process."""

from __future__ import annotations

import asyncio
import json
import subprocess

from tests.support.fork_server import run_kvpool
from tests.support.scripted import Conductor, ScriptedWorker, conductor


async def explain(running: Conductor, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        run_kvpool, "explain", "--http", f"127.0.0.1:{running.port}", *arguments
    )


async def test_it_shows_candidates_choice_misses_and_what_was_measured() -> None:
    async with conductor(ScriptedWorker("w1"), ScriptedWorker("w2")) as running:
        response = await running.ask(kvpool={"priority": "high"})
        request_id = response.headers["X-Request-Id"]
        printed = await explain(running, request_id)
        assert printed.returncode == 0, printed.stderr
        text = " ".join(printed.stdout.split())
        for part in (
            f"request {request_id}",
            "prompt 10 tokens of m@r",
            "strategy kv-centric",
            "class high",
            "choice local: prefill and decode on w1",
            "why cost: least predicted time",
            "local w2 w2 0 -",
            "chosen",
            "Measured: ok",
            "TTFT",
            "admission_wait",
            "never_stored 2 8",
        ):
            assert part in text, f"{part!r} is not in {printed.stdout}"
        by_object_id = await explain(running, response.json()["id"], "--json")
        assert json.loads(by_object_id.stdout)["decision"]["request_id"] == request_id


async def test_it_lists_the_last_requests_newest_first() -> None:
    async with conductor(ScriptedWorker("w1")) as running:
        ids = [(await running.ask()).headers["X-Request-Id"] for _ in range(3)]
        printed = await explain(running, "--last", "2")
        assert ids[2] in printed.stdout.splitlines()[1]
        assert ids[1] in printed.stdout.splitlines()[2]
        assert ids[0] not in printed.stdout
        listed = json.loads((await explain(running, "--last", "9", "--json")).stdout)
        assert [one["decision"]["request_id"] for one in listed] == ids[::-1]
        assert (await running.http.get("/v1/requests?limit=0")).status_code == 400


async def test_a_refused_request_is_explained_too() -> None:
    async with conductor(
        ScriptedWorker("w1"), max_active_requests=1, slo_ttft_s=30.0, slo_tpot_s=0.001
    ) as running:
        for _ in range(3):
            running.cluster.view.cost.observe_tpot("w1", 10, 1, 0.02)
        response = await running.ask()
        assert response.status_code == 429
        printed = await explain(running, response.headers["X-Request-Id"])
        assert "no candidate meets the objective for TPOT" in printed.stdout
        assert "Measured: refused" in printed.stdout


async def test_an_unknown_request_and_a_missing_conductor_are_errors_with_a_hint() -> None:
    async with conductor(ScriptedWorker("w1")) as running:
        unknown = await explain(running, "feedbeef")
        assert unknown.returncode == 1
        assert "--last" in unknown.stderr
        assert (await explain(running)).returncode == 1
        running.port = 1
        assert "--http" in (await explain(running, "feedbeef")).stderr

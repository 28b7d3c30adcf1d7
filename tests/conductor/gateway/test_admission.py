"""Requests in the admission queue: with scripted workers, real sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from conductor.gateway.request import GenerationRequest
from conductor.requests.request import Plan
from kvpool.errors import Unavailable
from kvpool.wire import messages as m
from tests.support.scripted import (
    NAMESPACE,
    Conductor,
    ScriptedWorker,
    asked,
    conductor,
    generation_request,
)
from tests.support.waiting import until


def busy_worker() -> ScriptedWorker:
    """Its requests hang until `resume`."""
    worker = ScriptedWorker("w")
    worker.hangs = worker.beats_anyway = True
    return worker


async def fill(running: Conductor, worker: ScriptedWorker) -> asyncio.Task[httpx.Response]:
    """Start one request that holds the only slot."""
    task = asyncio.create_task(running.ask(seed=1))
    await until(lambda: worker.running == 1, "the first request is in work")
    return task


def waiting(running: Conductor) -> int:
    return len(running.gateway.admission.queue)


async def queue_up(
    running: Conductor, priority: str, seed: int, **changes: Any
) -> asyncio.Task[httpx.Response]:
    before = running.counters.get("queued", 0)
    options = {"priority": priority}
    task = asyncio.create_task(running.ask(seed=seed, kvpool=options, **changes))
    await until(lambda: running.counters.get("queued", 0) == before + 1, "it waits")
    return task


async def test_a_request_waits_for_a_slot_and_its_wait_is_in_the_report() -> None:
    worker = busy_worker()
    async with conductor(worker, max_active_requests=1) as running:
        first = await fill(running, worker)
        second = await queue_up(running, "normal", 2)
        await asyncio.sleep(0)
        assert len(worker.seen) == 1
        worker.resume()
        assert (await first).status_code == 200
        document = (await second).json()
        assert waiting(running) == running.gateway.active == 0
        assert len(running.cluster.view.in_flight) == 0
    assert document["choices"][0]["text"] == "abcdefgh"
    assert document["kvpool"]["phases"]["admission_wait"] > 0


async def test_queued_requests_are_served_by_priority_then_by_arrival() -> None:
    worker = busy_worker()
    async with conductor(worker, max_active_requests=1) as running:
        tasks = [await fill(running, worker)]
        for seed, priority in ((2, "low"), (3, "normal"), (4, "high"), (5, "normal")):
            tasks.append(await queue_up(running, priority, seed))
        worker.resume()
        await asyncio.gather(*tasks)
    served = [one.sampling.seed for one in worker.seen if isinstance(one, m.Generate)]
    assert served == [1, 4, 3, 5, 2]


async def test_a_full_queue_refuses_and_a_higher_class_takes_the_last_place() -> None:
    worker = busy_worker()
    async with conductor(worker, max_active_requests=1, max_queued_requests=1) as running:
        first = await fill(running, worker)
        low = await queue_up(running, "low", 2)
        refused = await running.ask(kvpool={"priority": "low"})
        high = await queue_up(running, "high", 3)
        displaced = await low
        for response, reason in ((refused, "queue_full"), (displaced, "displaced")):
            assert response.status_code == 429
            assert response.headers["X-Kvpool-Reason"] == reason
            assert int(response.headers["Retry-After"]) >= 1
            assert reason in response.json()["error"]["message"]
            record = await running.http.get(f"/v1/requests/{response.headers['X-Request-Id']}")
            assert record.json()["decision"]["reason"] == reason
        worker.resume()
        assert (await first).status_code == (await high).status_code == 200
        assert running.counters["rejected:displaced"] == 1


async def test_without_a_queue_a_request_too_many_is_refused_at_once() -> None:
    worker = busy_worker()
    async with conductor(worker, max_active_requests=1, max_queued_requests=0) as running:
        first = await fill(running, worker)
        assert (await running.ask()).status_code == 429
        worker.resume()
        assert (await first).status_code == 200


async def test_a_request_that_waited_too_long_is_refused_with_the_reason() -> None:
    worker = busy_worker()
    async with conductor(worker, max_active_requests=1, max_queue_wait_s=0.2) as running:
        first = await fill(running, worker)
        response = await running.ask()
        assert response.status_code == 429
        assert response.headers["X-Kvpool-Reason"] == "queue_deadline"
        assert waiting(running) == 0
        worker.resume()
        assert (await first).status_code == 200


async def test_a_wait_ends_when_the_objective_cannot_be_met_any_more() -> None:
    worker = busy_worker()
    async with conductor(worker, max_active_requests=1, slo_ttft_s=0.4, slo_tpot_s=60.0) as running:
        first = await fill(running, worker)
        response = await running.ask()
        assert response.status_code == 429
        assert response.headers["X-Kvpool-Reason"] in ("queue_deadline", "ttft_slo")
        worker.resume()
        await first


async def test_load_that_passes_is_waited_for() -> None:
    """Two sequences would decode too slowly; the second request starts when the first has ended."""
    worker = busy_worker()
    async with conductor(worker, slo_ttft_s=30.0, slo_tpot_s=0.0235) as running:
        first = await fill(running, worker)
        second = await queue_up(running, "normal", 2)
        assert running.gateway.active == 1
        worker.resume()
        assert (await first).status_code == (await second).status_code == 200
        record = await running.http.get(f"/v1/requests/{(await second).headers['X-Request-Id']}")
        assert record.json()["decision"]["mode"] == "local"


async def test_load_that_cannot_pass_is_not_waited_for() -> None:
    worker = ScriptedWorker("w")
    async with conductor(worker, slo_ttft_s=30.0, slo_tpot_s=0.001) as running:
        for _ in range(3):  # measured, and slower than the objective even alone
            running.cluster.view.cost.observe_tpot("w", 10, 1, 0.02)
        response = await running.ask()
    assert response.status_code == 429
    assert response.headers["X-Kvpool-Reason"] == "tpot_slo"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_the_queue_is_withdrawn(stream: bool) -> None:
    worker = busy_worker()
    async with conductor(worker, max_active_requests=1) as running:
        first = await fill(running, worker)
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        body = json.dumps(asked(stream=stream)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: waiting(running) == 1, "it waits")
        writer.close()
        await until(lambda: waiting(running) == 0, "it is withdrawn")
        worker.resume()
        assert (await first).status_code == 200
        await until(lambda: running.gateway.active == 0, "no slot is held")
    assert len(worker.seen) == 1


async def test_a_stream_that_waited_is_served() -> None:
    worker = busy_worker()
    async with conductor(worker, max_active_requests=1) as running:
        first = await fill(running, worker)
        second = await queue_up(running, "normal", 2, stream=True)
        worker.resume()
        await first
        assert '"h"' in (await second).text
        await until(lambda: running.gateway.active == 0, "no slot is held")


async def test_a_conductor_that_stops_refuses_queued_requests() -> None:
    worker = busy_worker()
    async with conductor(worker, max_active_requests=1) as running:
        first = await fill(running, worker)
        waits = asyncio.create_task(running.gateway.admit(generation_request([65] * 10)))
        await until(lambda: waiting(running) == 1, "it waits")
        await running.gateway.close()
        with pytest.raises(Unavailable):
            await waits
        assert waiting(running) == 0
        worker.resume()
        await asyncio.gather(first, return_exceptions=True)


async def test_a_failed_decision_ends_its_own_request_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = busy_worker()
    async with conductor(worker, max_active_requests=1) as running:
        first = await fill(running, worker)
        broken = await queue_up(running, "normal", 2)
        others = [await queue_up(running, "normal", seed) for seed in (3, 4)]
        plan = running.gateway._plan

        async def fail_one(request: GenerationRequest, *given: Any, **options: Any) -> Plan:
            if request.sampling.seed == 2:
                raise Unavailable("the index does not answer")
            return await plan(request, *given, **options)

        monkeypatch.setattr(running.gateway, "_plan", fail_one)
        worker.resume()
        assert [response.status_code for response in await asyncio.gather(first, *others)] == [
            200,
            200,
            200,
        ]
        assert (await broken).status_code == 503
        assert waiting(running) == running.gateway.active == 0


async def test_a_tenants_class_bounds_what_its_requests_ask_for() -> None:
    worker = busy_worker()
    async with conductor(
        worker, max_active_requests=1, tenant_priorities={NAMESPACE.tenant: "low"}
    ) as running:
        first = await fill(running, worker)
        second = await queue_up(running, "high", 2)
        assert running.gateway.admission.queue.by_priority()["low"] == 1
        worker.resume()
        await asyncio.gather(first, second)


async def test_a_client_that_leaves_while_its_request_is_admitted_holds_no_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = busy_worker()
    async with conductor(worker, max_active_requests=1) as running:
        first = await fill(running, worker)
        waits = asyncio.create_task(running.gateway.admit(generation_request([65] * 10)))
        await until(lambda: waiting(running) == 1, "it waits")
        plan = running.gateway._plan

        async def plan_and_leave(*given: Any, **options: Any) -> Plan:
            found = await plan(*given, **options)
            asyncio.get_running_loop().call_soon(waits.cancel)  # before it learns of the plan
            return found

        monkeypatch.setattr(running.gateway, "_plan", plan_and_leave)
        worker.resume()
        with pytest.raises(asyncio.CancelledError):
            await waits
        await first
        await until(lambda: running.gateway.active == 0, "no slot is held")
        assert len(running.cluster.view.in_flight) == 0

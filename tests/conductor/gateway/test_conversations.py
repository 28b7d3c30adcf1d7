"""Whole conversations with the gateway over its HTTP API, in virtual time and without a process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conductor.requests.lifecycle import Patience
from kvpool.blocks.hashing import hash_chain
from kvpool.errors import EngineFailed, Unavailable
from kvpool.wire import messages as m
from tests.support.scripted import NAMESPACE
from tests.support.virtual_gateway import VirtualConductor, VirtualNode, VirtualWorker
from tests.support.virtual_loop import VirtualLoop, run_virtually

REMOTE = {"prefill": "remote"}
PROMPT = [65] * 42  # ten blocks and two tokens


def test_a_conversation_with_every_fallback_takes_a_minute_of_virtual_time_alone() -> None:
    began = time.perf_counter()

    async def conversation(loop: VirtualLoop) -> None:
        conductor = VirtualConductor(loop, patience=Patience(prefill_s=20.0))
        prefill = conductor.add_worker(VirtualWorker("p", "prefill", prefill_s=300.0))
        first = conductor.add_worker(
            VirtualWorker("d1", fails_at=3, error=EngineFailed("out of memory"))
        )
        node = conductor.add_node(VirtualNode("n"))
        began_at = loop.time()
        options = {**REMOTE, "return_token_ids": True}
        asked = asyncio.create_task(conductor.ask(prompt=PROMPT, kvpool=options))
        await asyncio.sleep(10)
        second = conductor.add_worker(VirtualWorker("d2", text="defgh"))
        document = (await asked).json()
        assert bytes(document["kvpool"]["token_ids"]) == b"abcdefgh"
        assert document["kvpool"]["decode_worker"] == "d2"
        assert document["kvpool"]["fallback_reason"] == "prefill:deadline"
        # 20 s for the prefill; the reservation and two first tokens
        assert document["kvpool"]["ttft_s"] == pytest.approx(20.1, abs=0.01)
        assert loop.time() - began_at == pytest.approx(20.1 + 0.06 + 0.1 + 0.08, abs=0.01)
        assert node.aborted == [(1, False)]  # quarantined: the worker may still write
        assert prefill.cancelled == 1
        [retry] = [message for message in second.seen if isinstance(message, m.Generate)]
        assert retry.sampling.max_tokens == 5
        assert len(retry.token_ids) // 4 == len(PROMPT) + 3
        assert len(first.seen) == 1
        assert conductor.gateway.active == len(conductor.cluster.view.in_flight) == 0
        assert conductor.cluster.counters["fallback:decode:engine_failed"] == 1
        await conductor.close()

    run_virtually(conversation)
    assert time.perf_counter() - began < 5  # imports included; the conversation takes milliseconds


def test_the_clock_of_a_request_starts_with_its_first_byte() -> None:
    async def conversation(loop: VirtualLoop) -> None:
        conductor = VirtualConductor(loop)
        conductor.add_worker(VirtualWorker("d", first_s=0.1))

        async def body() -> AsyncIterator[bytes]:
            yield b'{"prompt": [65, 66, 67], '
            await asyncio.sleep(3)  # a slow client
            yield b'"max_tokens": 2}'

        response = await conductor.http.post("/v1/completions", content=body())
        report = response.json()["kvpool"]
        assert report["ttft_s"] == pytest.approx(3.1, abs=0.001)
        assert report["phases"]["request_read_time"] == pytest.approx(3.0, abs=0.001)
        await conductor.close()

    run_virtually(conversation)


def test_the_deadline_counts_from_the_first_byte_too() -> None:
    async def conversation(loop: VirtualLoop) -> None:
        conductor = VirtualConductor(loop, request_timeout_s=5.0)
        conductor.add_worker(VirtualWorker("d", first_s=60.0))

        async def body() -> AsyncIterator[bytes]:
            yield b'{"prompt": [65, 66, 67], '
            await asyncio.sleep(3)
            yield b'"max_tokens": 2}'

        began = loop.time()
        response = await conductor.http.post("/v1/completions", content=body())
        assert response.status_code == 504
        assert loop.time() - began == pytest.approx(5.0, abs=0.1)
        await conductor.close()

    run_virtually(conversation)


@pytest.mark.parametrize("options", [{}, REMOTE, {"prefill": "local"}])
@pytest.mark.parametrize("known", [0, 4, 10])
def test_a_request_without_trouble_looks_its_chain_up_once(
    options: dict[str, Any], known: int
) -> None:
    async def conversation(loop: VirtualLoop) -> None:
        conductor = VirtualConductor(loop)
        prefill = conductor.add_worker(VirtualWorker("p", "prefill"))
        decode = conductor.add_worker(VirtualWorker("d"))
        hashes = hash_chain(NAMESPACE, PROMPT)
        conductor.add_node(VirtualNode("n"), hashes[:known])
        response = await conductor.ask(prompt=PROMPT, kvpool=options)
        assert response.status_code == 200
        assert conductor.look_ups == 1
        # What was decided on is what is read.
        [generate] = [message for message in decode.seen if isinstance(message, m.Generate)]
        read = sum(segment.count for segment in generate.segments)
        assert read >= int(response.headers["X-Kvpool-Planned-Reuse-Blocks"])
        if options == REMOTE and known < 10:
            assert read == 10
            assert prefill.seen
        await conductor.close()

    run_virtually(conversation)


def test_a_failure_is_the_only_reason_for_a_second_look_up() -> None:
    async def conversation(loop: VirtualLoop) -> None:
        conductor = VirtualConductor(loop)
        conductor.add_worker(VirtualWorker("p", "prefill", error=Unavailable("gone")))
        conductor.add_worker(VirtualWorker("d"))
        conductor.add_node(VirtualNode("n"))
        response = await conductor.ask(prompt=PROMPT, kvpool=REMOTE)
        assert response.json()["kvpool"]["fallback_reason"] == "prefill:unavailable"
        assert conductor.look_ups == 2
        await conductor.close()

    run_virtually(conversation)


def test_queued_requests_are_decided_again_when_something_changed_and_not_before() -> None:
    async def conversation(loop: VirtualLoop) -> None:
        conductor = VirtualConductor(loop, max_active_requests=1)
        conductor.add_worker(VirtualWorker("d", first_s=10.0, text="a"))
        decided = 0
        plan = conductor.gateway._plan

        async def counted(*given: Any, **options: Any) -> Any:
            nonlocal decided
            decided += 1
            return await plan(*given, **options)

        conductor.gateway._plan = counted  # type: ignore[method-assign]
        asked = [asyncio.create_task(conductor.ask(max_tokens=1)) for _ in range(3)]
        await asyncio.sleep(9)
        assert conductor.gateway.active == 1
        assert decided == 3  # each once, when it arrived
        await asyncio.gather(*asked)
        assert decided == 3 + 2  # and again when its turn had come
        await conductor.close()

    run_virtually(conversation)


def test_without_an_objective_a_request_is_refused_for_lack_of_room_alone() -> None:
    async def conversation(loop: VirtualLoop) -> None:
        conductor = VirtualConductor(loop)
        conductor.add_worker(VirtualWorker("d", first_s=50.0, token_s=2.0))
        for _ in range(20):  # predicted to take minutes, and to decode at two seconds a token
            conductor.cluster.view.cost.observe_prefill("d", 42, 0, 100.0)
            conductor.cluster.view.cost.observe_tpot("d", 10, 1, 2.0)
        assert (await conductor.ask(prompt=PROMPT)).status_code == 200
        refused = await conductor.ask(prompt=PROMPT, kvpool={"slo_ttft_s": 1.0})
        assert refused.status_code == 429
        assert refused.headers["X-Kvpool-Reason"] == "ttft_slo"
        refused = await conductor.ask(prompt=PROMPT, kvpool={"slo_tpot_s": 0.5})
        assert refused.headers["X-Kvpool-Reason"] == "tpot_slo"
        await conductor.close()

    run_virtually(conversation)


@pytest.mark.parametrize(
    ("settings", "rules", "options", "is_refused"),
    [
        ({"slo_ttft_s": 1.0}, "", {}, True),
        ({"slo_ttft_s": 1.0, "tenant_objectives": {NAMESPACE.tenant: "500/"}}, "", {}, False),
        ({"tenant_objectives": {NAMESPACE.tenant: "1/0.1"}}, "", {}, True),
        ({}, "objectives: {ttft_s: 1}", {}, True),
        ({"slo_ttft_s": 1.0}, "rules: [{name: r, objectives: {ttft_s: 0}}]", {}, False),
        ({"slo_ttft_s": 1.0}, "objectives: {ttft_s: 2}", {"slo_ttft_s": 500}, False),
    ],
)
def test_an_objective_comes_from_the_request_the_rules_the_tenant_or_the_configuration(
    settings: dict[str, Any], rules: str, options: dict[str, Any], is_refused: bool
) -> None:
    async def conversation(loop: VirtualLoop) -> None:
        conductor = VirtualConductor(loop, **settings)
        conductor.gateway.rules.replace(rules)
        conductor.add_worker(VirtualWorker("d"))
        for _ in range(20):
            conductor.cluster.view.cost.observe_prefill("d", 42, 0, 100.0)
        response = await conductor.ask(prompt=PROMPT, kvpool=options)
        assert (response.status_code == 429) == is_refused
        await conductor.close()

    run_virtually(conversation)


def test_a_client_that_leaves_while_its_slots_are_reserved_gives_them_back() -> None:
    async def conversation(loop: VirtualLoop) -> None:
        conductor = VirtualConductor(loop)
        prefill = conductor.add_worker(VirtualWorker("p", "prefill"))
        conductor.add_worker(VirtualWorker("d"))
        node = conductor.add_node(VirtualNode("n", reserve_s=0.5))
        asked = asyncio.create_task(conductor.ask(prompt=PROMPT, kvpool=REMOTE))
        await asyncio.sleep(0.2)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        for run in list(conductor.gateway._runs.values()):
            run.leave()
        await asyncio.sleep(1)
        assert node.aborted == [(1, True)]  # nobody has written
        assert not prefill.seen
        assert conductor.gateway.active == len(conductor.cluster.view.in_flight) == 0
        await conductor.close()

    run_virtually(conversation)


def test_an_action_that_fails_neither_holds_the_slot_nor_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def conversation(loop: VirtualLoop) -> None:
        conductor = VirtualConductor(loop)
        conductor.add_worker(VirtualWorker("d"))

        def fail(*_given: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(conductor.gateway._recorder, "ended", fail)
        monkeypatch.setattr(conductor.gateway._hot_replication, "offer", fail)
        response = await conductor.ask()
        assert response.status_code == 200
        assert response.json()["usage"]["completion_tokens"] == 8
        assert conductor.gateway.active == len(conductor.cluster.view.in_flight) == 0
        await conductor.close()

    run_virtually(conversation)

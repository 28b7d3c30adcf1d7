"""Which blocks move ahead of reads, to which host, and why others do not. Real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conductor.gateway.prefetch import PrefetchReport
from conductor.gateway.request import GenerationRequest
from conductor.index.memory import complete
from conductor.requests.request import Plan
from conductor.scheduling.decision import Candidate, Decision
from kvpool.blocks.hashing import hash_chain, pack_hashes, unpack_hashes
from kvpool.blocks.tier import Tier
from kvpool.wire import WireServer
from kvpool.wire import messages as m
from tests.support.engine_server import ScriptedServer, engine_servers
from tests.support.scripted import (
    NAMESPACE,
    Conductor,
    ScriptedWorker,
    conductor,
    generation_request,
)
from tests.support.waiting import until

PROMPT = [65] * 42  # ten blocks and two tokens
HASHES = hash_chain(NAMESPACE, PROMPT)


class ScriptedNode:
    """Reports blocks in a tier, accepts prefetches and copies, and moves nothing."""

    def __init__(self, node_id: str, host: str = "h") -> None:
        self.node_id = node_id
        self.host = host
        self.decline = ""
        self.prefetched: list[bytes] = []
        self.copied: list[bytes] = []
        self.wire = WireServer("node", node_id, 1)
        self.wire.handle(m.Prefetch, lambda request, _s: self._prefetch(request))
        self.wire.handle(m.Replicate, lambda request, _s: self._replicate(request))
        self.wire.handle(m.RegisterNamespace, lambda _r, _s: m.NamespaceReply(b"n" * 16))

    async def join(self, running: Conductor, tier: Tier, hashes: list[bytes]) -> None:
        port = await self.wire.listen("127.0.0.1", 0)
        descriptor = m.NodeDescriptor(self.node_id, 1, self.host, f"127.0.0.1:{port}")
        complete(running.cluster.node_reports.join(m.NodeJoin(descriptor, [NAMESPACE])))
        event = m.BlockEvent("stored", NAMESPACE.namespace_id, pack_hashes(hashes), tier)
        events = [event] if hashes else []
        complete(
            running.cluster.node_reports.events(
                m.NodeEvents(self.node_id, 1, 1, events, snapshot=True, snapshot_end=True)
            )
        )

    def _prefetch(self, request: m.Prefetch) -> m.PrefetchReply:
        hashes = unpack_hashes(request.hashes)
        if self.decline:
            return m.PrefetchReply(0, 0, len(hashes), self.decline)
        self.prefetched += hashes
        return m.PrefetchReply(len(hashes), 0, 0, "")

    def _replicate(self, request: m.Replicate) -> m.ReplicateReply:
        self.copied += unpack_hashes(request.hashes)
        return m.ReplicateReply(len(unpack_hashes(request.hashes)), 0, 0, "", {})


@contextlib.asynccontextmanager
async def pool(
    *nodes: tuple[ScriptedNode, Tier, list[bytes]], worker: ScriptedWorker | None, **settings: Any
) -> AsyncIterator[Conductor]:
    async with conductor(*([worker] if worker else []), **settings) as running:
        for node, tier, hashes in nodes:
            await node.join(running, tier, hashes)
        try:
            yield running
        finally:
            for node, _, _ in nodes:
                await node.wire.close()


async def hint(running: Conductor) -> PrefetchReport:
    return await running.gateway.prefetch.hint(NAMESPACE, HASHES)


# ---------------------------------------------------------------- hints


async def test_blocks_on_a_disk_near_the_reader_are_promoted() -> None:
    node = ScriptedNode("n")
    async with pool((node, Tier.NVME, HASHES), worker=ScriptedWorker("w")) as running:
        done = await hint(running)
    assert (done.worker, done.host, done.found) == ("w", "h", 10)
    assert (done.promoting, done.copying, done.declined) == (10, 0, 0)
    assert node.prefetched == HASHES
    assert running.counters["prefetch:promoting"] == 10


async def test_blocks_on_another_host_are_copied_to_the_readers_host() -> None:
    far, near = ScriptedNode("far", host="elsewhere"), ScriptedNode("near")
    async with pool(
        (far, Tier.NVME, HASHES), (near, Tier.DRAM, []), worker=ScriptedWorker("w")
    ) as running:
        done = await hint(running)
        await until(lambda: near.copied == HASHES, "the near node was told to pull")
        await until(lambda: running.counters.get("prefetch:copied") == 10, "and that is counted")
    assert (done.copying, done.promoting, done.declined) == (10, 0, 0)


async def test_without_a_node_near_the_reader_blocks_are_promoted_on_their_node() -> None:
    far = ScriptedNode("far", host="elsewhere")
    async with pool((far, Tier.NVME, HASHES), worker=ScriptedWorker("w")) as running:
        assert (await hint(running)).promoting == 10
    assert far.prefetched == HASHES


async def test_blocks_in_memory_near_the_reader_do_not_move() -> None:
    node = ScriptedNode("n")
    async with pool((node, Tier.DRAM, HASHES), worker=ScriptedWorker("w")) as running:
        done = await hint(running)
    assert (done.resident, done.promoting, done.declined) == (10, 0, 0)
    assert node.prefetched == []


async def test_each_no_has_its_reason() -> None:
    node = ScriptedNode("n")
    async with pool((node, Tier.NVME, HASHES[:7]), worker=ScriptedWorker("w")) as running:
        assert (await hint(running)).reasons == {"not_in_pool": 3}
        node.decline = "queue_full"
        assert (await hint(running)).reasons == {"not_in_pool": 3, "queue_full": 7}
        await node.wire.close()
        assert (await hint(running)).reasons == {"not_in_pool": 3, "unavailable": 7}
        assert running.counters["prefetch:declined:not_in_pool"] == 9
        assert running.counters["prefetch:declined:queue_full"] == 7
    async with pool((ScriptedNode("n"), Tier.NVME, HASHES), worker=None) as running:
        assert (await hint(running)).reasons == {"no_worker": 10}
    async with pool(
        (node := ScriptedNode("n"), Tier.NVME, HASHES), worker=ScriptedWorker("w")
    ) as running:
        running.gateway.prefetch._is_active = False
        assert (await hint(running)).reasons == {"off": 10}
    assert node.prefetched == []


async def test_blocks_that_cost_more_to_read_than_to_compute_do_not_move() -> None:
    node = ScriptedNode("n")
    async with pool((node, Tier.NVME, HASHES), worker=ScriptedWorker("w")) as running:
        for _ in range(20):  # a worker that computes in no time
            running.cluster.view.cost.observe_prefill("w", 40, 0, 1e-7)
            running.cluster.view.cost.observe_prefill("w", 4000, 0, 1e-5)
        done = await hint(running)
    assert done.reasons == {"not_worth": 10}
    assert node.prefetched == []


# ---------------------------------------------------------------- sessions, over HTTP


async def test_a_session_is_prefetched_by_the_key_of_its_requests() -> None:
    node = ScriptedNode("n")
    async with pool((node, Tier.NVME, HASHES), worker=ScriptedWorker("w")) as running:
        unknown = await running.http.post("/v1/prefetch", json={"key": "agent-7"})
        assert unknown.status_code == 404
        headers = {"X-Kvpool-Key": "agent-7"}
        body = {"prompt": PROMPT, "max_tokens": 2}
        assert (await running.http.post("/v1/completions", json=body, headers=headers)).is_success
        await running.ask(prompt=PROMPT[:9], user="agent-8")
        response = (await running.http.post("/v1/prefetch", json={"key": "agent-7"})).json()
        assert (response["blocks"], response["promoting"], response["worker"]) == (10, 10, "w")
        by_header = await running.http.post("/v1/prefetch", json={}, headers=headers)
        assert by_header.json()["blocks"] == 10
        by_user = await running.http.post("/v1/prefetch", json={"key": "agent-8", "model": "m"})
        assert by_user.json()["blocks"] == 2


async def test_an_agent_may_name_the_prompt_or_the_conversation_instead() -> None:
    node = ScriptedNode("n")
    async with pool((node, Tier.NVME, HASHES), worker=ScriptedWorker("w")) as running:
        for body in (
            {"prompt": PROMPT},
            {"prompt": "A" * 42},
            {"messages": [{"role": "user", "content": "A" * 42}]},
        ):
            response = await running.http.post("/v1/prefetch", json=body)
            assert response.json()["promoting"] == 10, response.text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"key": "a", "prompt": PROMPT}, 400),
        ({"prompt": []}, 400),
        ({"prompt": [-1]}, 400),
        ({"surprise": 1}, 400),
        ({"key": "a", "model": "unknown"}, 404),
    ],
)
async def test_hints_that_make_no_sense_are_refused(body: dict[str, Any], status: int) -> None:
    async with conductor(ScriptedWorker("w")) as running:
        assert (await running.http.post("/v1/prefetch", json=body)).status_code == status


# ---------------------------------------------------------------- at decision time


async def test_while_a_request_waits_for_a_slot_its_blocks_come_up() -> None:
    node, worker = ScriptedNode("n"), ScriptedWorker("w")
    worker.hangs_at, worker.beats_anyway = 1, True
    settings = {"max_active_requests": 1, "max_queued_requests": 4, "slo_ttft_s": 60.0}
    async with pool((node, Tier.NVME, HASHES), worker=worker, **settings) as running:
        first = asyncio.create_task(running.ask())
        await until(lambda: worker.running == 1, "the first is in work")
        second = asyncio.create_task(running.ask(prompt=PROMPT))
        await until(lambda: node.prefetched, "asked for what the second will read")
        assert not second.done()
        worker.resume()
        assert (await first).is_success
        assert (await second).is_success
    assert node.prefetched == HASHES[: len(node.prefetched)]
    assert running.counters["prefetch:promoting"] == len(node.prefetched)


def decision(mode: Any, **parts: Any) -> Decision:
    prefill = "p" if mode == "disaggregated" else None
    chosen = Candidate(mode, prefill, "w", 10, 1.0, 0.01, **parts)
    return Decision("r", mode, prefill, "w", 10, None, 1.0, 0.01, "by_cost", (chosen,))


def request() -> GenerationRequest:
    return generation_request(PROMPT)


async def planned(running: Conductor, decision: Decision) -> Plan:
    found = await running.cluster.lookups.find(NAMESPACE.namespace_id, HASHES)
    return Plan(decision, found)


async def test_the_decode_workers_reads_are_prepared_while_another_prefills() -> None:
    node = ScriptedNode("n")
    async with pool((node, Tier.NVME, HASHES), worker=ScriptedWorker("w")) as running:
        for chosen in (
            decision("local", queue_s=1.0),  # our worker pins at once: nothing to gain
            decision("disaggregated", prefill_s=0.001),  # over before it could help
            decision("disaggregated", prefill_s=0.5),
        ):
            running.gateway.prefetch.offer(request(), await planned(running, chosen))
        await until(lambda: node.prefetched, "asked while the prefill computes")
        assert node.prefetched == HASHES


async def test_an_engine_server_with_a_queue_reads_later_so_it_is_prepared() -> None:
    node, server = ScriptedNode("n", host="127.0.0.1"), ScriptedServer()
    async with engine_servers(server):
        settings = {"engines": [server.entry()], "engine_check_s": 0.05}
        async with pool((node, Tier.NVME, HASHES), worker=None, **settings) as running:
            await until(lambda: len(running.cluster.members.workers), "joined")
            chosen = Candidate("local", None, server.worker_id, 10, 1.0, 0.01, queue_s=0.5)
            to_server = Decision(
                "r", "local", None, server.worker_id, 10, None, 1.0, 0.01, "", (chosen,)
            )
            running.gateway.prefetch.offer(request(), await planned(running, to_server))
            await until(lambda: node.prefetched, "asked while it waits in the server's queue")

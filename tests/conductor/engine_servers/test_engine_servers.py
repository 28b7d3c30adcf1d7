"""Engine servers that are no kvpool workers: health, routing, streaming, failures.

Scripted, over real sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import structlog

from conductor.engine_servers.openai_client import EngineClient
from conductor.index.memory import complete
from conductor.members.membership import MembershipConfig
from conductor.scheduling.scheduler import IDLE
from kvpool.blocks.hash_check import proof_of
from kvpool.blocks.hashing import hash_chain, pack_hashes
from kvpool.blocks.tier import Tier
from kvpool.config.engine_server import EngineServer
from kvpool.wire import messages as m
from tests.support.engine_server import ScriptedServer, engine_servers
from tests.support.scripted import NAMESPACE, Conductor, ScriptedWorker, conductor
from tests.support.waiting import until

PROMPT = [65] * 42  # ten blocks and two tokens
# For tests about silence. A server's sign of life takes two requests, which a busy machine delays.
QUICK = MembershipConfig(
    heartbeat_s=0.05, suspect_after_s=3.0, dead_after_s=5.0, sweep_s=0.05, stall_s=5.0
)


@contextlib.asynccontextmanager
async def serving(
    *servers: tuple[ScriptedServer, str],
    workers: tuple[ScriptedWorker, ...] = (),
    entry: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Conductor]:
    """A conductor with these servers, each in its role, after all healthy ones have joined."""
    async with engine_servers(*(server for server, _ in servers)):
        engines = [server.entry(role=role, **(entry or {})) for server, role in servers]
        async with conductor(
            *workers,
            engines=engines,
            engine_check_s=0.05,
            min_remote_prefill_tokens=0,
            **settings,
        ) as running:
            well = sum(server.health == 200 for server, _ in servers)
            await until(
                lambda: len(running.cluster.members.workers) == len(workers) + well,
                "servers joined",
            )
            yield running


def pool_node(running: Conductor) -> None:
    """A node that only reports: a remote prefill needs space on some node."""
    node = m.NodeDescriptor("n", 1, "127.0.0.1", "127.0.0.1:9")
    complete(running.cluster.node_reports.join(m.NodeJoin(node, [NAMESPACE])))
    complete(
        running.cluster.node_reports.events(
            m.NodeEvents("n", 1, 1, [], snapshot=True, snapshot_end=True)
        )
    )


def stores(running: list[Conductor]) -> Any:
    """Report the blocks of a prefill to the index, as a connector does."""
    sequence = iter(range(2, 1000))

    def stored(tokens: list[int]) -> None:
        hashes = pack_hashes(hash_chain(NAMESPACE, tokens))
        event = m.BlockEvent("stored", NAMESPACE.namespace_id, hashes, Tier.DRAM)
        complete(
            running[0].cluster.node_reports.events(m.NodeEvents("n", 1, next(sequence), [event]))
        )

    return stored


async def keep_alive(running: Conductor) -> None:
    while True:
        stats = m.NodeStatsReply("n", 1, "127.0.0.1", 1.0, [], 0, 0, 1, {})
        beat = m.NodeHeartbeat("n", 1, 0, stats)
        running.cluster.node_reports.heartbeat(beat)
        running.cluster.members.nodes.get("n").report = None  # type: ignore[union-attr]  # room: unknown
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def disaggregated(
    prefill: ScriptedServer, *decode: ScriptedServer, **settings: Any
) -> AsyncIterator[Conductor]:
    holder: list[Conductor] = []
    prefill._on_prefill = stores(holder)
    roles = [(prefill, "prefill"), *((server, "decode") for server in decode)]
    async with serving(*roles, **settings) as running:
        holder.append(running)
        pool_node(running)
        alive = asyncio.create_task(keep_alive(running))
        try:
            yield running
        finally:
            alive.cancel()


# ---------------------------------------------------------------- the usual


async def test_a_server_alone_serves_with_the_models_own_token_ids() -> None:
    server = ScriptedServer()
    server.cached = 8
    async with serving((server, "both")) as running:
        response = await running.ask(prompt=PROMPT, seed=7, temperature=0.5, top_p=0.9)
    document = response.json()
    assert response.status_code == 200, response.text
    assert document["choices"][0]["text"] == "abcdefgh"
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    assert document["usage"]["completion_tokens"] == 8
    assert document["kvpool"]["decode_worker"] == server.worker_id
    assert (document["kvpool"]["local_tokens"], document["kvpool"]["computed_tokens"]) == (8, 34)
    [asked] = server.seen
    assert asked["prompt"] == PROMPT
    assert (asked["seed"], asked["temperature"], asked["top_p"]) == (7, 0.5, 0.9)
    assert server.headers[0]["x-request-id"] == response.headers["x-request-id"]


async def test_prefill_and_decode_servers_get_the_same_tokens_one_after_the_other() -> None:
    prefill, decode = ScriptedServer(), ScriptedServer()
    # The decode server finds blocks that were computed for this request. Only what the prefill
    # server found was in the pool before.
    prefill.cached, decode.cached = 16, 40
    async with disaggregated(prefill, decode) as running:
        ask = {"prompt": PROMPT, "kvpool": {"prefill": "remote"}}
        document = (await running.ask(**ask)).json()
        again = (await running.ask(**ask)).json()
        assert "engine_servers:not_stored" not in running.counters
    assert document["kvpool"]["mode"] == "disaggregated"
    assert document["choices"][0]["text"] == "abcdefgh"
    assert [(one["prompt"], one["max_tokens"]) for one in prefill.seen] == [(PROMPT, 1)]
    assert decode.seen[0]["prompt"] == PROMPT
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    assert document["kvpool"]["phases"]["prefill_compute_time"] > 0
    # Blocks that the index has are not prefilled again.
    assert again["kvpool"]["mode"] == "local"


async def test_a_worker_and_a_server_of_one_namespace_share_the_work() -> None:
    server, worker = ScriptedServer(), ScriptedWorker("w", "decode")
    async with serving((server, "both"), workers=(worker,)) as running:
        on_server = await running.ask(kvpool={"decode_worker": server.worker_id})
        on_worker = await running.ask(kvpool={"decode_worker": "w"})
    assert on_server.json()["kvpool"]["decode_worker"] == server.worker_id
    assert on_worker.json()["kvpool"]["decode_worker"] == "w"


async def test_events_are_streamed_one_by_one() -> None:
    server = ScriptedServer()
    server.hangs_at = 1
    async with serving((server, "both")) as running:
        pieces = []
        body = {"prompt": PROMPT, "max_tokens": 4, "stream": True, "model": "m"}
        body["stream_options"] = {"include_usage": True}
        async with running.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    pieces.append(json.loads(line[6:]))
                    if len(pieces) == 1:
                        assert server.running == 1  # it has not ended
                        server.hangs, server.hangs_at = False, None
    texts = [choice["text"] for piece in pieces for choice in piece["choices"]]
    assert texts == ["a", "b", "c", "d", ""]
    assert pieces[-2]["choices"][0]["finish_reason"] == "length"
    assert pieces[-1]["usage"]["completion_tokens"] == 4


async def test_text_without_ids_passes_and_is_counted_by_the_tokenizer() -> None:
    server = ScriptedServer()
    server.with_ids = False
    async with serving((server, "both")) as running:
        options = {"return_token_ids": True}
        document = (await running.ask(kvpool=options)).json()
    assert document["choices"][0]["text"] == "abcdefgh"
    assert document["kvpool"]["token_ids"] == [ord(letter) for letter in "abcdefgh"]


async def test_without_a_tokenizer_the_servers_text_is_used() -> None:
    server = ScriptedServer()
    async with serving((server, "both"), tokenizer=None) as running:
        document = (await running.ask(kvpool={"return_token_ids": True})).json()
        assert document["choices"][0]["text"] == "abcdefgh"
        assert len(document["kvpool"]["token_ids"]) == 8
        server.with_ids = False
        refused = await running.ask()
    assert refused.status_code == 500
    assert "no token ids" in refused.json()["error"]["message"]


async def test_a_stop_string_ends_the_work_at_the_server() -> None:
    server = ScriptedServer()
    server.text, server.hangs_at = "ab stop" + "x" * 1000, 8
    async with serving((server, "both")) as running:
        document = (await running.ask(stop="stop", max_tokens=1000)).json()
        assert document["choices"][0]["text"] == "ab "
        await until(lambda: server.running == 0, "the server's stream was closed")
    assert server.left == 1


# ---------------------------------------------------------------- health and load


async def test_an_unhealthy_server_gets_no_request_until_it_is_healthy() -> None:
    sick, well = ScriptedServer(), ScriptedServer()
    sick.health = 503
    async with serving((sick, "both"), (well, "both"), membership=QUICK) as running:
        for _ in range(3):
            assert (await running.ask()).status_code == 200
        assert (len(sick.seen), len(well.seen)) == (0, 3)
        assert running.counters["engine_servers:failed_checks"] > 0
        sick.health = 200
        await until(lambda: len(running.cluster.members.workers) == 2, "welcome when well")
        await running.ask(kvpool={"decode_worker": sick.worker_id})
        assert len(sick.seen) == 1
        sick.health = 500
        member = running.cluster.members.workers.get(sick.worker_id)
        assert member is not None
        await until(lambda: member.state == "suspect", "it is suspect after failed checks")
        assert (await running.ask()).json()["kvpool"]["decode_worker"] == well.worker_id


async def test_a_servers_namespace_is_the_one_that_its_connector_registered() -> None:
    server = ScriptedServer()
    plain = {"layers": 0, "kv_heads": 0, "head_dim": 0, "revision": ""}
    async with (
        engine_servers(server),
        conductor(engines=[server.entry(role="both", **plain)], engine_check_s=0.05) as running,
    ):
        await until(
            lambda: running.counters.get("engine_servers:failed_checks", 0) > 1,
            "nobody knows it at first",
        )
        complete(
            running.cluster.namespaces.register(m.RegisterNamespace(NAMESPACE, proof_of(NAMESPACE)))
        )
        await until(lambda: len(running.cluster.members.workers) == 1, "it joins")
        joined = running.cluster.members.workers.get(server.worker_id)
        assert joined is not None
        assert joined.descriptor.namespace == NAMESPACE
        await running.ask(kvpool={"decode_worker": server.worker_id})
        assert len(server.seen) == 1


async def test_of_several_namespaces_the_revision_says_which_is_a_servers() -> None:
    server = ScriptedServer()
    plain = {"layers": 0, "kv_heads": 0, "head_dim": 0}
    other = msgspec.structs.replace(NAMESPACE, revision="r-2")
    for revision, is_known in (("", False), ("r-", True)):
        async with (
            engine_servers(server),
            conductor(
                engines=[server.entry(revision=revision, **plain)],
                engine_check_s=0.05,
            ) as running,
        ):
            for space in (NAMESPACE, other):
                complete(
                    running.cluster.namespaces.register(m.RegisterNamespace(space, proof_of(space)))
                )
            if is_known:
                await until(lambda: len(running.cluster.members.workers) == 1, "it joins")
                joined = running.cluster.members.workers.get(server.worker_id)
                assert joined.descriptor.namespace == other  # type: ignore[union-attr]
            else:
                await until(
                    lambda: running.counters.get("engine_servers:failed_checks", 0) > 2,
                    "told apart",
                )
                assert not len(running.cluster.members.workers)


async def test_each_reason_of_failed_checks_is_logged_once_and_clients_learn_where() -> None:
    server = ScriptedServer()
    plain = {"layers": 0, "kv_heads": 0, "head_dim": 0, "revision": ""}
    with structlog.testing.capture_logs() as lines:
        async with (
            engine_servers(server),
            conductor(engines=[server.entry(**plain)], engine_check_s=0.05) as running,
        ):

            async def looks(more: int) -> None:
                seen = running.counters.get("engine_servers:failed_checks", 0)
                await until(
                    lambda: running.counters.get("engine_servers:failed_checks", 0) >= seen + more,
                    "it is looked at",
                )

            await looks(2)
            for space in (NAMESPACE, msgspec.structs.replace(NAMESPACE, revision="r-2")):
                complete(
                    running.cluster.namespaces.register(m.RegisterNamespace(space, proof_of(space)))
                )
            await looks(3)
            response = await running.ask()
    assert response.status_code == 503
    assert "conductor's log" in response.json()["error"]["message"]
    said = [line["error"] for line in lines if line["event"] == "engine server failed its check"]
    assert len(said) == 2
    assert "knows no namespace of model" in said[0]
    assert "several namespaces" in said[1]


async def test_a_server_of_another_model_or_with_another_key_does_not_join() -> None:
    other, closed = ScriptedServer(), ScriptedServer()
    other.model, closed.api_key = "another", "secret"
    async with engine_servers(other, closed):
        for server, words in ((other, "does not serve m"), (closed, "api_key")):
            client = EngineClient(EngineServer(**server.entry()))
            with pytest.raises(Exception, match=words):
                await client.check(2.0)
            await client.close()
        client = EngineClient(EngineServer(**closed.entry(api_key="secret")))
        assert await client.check(2.0) == 4096
        await client.close()


async def test_load_is_what_is_in_flight_and_what_the_servers_metrics_add() -> None:
    server = ScriptedServer()
    server.pause_s, server.hangs_at = 0.05, 2
    async with serving((server, "both")) as running:

        def load() -> m.WorkerLoad:
            member = running.cluster.members.workers.get(server.worker_id)
            assert member is not None
            return member.report or IDLE

        asked = asyncio.create_task(running.ask(prompt=PROMPT))
        await until(lambda: load().decode_sequences == 1, "our request decodes there")
        assert load().decode_context_tokens > len(PROMPT)
        server.hangs, server.hangs_at = False, None
        await asked
        await until(lambda: load().running == 0, "it is over")
        assert load().tpot_s > 0.04
        server.metrics = (
            'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
            'vllm:num_requests_running{engine="1",model_name="m"} 1.0\n'
            'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0\n'
            'vllm:num_requests_waiting_by_reason{engine="0"} 9.0\n'
        )
        await until(lambda: load().running == 6, "what others have there counts, too")
        assert load().decode_sequences == 4
        assert load().queued_prefill_tokens == 2 * len(PROMPT)


# ---------------------------------------------------------------- failures


async def test_a_prefill_server_that_dies_leaves_the_prompt_to_the_decode_server() -> None:
    prefill, decode = ScriptedServer(), ScriptedServer()
    prefill.dies_after = 0
    async with disaggregated(prefill, decode) as running:
        document = (await running.ask(prompt=PROMPT, kvpool={"prefill": "remote"})).json()
    assert document["choices"][0]["text"] == "abcdefgh"
    assert document["kvpool"]["fallback_reason"] == "prefill:unavailable"
    assert (len(prefill.seen), len(decode.seen)) == (1, 1)


async def test_a_hanging_prefill_server_is_given_up_in_time_and_its_request_cancelled() -> None:
    prefill, decode = ScriptedServer(), ScriptedServer()
    prefill.hangs = True
    # Long enough for the request to arrive on a busy machine: only then can it be cancelled.
    async with disaggregated(prefill, decode, prefill_timeout_s=4.0) as running:
        document = (await running.ask(prompt=PROMPT, kvpool={"prefill": "remote"})).json()
        await until(lambda: prefill.left == 1, "its connection was closed")
    assert document["kvpool"]["fallback_reason"] == "prefill:deadline"
    assert document["choices"][0]["text"] == "abcdefgh"


async def test_a_connector_that_stores_nothing_costs_a_short_wait_and_is_counted() -> None:
    prefill, decode = ScriptedServer(), ScriptedServer()
    async with disaggregated(prefill, decode) as running:
        prefill._on_prefill = lambda _tokens: None
        document = (await running.ask(prompt=PROMPT, kvpool={"prefill": "remote"})).json()
        assert running.counters["engine_servers:not_stored"] == 1
    assert document["choices"][0]["text"] == "abcdefgh"


@pytest.mark.parametrize("given", [0, 3])
@pytest.mark.parametrize("with_ids", [True, False])
async def test_another_server_continues_where_one_died(given: int, with_ids: bool) -> None:
    first, second = ScriptedServer(), ScriptedServer()
    first.dies_after, second.text = given, "defgh" if given else "abcdefgh"
    first.with_ids = second.with_ids = with_ids
    async with serving((first, "decode"), (second, "decode")) as running:
        document = (await running.ask(kvpool={"decode_worker": first.worker_id})).json()
    assert document["choices"][0]["text"] == "abcdefgh"
    assert document["kvpool"]["fallback_reason"] == "decode:unavailable"
    assert document["kvpool"]["decode_worker"] == second.worker_id
    assert second.seen[0]["prompt"] == [65] * 10 + [ord(letter) for letter in "abc"[:given]]
    assert second.seen[0]["max_tokens"] == 8 - given


async def test_a_stream_that_ends_without_a_result_is_an_error() -> None:
    first, second = ScriptedServer(), ScriptedServer()
    first.breaks_off, first.text, second.text = True, "abc", "defgh"
    async with serving((first, "decode"), (second, "decode")) as running:
        document = (await running.ask(kvpool={"decode_worker": first.worker_id})).json()
    assert document["choices"][0]["text"] == "abcdefgh"
    assert document["kvpool"]["fallback_reason"] == "decode:unavailable"


async def test_a_server_that_stops_altogether_is_passed_over() -> None:
    first, second = ScriptedServer(), ScriptedServer()
    async with serving((first, "decode"), (second, "decode"), membership=QUICK) as running:
        gone = first.worker_id
        await first.stop()
        document = (await running.ask(kvpool={"decode_worker": gone})).json()
        assert document["kvpool"]["decode_worker"] == second.worker_id
        await until(lambda: running.cluster.members.workers.get(gone) is None, "it is forgotten")


@pytest.mark.parametrize(
    ("failure", "status", "words"),
    [
        ((400, {"error": {"message": "too long for me"}}), 400, "too long for me"),
        ((429, {"error": {"message": "busy"}}), 429, "busy"),
        ((500, {"error": {"message": "cuda"}}), 500, "cuda"),
        ((502, "what is this"), 503, "502"),
        ((200, {"no": "stream"}), 503, "before the stream ended"),
    ],
)
async def test_an_error_of_the_only_server_reaches_the_client(
    failure: tuple[int, Any], status: int, words: str
) -> None:
    server = ScriptedServer()
    server.fails_with = failure
    # A busy server is asked again.
    async with serving((server, "both"), max_queue_wait_s=0.3) as running:
        response = await running.ask()
        assert running.counters.get("fallback:decode:overloaded", 0) <= 1
    assert response.status_code == status, response.text
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_the_work_at_the_server(stream: bool) -> None:
    server = ScriptedServer()
    server.text, server.pause_s = "x" * 2000, 0.02
    async with serving((server, "both")) as running:
        asked = asyncio.create_task(_read_on(running, stream))
        await until(lambda: server.running == 1, "it began")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: server.running == 0, "it ended")
        await until(lambda: running.counters.get("requests:cancelled") == 1, "and is counted")
        assert running.gateway.active == len(running.cluster.view.in_flight) == 0
    assert server.left == 1


async def _read_on(running: Conductor, stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1000, "stream": stream}
    url = f"http://127.0.0.1:{running.port}/v1/completions"
    async with httpx.AsyncClient(timeout=20) as client, client.stream("POST", url, json=body) as r:
        async for _ in r.aiter_lines():
            pass

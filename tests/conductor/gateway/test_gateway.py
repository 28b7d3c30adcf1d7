"""Workers that hang, clients that leave, stop strings: scripted workers, real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from benchmarks.local_cluster import local_cluster
from conductor.index.memory import complete
from conductor.scheduling.decision import Decision
from kvpool.blocks.hashing import hash_chain, pack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument
from kvpool.wire import WireClient, WireServer
from kvpool.wire import messages as m
from tests.support.scripted import (
    NAMESPACE,
    PATIENT,
    QUICK,
    Conductor,
    LetterTokenizer,
    ScriptedWorker,
    asked,
    conductor,
)
from tests.support.waiting import until

# ---------------------------------------------------------------- workers that hang


async def test_a_hanging_decode_worker_is_given_up_when_it_falls_silent() -> None:
    first, second = ScriptedWorker("w1"), ScriptedWorker("w2")
    first.hangs = True
    async with conductor(first, second, membership=QUICK) as running:
        # The client waits 20 s; the request would have 120.
        response = await running.ask(kvpool={"decode_worker": "w1"})
    document = response.json()
    assert document["choices"][0]["text"] == "abcdefgh"
    assert document["kvpool"]["decode_worker"] == "w2"
    assert document["kvpool"]["fallback_reason"] == "decode:unavailable"


async def test_a_worker_that_hangs_in_mid_response_costs_no_token() -> None:
    first, second = ScriptedWorker("w1"), ScriptedWorker("w2")
    first.hangs_at, second.text = 3, "defgh"
    async with conductor(first, second, membership=QUICK) as running:
        document = (await running.ask(kvpool={"decode_worker": "w1"})).json()
    [retry] = [one for one in second.seen if isinstance(one, m.Generate)]
    assert retry.sampling.max_tokens == 5
    assert document["choices"][0]["text"] == "abcdefgh"
    assert document["kvpool"]["decode_worker"] == "w2"


async def test_tokens_are_a_sign_of_life_of_a_worker_without_heartbeats() -> None:
    first, second = ScriptedWorker("w1"), ScriptedWorker("w2")
    first.hangs_at, first.is_silent = 4, True
    async with conductor(first, second) as running:
        task = asyncio.create_task(running.ask(kvpool={"decode_worker": "w1"}))
        await until(lambda: first.hangs, "half of the tokens are sent")
        member = running.cluster.members.workers.get("w1")
        assert member is not None
        member.last_seen -= 2 * PATIENT.dead_after_s
        await until(lambda: running.cluster.members.workers.get("w1") is None, "it counts as dead")
        first.resume()
        document = (await task).json()
    assert document["kvpool"]["fallback_reason"] == ""
    assert document["choices"][0]["text"] == "abcdefgh"


async def test_a_silent_worker_is_not_given_up_while_there_is_no_other() -> None:
    only = ScriptedWorker("w1")
    only.hangs_at, only.is_silent = 1, True
    async with conductor(only, membership=replace(QUICK, dead_after_s=60.0)) as running:
        task = asyncio.create_task(running.ask(max_tokens=2))
        await until(lambda: only.hangs, "the first token is sent")
        await asyncio.sleep(QUICK.suspect_after_s)  # the token is no sign of life any more
        complete(running.cluster.sweep())
        member = running.cluster.members.workers.get("w1")
        assert member is not None
        assert member.state == "suspect"
        only.resume()
        document = (await task).json()
    assert (document["choices"][0]["text"], document["kvpool"]["fallback_reason"]) == ("ab", "")


async def test_a_worker_that_restarted_is_given_up_at_once() -> None:
    first, second = ScriptedWorker("w1"), ScriptedWorker("w2")
    first.hangs = True
    async with conductor(first, second) as running:
        task = asyncio.create_task(running.ask(kvpool={"decode_worker": "w1"}))
        await until(lambda: first.running, "the first worker has the request")
        later = ScriptedWorker("w1", epoch=2)
        await later.join(running.cluster)
        running.workers.append(later)  # it lives: silence is not what ends the wait
        document = (await task).json()
    assert document["kvpool"]["fallback_reason"] == "decode:unavailable"
    assert document["choices"][0]["text"] == "abcdefgh"


@pytest.mark.parametrize("tells_places", [True, False])
async def test_more_requests_than_workers_take_wait_and_none_is_lost(tells_places: bool) -> None:
    """If the worker does not report its places, it refuses and is asked again."""
    worker = ScriptedWorker("w")
    worker.places, worker.tells_places, worker.pause_s = 2, tells_places, 0.01
    async with conductor(worker) as running:
        member = running.cluster.members.workers.get("w")
        assert member is not None
        await until(lambda: member.report, "its load is known")
        responses = await asyncio.gather(*(running.ask(stream=n % 2 == 1) for n in range(12)))
    assert [response.status_code for response in responses] == [200] * 12
    for n, response in enumerate(responses):
        assert "error" not in response.text
        if not n % 2:
            assert response.json()["choices"][0]["text"] == "abcdefgh"
    assert running.gateway.active == 0
    assert ("fallback:decode:overloaded" in running.counters) != tells_places


async def test_a_worker_that_stays_full_ends_the_request_after_the_longest_wait() -> None:
    worker = ScriptedWorker("w")
    worker.places, worker.tells_places, worker.running = 1, False, 1
    async with conductor(worker, max_queue_wait_s=0.5) as running:
        started = time.monotonic()
        response = await running.ask()  # the client waits 20 s
        assert time.monotonic() - started > 0.4
    assert response.status_code == 429
    assert running.gateway.active == 0


async def test_a_hanging_prefill_leaves_time_for_the_fallback() -> None:
    prefill, decode, node = ScriptedWorker("p", "prefill"), ScriptedWorker("d"), "n"
    async with conductor(prefill, decode, request_timeout_s=4.0) as running:
        wire = await _join_node(running, node)
        prefill.hangs = prefill.beats_anyway = True  # only the cap on the wait ends it
        document = (await running.ask(kvpool={"prefill": "remote"})).json()
        await wire.close()
    assert document["kvpool"]["fallback_reason"] == "prefill:deadline"
    assert document["choices"][0]["finish_reason"] == "length"
    [prefilled] = [one for one in prefill.seen if isinstance(one, m.Prefill)]
    [generate] = [one for one in decode.seen if isinstance(one, m.Generate)]
    assert prefilled.deadline_s <= 2.0
    assert generate.deadline_s > 1.0


async def test_a_grant_says_how_old_it_is_when_the_prefill_worker_gets_it() -> None:
    prefill, decode = ScriptedWorker("p", "prefill"), ScriptedWorker("d")
    async with conductor(prefill, decode) as running:
        wire = await _join_node(running, "n", slowness_s=0.1)
        started = time.monotonic()
        assert (await running.ask(kvpool={"prefill": "remote"})).status_code == 200
        took_s = time.monotonic() - started
        await wire.close()
    [prefilled] = [one for one in prefill.seen if isinstance(one, m.Prefill)]
    assert prefilled.grant is not None
    assert 0.09 <= prefilled.grant.age_s <= took_s


async def test_the_first_token_is_waited_for_only_so_long() -> None:
    first, second = ScriptedWorker("w1"), ScriptedWorker("w2")
    first.hangs = first.beats_anyway = True
    async with conductor(first, second, first_token_timeout_s=0.5) as running:
        document = (await running.ask(kvpool={"decode_worker": "w1"})).json()
    assert document["kvpool"]["fallback_reason"] == "decode:deadline"
    assert document["kvpool"]["decode_worker"] == "w2"


async def test_a_response_cut_by_its_deadline_is_an_error() -> None:
    only = ScriptedWorker("w1")
    only.pause_s = 0.2
    async with conductor(only, request_timeout_s=0.5) as running:
        response = await running.ask()
        counters = running.counters
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline"
    assert counters["failed:deadline"] == 1


# ---------------------------------------------------------------- the clock of a request


class SlowTokenizer(LetterTokenizer):
    def encode(self, text: str) -> list[int]:
        time.sleep(0.3)
        return super().encode(text)


async def test_ttft_counts_the_time_of_tokenizing() -> None:
    async with conductor(ScriptedWorker("w"), tokenizer=SlowTokenizer()) as running:
        document = (await running.ask(prompt="A" * 10)).json()
    assert document["kvpool"]["ttft_s"] >= 0.3
    assert document["kvpool"]["phases"]["request_read_time"] >= 0.3


async def test_the_deadline_counts_the_time_of_tokenizing() -> None:
    only = ScriptedWorker("w")
    async with conductor(only, tokenizer=SlowTokenizer(), request_timeout_s=0.2) as running:
        response = await running.ask(prompt="A" * 10)
    assert response.status_code == 504
    assert only.seen == []


async def test_ttft_counts_from_the_first_byte_not_from_the_last_byte_of_the_body() -> None:
    async def slowly() -> AsyncIterator[bytes]:
        body = json.dumps(asked()).encode()
        yield body[:10]
        await asyncio.sleep(0.3)
        yield body[10:]

    async with conductor(ScriptedWorker("w")) as running:
        response = await running.http.post("/v1/completions", content=slowly())
    assert response.json()["kvpool"]["ttft_s"] >= 0.29


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_worker(stream: bool) -> None:
    only = ScriptedWorker("w1")
    only.hangs_at, only.beats_anyway = 2, True  # it would never end by itself
    async with conductor(only) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        body = json.dumps(asked(stream=stream)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: only.hangs, "the worker has sent tokens")
        writer.close()
        await until(lambda: only.running == 0, "the worker is free")
        await until(lambda: running.gateway.active == 0, "the request is over")
        assert running.counters["requests:cancelled"] == 1
        assert len(running.cluster.peer_guard) == 0
        del reader


# ---------------------------------------------------------------- stop strings


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stopped_request_is_ok_and_its_report_right(stream: bool) -> None:
    only = ScriptedWorker("w1")
    only.text, only.pool_tokens = "abcdefgh" * 40, 8
    only.hangs_at, only.beats_anyway = 8, True  # it would never end by itself
    async with conductor(only) as running:
        response = await running.ask(
            max_tokens=320, stop=["ef"], stream=stream, stream_options={"include_usage": True}
        )
        counters = running.counters
        await until(lambda: only.running == 0, "the worker is free")
    if stream:
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        documents = [json.loads(event) for event in events[:-1]]
        text = "".join(choice["text"] for one in documents for choice in one["choices"])
        finish, document = documents[-2]["choices"][0]["finish_reason"], documents[-1]
    else:
        document = response.json()
        text, finish = document["choices"][0]["text"], document["choices"][0]["finish_reason"]
    assert (text, finish) == ("abcd", "stop")
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    assert counters["requests:ok"] == 1
    assert "requests:cancelled" not in counters
    assert counters["pool_tokens"] == 8


async def test_a_stop_string_completed_by_the_last_token_is_applied() -> None:
    only = ScriptedWorker("w1")
    async with conductor(only) as running:
        document = (await running.ask(stop="h")).json()
    assert document["choices"][0]["text"] == "abcdefg"
    assert document["choices"][0]["finish_reason"] == "stop"


async def test_a_stop_string_completed_by_held_text_is_applied() -> None:
    only = ScriptedWorker("w1")
    only.text = "abc\ufffd"  # it looks like half a character, and is held back to the end
    async with conductor(only) as running:
        document = (await running.ask(stop="c\ufffd")).json()
        counters = running.counters
    assert document["choices"][0]["text"] == "ab"
    assert document["choices"][0]["finish_reason"] == "stop"
    assert counters["requests:ok"] == 1


# ---------------------------------------------------------------- bodies and errors


async def test_a_chunked_body_is_accepted_up_to_the_limit() -> None:
    only = ScriptedWorker("w1")
    async with conductor(only, max_body_bytes=64 << 10) as running:

        async def pieces(size: int) -> AsyncIterator[bytes]:
            yield json.dumps(asked()).encode()
            for _ in range(size // 1024):
                yield b" " * 1024

        good = await running.http.post("/v1/completions", content=pieces(1 << 10))
        large = await running.http.post("/v1/completions", content=pieces(256 << 10))
    assert good.status_code == 200, good.text
    assert (large.status_code, large.json()["error"]["code"]) == (413, "invalid_argument")


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"{not json", 400), (b"\xff\xfe", 400), (b"", 400), (b"[" * 100_000, 400)],
)
async def test_errors_of_bad_bodies_have_openais_shape(content: bytes, status: int) -> None:
    async with conductor(ScriptedWorker("w1")) as running:
        response = await running.http.post("/v1/completions", content=content)
        missing = await running.http.post("/v1/nothing", json={})
        wrong = await running.http.get("/v1/completions")
    assert response.status_code == status
    assert response.json()["error"]["code"] == "invalid_argument"
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_errors_do_not_echo_the_request() -> None:
    async with conductor(ScriptedWorker("w1")) as running:
        named = await running.http.get(f"/v1/requests/{'x' * 20_000}")
        model = await running.ask(model="y" * 500)
    assert (named.status_code, model.status_code) == (404, 404)
    assert len(named.text) < 600
    assert len(model.text) < 600


async def test_half_a_surrogate_pair_is_an_invalid_argument() -> None:
    async with conductor(ScriptedWorker("w1")) as running:
        body = b'{"prompt":"\\ud800 alone","max_tokens":2}'
        response = await running.http.post("/v1/completions", content=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "invalid_argument"


async def test_the_openapi_page_knows_the_bodies() -> None:
    async with conductor(ScriptedWorker("w1")) as running:
        document = (await running.http.get("/openapi.json")).json()
    post = document["paths"]["/v1/completions"]["post"]
    reference = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert reference == "#/components/schemas/CompletionRequest"
    assert "CompletionRequest" in document["components"]["schemas"]


async def test_namespaces_come_in_pages_over_the_wire() -> None:
    async with conductor(ScriptedWorker("w1")) as running:
        for number in range(4):
            other = Namespace("m", "r", NAMESPACE.layout, "", str(number))
            complete(running.cluster.namespaces.register(m.RegisterNamespace(other)))
        wire = WireServer("conductor", "c", 1)
        wire.handlers |= running.cluster.handlers()
        client = WireClient(f"127.0.0.1:{await wire.listen('127.0.0.1', 0)}", "client")
        whole = await client.call(m.Namespaces(), 5.0)
        page = await client.call(m.Namespaces(offset=3, limit=10), 5.0)
        with pytest.raises(InvalidArgument):
            await client.call(m.Namespaces(limit=1_000_000), 5.0)
        await client.close()
        await wire.close()
    assert len(whole.namespaces) == 5
    assert [one.salt for one in page.namespaces] == ["2", "3"]


async def test_a_request_that_never_ended_is_forgotten_by_the_sweep() -> None:
    now = 0.0
    cluster = local_cluster(PATIENT, lambda: now)
    decision = Decision("r", "local", None, "w1", 0, None, 1.0, 0.1, "cost")
    cluster.view.in_flight.assigned(decision, now)
    now = 3599.0
    complete(cluster.sweep())
    assert len(cluster.view.in_flight) == 1
    now = 3601.0
    complete(cluster.sweep())
    assert len(cluster.view.in_flight) == 0


async def _join_node(running: Conductor, node_id: str, slowness_s: float = 0.0) -> WireServer:
    """A node that grants every reservation and handles nothing else."""
    wire = WireServer("node", node_id, 1)

    async def reserve(request: m.Reserve) -> m.ReserveReply:
        await asyncio.sleep(slowness_s)
        count = len(request.hashes) // 16
        return m.ReserveReply(1, bytes(count), bytes(16 * count), 512, request.ttl_s)

    wire.handle(m.RegisterNamespace, lambda _r, _s: m.NamespaceReply(b"n" * 16))
    wire.handle(m.Reserve, lambda request, _s: reserve(request))
    wire.handle(m.Abort, lambda _r, _s: m.Ok())
    port = await wire.listen("127.0.0.1", 0)
    descriptor = m.NodeDescriptor(node_id, 1, "h", f"127.0.0.1:{port}")
    complete(running.cluster.node_reports.join(m.NodeJoin(descriptor, [])))
    return wire


# ---------------------------------------------------------------- disks slower than computing


async def test_requests_carry_the_longest_wait_for_a_disk_and_declined_blocks_stay() -> None:
    worker = ScriptedWorker("w1")
    async with conductor(worker) as running:
        cluster = running.cluster
        hashes = hash_chain(NAMESPACE, [65] * 12)
        await cluster.namespaces.add(NAMESPACE)
        node = m.NodeDescriptor("n", 1, "h", "127.0.0.1:1")
        complete(cluster.node_reports.join(m.NodeJoin(node, [NAMESPACE])))
        event = m.BlockEvent("stored", NAMESPACE.namespace_id, pack_hashes(hashes), Tier.NVME)
        complete(cluster.node_reports.events(m.NodeEvents("n", 1, 1, [event], True, True)))
        for _ in range(20):
            cluster.view.cost.observe_prefill("w1", 12, 0, 3.0)
            cluster.view.cost.observe_prefill("w1", 6, 0, 1.5)
            cluster.view.cost.observe_prefill("w1", 1, 11, 0.25)
        worker.declines = True
        response = await running.ask(prompt=[65] * 12)
        assert response.status_code == 200
        [seen] = [one for one in worker.seen if isinstance(one, m.Generate)]
        assert seen.segments
        assert 0.1 < seen.max_wait_s < 4.0
        assert running.counters["fallback:pool_read:declined_cost"] == 1
        found = (await cluster.lookups.find(NAMESPACE.namespace_id, hashes)).segments("h")
        assert sum(segment.count for segment in found) == len(hashes)

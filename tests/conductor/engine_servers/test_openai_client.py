"""The gateway with OpenAI's own Python client: responses, streams, and classes of errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from conductor.gateway.tokenizer import Tokenizer
from tests.support.scripted import Conductor, ScriptedWorker, conductor
from tests.support.tiny_tokenizer import save_tiny_tokenizer
from tests.support.waiting import until

SPARE: Any = {"model": "m", "temperature": 0, "max_tokens": 8}
CHAT: Any = [
    {"role": "system", "content": "You are a careful assistant."},
    {"role": "user", "content": "What is a KV cache?"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@contextlib.asynccontextmanager
async def client(
    *workers: ScriptedWorker, **settings: Any
) -> AsyncIterator[tuple[AsyncOpenAI, Conductor]]:
    async with conductor(*workers, **settings) as running:
        url = f"http://127.0.0.1:{running.port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=20) as made:
            yield made, running


async def test_chat_and_completions_are_parsed_with_usage_and_report(tokenizer: Tokenizer) -> None:
    worker = ScriptedWorker("w")
    worker.pool_tokens = 8
    async with client(worker, tokenizer=tokenizer) as (api, _):
        chat = await api.chat.completions.create(messages=CHAT, **SPARE)
        plain = await api.completions.create(prompt="The quick brown fox", **SPARE)
        models = await api.models.list()
    assert chat.object == "chat.completion"
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].finish_reason == plain.choices[0].finish_reason == "length"
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(tokenizer.encode_chat(CHAT))
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + 8
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 8
    assert chat.choices[0].message.content == plain.choices[0].text
    assert (chat.model_extra or {})["kvpool"]["decode_worker"] == "w"
    assert [model.id for model in models.data] == ["m"]


async def test_options_of_ours_and_the_raw_headers_pass_through_the_client() -> None:
    async with client(ScriptedWorker("w1"), ScriptedWorker("w2")) as (api, _):
        for wanted in ("w1", "w2"):
            raw = await api.completions.with_raw_response.create(
                prompt=[65] * 10,
                extra_body={"kvpool": {"decode_worker": wanted}},
                extra_headers={"X-Kvpool-Key": "me"},
                **SPARE,
            )
            assert raw.headers["x-kvpool-decode"] == wanted
            assert raw.headers["x-request-id"]
            assert raw.parse().choices[0].text == "abcdefgh"


@pytest.mark.parametrize("is_chat", [True, False])
async def test_streams_come_piece_by_piece_and_end_with_usage(is_chat: bool) -> None:
    worker = ScriptedWorker("w")
    worker.hangs_at, worker.beats_anyway = 1, True
    texts: list[str] = []
    reasons: list[str | None] = []
    usage: Any = None
    async with client(worker) as (api, _):
        ask: Any = {**SPARE, "stream": True, "stream_options": {"include_usage": True}}
        stream: Any = await (
            api.chat.completions.create(messages=CHAT, **ask)
            if is_chat
            else api.completions.create(prompt=[65] * 10, **ask)
        )
        running_at_first = None
        async for event in stream:
            usage = event.usage or usage
            for choice in event.choices:
                texts.append((choice.delta.content if is_chat else choice.text) or "")
                reasons.append(choice.finish_reason)
            if running_at_first is None:
                running_at_first = worker.running
                worker.resume()
    assert "".join(texts) == "abcdefgh"
    assert sum(map(bool, texts)) == 8
    assert running_at_first == 1
    assert reasons[-1] == "length"
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert usage.completion_tokens == 8


async def test_leaving_a_stream_frees_the_worker_and_the_slot() -> None:
    worker = ScriptedWorker("w")
    worker.text, worker.pause_s = "x" * 2000, 0.02
    async with client(worker) as (api, running):
        ask: Any = {**SPARE, "max_tokens": 2000}
        stream = await api.completions.create(prompt=[65] * 10, stream=True, **ask)
        async for _ in stream:
            break
        assert worker.running == 1
        await stream.close()
        await until(lambda: worker.running == 0, "the worker stopped")
        await until(lambda: running.gateway.active == 0, "the slot is free")
        assert len(running.cluster.view.in_flight) == 0
        assert running.counters["requests:cancelled"] == 1


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"n": 2}, openai.BadRequestError, "n: "),
        ({"prompt": [65] * 5000}, openai.BadRequestError, "context"),
        ({"prompt": []}, openai.BadRequestError, "empty"),
        ({"model": "unknown"}, openai.NotFoundError, "served: m"),
    ],
)
async def test_mistakes_are_errors_of_their_class(
    change: dict[str, Any], kind: type[openai.APIStatusError], words: str
) -> None:
    async with client(ScriptedWorker("w")) as (api, _):
        with pytest.raises(kind) as caught:
            await api.completions.create(**{"prompt": [65] * 10, **SPARE, **change})
    assert words in caught.value.message
    assert caught.value.code in ("invalid_argument", "not_found")
    assert caught.value.type == caught.value.code


async def test_an_overload_is_a_rate_limit_error_that_says_when_to_come_back() -> None:
    worker = ScriptedWorker("w")
    worker.hangs = worker.beats_anyway = True
    async with client(worker, max_active_requests=1, max_queued_requests=0) as (api, _):
        first = await api.completions.create(prompt=[65] * 10, stream=True, **SPARE)
        with pytest.raises(openai.RateLimitError) as caught:
            await api.completions.create(prompt=[65] * 10, **SPARE)
        await first.close()
    assert caught.value.code == "overloaded"
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert caught.value.response.headers["x-kvpool-reason"] == "queue_full"
    assert caught.value.request_id  # for `kvpool explain`


async def test_the_client_tries_again_after_retry_after() -> None:
    worker = ScriptedWorker("w")
    worker.hangs = worker.beats_anyway = True
    async with client(worker, max_active_requests=1, max_queued_requests=0) as (api, running):
        first = await api.completions.create(prompt=[65] * 10, stream=True, **SPARE)
        patient = api.with_options(max_retries=2)

        async def ask() -> Any:
            return await patient.completions.create(prompt=[65] * 10, **SPARE)

        second = asyncio.create_task(ask())
        await until(lambda: running.counters.get("rejected:queue_full"), "refused at first")
        worker.resume()
        await first.close()
        assert (await second).choices[0].text == "abcdefgh"


async def test_no_worker_is_a_503() -> None:
    async with client() as (api, _):
        with pytest.raises(openai.InternalServerError) as caught:
            await api.completions.create(prompt=[65] * 10, **SPARE)
    assert caught.value.status_code == 503
    assert "kvpool worker" in caught.value.message


async def test_a_stream_that_breaks_raises_and_does_not_look_complete() -> None:
    worker = ScriptedWorker("w")
    worker.text, worker.pause_s = "x" * 2000, 0.02
    ask: Any = {**SPARE, "max_tokens": 2000, "stream": True}
    async with client(worker) as (api, _):
        stream = await api.completions.create(prompt=[65] * 10, **ask)
        await anext(aiter(stream))
        await worker.wire.close()
        with pytest.raises(openai.APIError) as caught:
            _ = [event async for event in stream]
    assert caught.value.code == "unavailable"

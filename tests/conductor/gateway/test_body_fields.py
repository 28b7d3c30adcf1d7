"""No field of a body is dropped: it is honoured, passed on, without effect, or refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from conductor.gateway.body_fields import (
    DEFAULTS,
    FORWARDED,
    WITHOUT_EFFECT,
    check_fields,
    other_fields,
)
from conductor.gateway.openai_schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    read_request,
)
from kvpool.blocks.hashing import hash_chain
from kvpool.errors import InvalidArgument
from kvpool.wire import messages as m
from tests.support.engine_server import ScriptedServer, engine_servers
from tests.support.scripted import NAMESPACE, ScriptedWorker, conductor
from tests.support.waiting import until

READ = CompletionRequest.__struct_fields__
REFUSED_EVERYWHERE = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "logprobs": 2,
    "top_logprobs": 3,
    "prompt_logprobs": 1,
    "echo": True,
    "best_of": 2,
    "suffix": "end",
    "continue_final_message": True,
    "reasoning_effort": "high",
    "skip_special_tokens": False,
    "store": True,
    "prompt_cache_retention": "24h",
    "modalities": ["audio"],
    "a_new_field": 0,
}


def fields_of(**body: Any) -> dict[str, Any]:
    return other_fields(msgspec.json.encode({"prompt": "a", **body}), READ)


def test_defaults_nulls_and_what_changes_no_answer_are_accepted_everywhere() -> None:
    for name, values in DEFAULTS.items():
        for value in (*values, None):
            assert fields_of(**{name: value}) == {}, (name, value)
    assert fields_of(**dict.fromkeys(WITHOUT_EFFECT, "x")) == {}
    assert fields_of(a_new_field=None, temperature=1, stream=True) == {}


def test_a_truth_value_is_no_number() -> None:
    assert fields_of(logprobs=0) == {"logprobs": 0}  # asks for the log probability of each token
    assert fields_of(echo=0) == {"echo": 0}
    assert fields_of(top_k=False) == {"top_k": False}


@pytest.mark.parametrize("name", sorted(REFUSED_EVERYWHERE))
@pytest.mark.parametrize("is_engine_server", [True, False])
def test_what_cannot_be_honoured_is_refused_by_name(name: str, is_engine_server: bool) -> None:
    fields = fields_of(**{name: REFUSED_EVERYWHERE[name]})
    with pytest.raises(InvalidArgument, match=f"^{name}: "):
        check_fields(fields, is_engine_server=is_engine_server)


@pytest.mark.parametrize("name", sorted(FORWARDED))
def test_what_only_engine_servers_honour_is_refused_for_our_own_workers(name: str) -> None:
    fields = fields_of(**{name: {"deep": [1]}})
    check_fields(fields, is_engine_server=True)
    with pytest.raises(InvalidArgument, match=f"^{name}: kvpool's own workers"):
        check_fields(fields, is_engine_server=False)


def test_a_long_name_is_shortened() -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_fields(fields_of(**{"x" * 100_000: 1}), is_engine_server=True)
    assert len(str(caught.value)) < 300


def test_null_is_the_default_of_every_optional_field() -> None:
    completion: dict[str, Any] = dict.fromkeys(READ) | {"prompt": "a"}
    chat: dict[str, Any] = dict.fromkeys(ChatRequest.__struct_fields__)
    chat["messages"] = [{"role": "user", "content": "hi"}]
    for read in (
        read_request(msgspec.json.encode(completion), CompletionRequest),
        read_request(msgspec.json.encode(chat), ChatRequest),
    ):
        assert read.stop_strings() == ()
        assert read.options.pool == "on"


# ------------------------------------------------------------ messages


def message(**fields: Any) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(fields), type=ChatMessage).plain()


def test_a_tool_call_in_the_history_reaches_the_template() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    said = message(role="assistant", content=None, tool_calls=[call], refusal=None, annotations=[])
    assert said["content"] == ""
    assert said["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": [1]}}
    answer = message(role="tool", content="42", tool_call_id="1", name="f")
    assert answer == {"role": "tool", "content": "42", "tool_call_id": "1", "name": "f"}


def test_text_parts_are_lines_as_in_vllm() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert message(role="user", content=parts)["content"] == "a\nb"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"content": "a", "audio": {"id": "x"}}, "messages[0].audio"),
        ({"content": "a", "thoughts": "x"}, "thoughts"),
        ({"content": "a", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_what_a_message_cannot_carry_is_refused_by_name(wrong: dict[str, Any], named: str) -> None:
    body = msgspec.json.encode({"messages": [{"role": "user", **wrong}]})
    with pytest.raises(InvalidArgument) as caught:
        read_request(body, ChatRequest)
    assert named in str(caught.value)


def test_a_message_without_content_or_with_broken_arguments_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="neither content nor tool_calls"):
        message(role="user", content=None)
    with pytest.raises(InvalidArgument, match="arguments"):
        message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])


# ------------------------------------------------------------ through the gateway


async def test_an_engine_server_gets_what_the_caller_gave_and_nothing_else() -> None:
    server = ScriptedServer()
    given = {"cache_salt": "alice", "kv_transfer_params": {"kvpool": {"save": False}}, "top_k": 5}
    async with (
        engine_servers(server),
        conductor(engines=[server.entry()], engine_check_s=0.05) as running,
    ):
        await until(lambda: len(running.cluster.members.workers) == 1, "joined")
        assert (await running.http.post("/v1/completions", json={"prompt": [1, 2]})).is_success
        response = await running.http.post(
            "/v1/completions", json={"prompt": [1, 2], "seed": -3, "min_p": None, **given}
        )
        assert response.is_success, response.text
        refused = await running.http.post("/v1/completions", json={"prompt": [1, 2], "echo": True})
        assert refused.status_code == 400
        assert "echo" in refused.json()["error"]["message"]
    plain, full = server.seen
    assert not {"temperature", "top_p", "seed", "ignore_eos"} & plain.keys()
    assert {name: full.get(name) for name in given} == given
    assert full["seed"] == -3
    assert "min_p" not in full


async def test_callers_with_different_salts_share_no_block() -> None:
    server = ScriptedServer()
    prompt = [65] * (2 * NAMESPACE.layout.block_tokens)
    async with (
        engine_servers(server),
        conductor(engines=[server.entry()], engine_check_s=0.05) as running,
    ):
        await until(lambda: len(running.cluster.members.workers) == 1, "joined")
        asked: list[tuple[bytes, ...]] = []
        find = running.cluster.lookups.find

        async def watched(namespace_id: bytes, hashes: Any) -> Any:
            asked.append(tuple(hashes))
            return await find(namespace_id, hashes)

        running.cluster.lookups.find = watched  # type: ignore[method-assign]
        for salt in ("alice", "bob", None):
            body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
            assert (await running.http.post("/v1/completions", json=body)).is_success
    alice, bob, nobody = asked[:3]
    assert list(alice) == hash_chain(NAMESPACE, prompt, ("cache_salt:alice",))
    assert list(nobody) == hash_chain(NAMESPACE, prompt)
    assert not {*alice, *bob} & {*nobody}
    assert not set(alice) & set(bob)


async def test_without_a_seed_each_request_draws_its_own() -> None:
    worker = ScriptedWorker("w")
    async with conductor(worker) as running:
        for seed in (None, None, 7):
            await running.ask(seed=seed, temperature=1)
        response = await running.ask(top_k=5)
        assert response.status_code == 400
        assert "top_k: kvpool's own workers" in response.json()["error"]["message"]
    one, other, given = (g.sampling.seed for g in worker.seen if isinstance(g, m.Generate))
    assert len({one, other, given}) == 3
    assert given == 7

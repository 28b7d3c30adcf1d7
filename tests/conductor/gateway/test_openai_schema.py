"""Decoding requests: the first mistake is named, and nothing large is echoed or built."""

from __future__ import annotations

import msgspec
import pytest

from conductor.gateway.openai_schema import (
    ChatRequest,
    CompletionRequest,
    read_prompt,
    read_request,
)
from kvpool.errors import InvalidArgument


def refusal(raw: bytes, limit: int = 1_000_000) -> str:
    with pytest.raises(InvalidArgument) as caught:
        read_prompt(read_request(raw, CompletionRequest).prompt, limit)
    return str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("[1,2,1.5]", "prompt[2]: expected `int`"),
        ("[1,true]", "prompt[1]: expected `int`"),
        ('[1,"a"]', "prompt[1]: expected `int`"),
        ('["a",1]', "prompt[1]: expected `str`"),
        ("[4294967296]", "prompt[0]: expected `int`"),
        ('["a","b"]', "2 prompts"),
        ("{}", "expected text or a list"),
        ("null", "expected text or a list"),
        ('"\\ud800 alone"', "not JSON"),
    ],
)
def test_the_first_wrong_item_of_a_prompt_is_named(prompt: str, words: str) -> None:
    assert words in refusal(f'{{"prompt":{prompt}}}'.encode())


@pytest.mark.parametrize("field", ["prompt", "stop"])
def test_of_half_a_million_mistakes_only_the_first_is_made_an_error(field: str) -> None:
    raw = b'{"prompt":"a","%s":[%s1]}' % (field.encode(), b"{}," * 400_000)
    text = refusal(raw)
    assert text.startswith(f"{field}[0]: expected")
    assert len(text) < 200


def test_too_many_token_ids_are_refused_before_they_are_built() -> None:
    assert "101 items" in refusal(b'{"prompt":[%s1]}' % (b"{}," * 100), limit=100)


def test_half_a_million_messages_parts_and_options_end_at_the_first_mistake() -> None:
    parts = b'{"messages":[{"role":"user","content":[%s1]}]}' % (b"{}," * 400_000)
    options = b",".join(b'"x%d":1' % number for number in range(100_000))
    for raw in (parts, b'{"messages":[],"kvpool":{%s}}' % options):
        with pytest.raises(InvalidArgument) as caught:
            read_request(raw, ChatRequest)
        assert len(str(caught.value)) < 300


def test_quoted_values_are_shortened() -> None:
    text = refusal(b'{"prompt":"a","kvpool":{"%s":1}}' % (b"x" * 100_000))
    assert "unknown field" in text
    assert len(text) < 300


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"\xff", b"[" * 200_000, b'{"prompt":"\xed\xa0\x80"}']
)
def test_a_body_that_is_no_json_object_is_an_invalid_argument(raw: bytes) -> None:
    assert refusal(raw)


def test_valid_prompts_are_not_changed() -> None:
    assert read_prompt(msgspec.Raw(b'"text"'), 1) == "text"
    assert read_prompt(msgspec.Raw(b'[ "text" ]'), 1) == "text"
    assert read_prompt(msgspec.Raw(b"[ 1, 2 ]"), 2) == [1, 2]
    assert read_prompt(msgspec.Raw(b"[]"), 2) == []

"""The OpenAI-compatible request and response shapes that the gateway understands. No logic of serving."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvpool.errors import InvalidArgument


class PoolOptions(BaseModel):
    """The `kvpool` field of a request: how the pool is to be used for it.

    `pool`: "on" (default); "off" recomputes everything; "local" uses the decode engine's own prefix
    cache instead (a reference to compare with), at most `local_prefix_tokens` of it when that is not 0.
    `prefill`: "remote" or "local" takes the choice from the scheduler, as does `decode_worker`.
    """

    model_config = ConfigDict(extra="forbid")

    pool: Literal["on", "off", "local"] = "on"
    prefill: Literal["auto", "remote", "local"] = "auto"
    decode_worker: Annotated[str, Field(max_length=128)] | None = None
    local_prefix_tokens: Annotated[int, Field(ge=0)] = 0
    return_token_ids: bool = False


class _Completion(BaseModel):
    """What both endpoints share. Fields that we do not know are ignored, as OpenAI's clients expect."""

    model: Annotated[str, Field(max_length=512)] = ""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    n: Literal[1] = 1
    stop: Annotated[str, Field(max_length=256)] | list[str] | None = None
    ignore_eos: bool = False
    kvpool: PoolOptions = PoolOptions()

    def stops(self) -> tuple[str, ...]:
        """Stop strings, none of them empty.

        Raises:
            InvalidArgument: more than four, or one too long.
        """
        given = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        if len(given) > 4 or any(len(text) > 256 for text in given):
            raise InvalidArgument("stop takes at most 4 texts of at most 256 characters")
        return tuple(text for text in given if text)


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    role: Annotated[str, Field(min_length=1, max_length=32)]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """Role and text, as chat templates take them."""
        text = (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )
        return {"role": self.role, "content": text}


class ChatRequest(_Completion):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


class CompletionRequest(_Completion):
    prompt: str | list[int] | list[str]


class Shape:
    """Builds the objects of one response: chat or plain, streamed or whole."""

    def __init__(self, request_id: str, model: str, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._base = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": model,
        }

    def chunk(self, text: str, finish_reason: str | None, *, is_first: bool) -> dict[str, Any]:
        """One event of a stream."""
        if self._is_chat:
            delta: dict[str, str] = {"role": "assistant"} if is_first else {}
            if text or is_first:
                delta["content"] = text
            choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish_reason}
            return {**self._base, "object": "chat.completion.chunk", "choices": [choice]}
        choice = {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}
        return {**self._base, "object": "text_completion", "choices": [choice]}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last event, without choices."""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._base, "object": kind, "choices": [], "usage": usage}

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        """The response of a request that does not stream."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._base, "object": kind, "choices": [choice], "usage": usage}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }

"""The OpenAI-compatible requests and responses of the gateway.

msgspec decodes requests and stops at the first mistake, so a body full of mistakes costs no more
than a body with one, and the error does not quote the body.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from conductor.requests.admission_queue import Priority
from kvpool.errors import InvalidArgument, brief

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Objective = Annotated[float, Meta(ge=0, le=86_400)]


class PoolOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `kvpool` field of a request: how to use the pool for it.

    Args:
        pool: "on" (default) uses the pool; "off" recomputes everything; "local" uses the decode
            engine's own prefix cache instead (a baseline).
        prefill: "remote" or "local" overrides the scheduler.
        decode_worker: overrides the scheduler's choice.
        local_prefix_tokens: limit for "local"; 0 means none.
        return_token_ids: whether the report has the token ids.
        priority: class in the admission queue, limited to the tenant's class if it has one.
        slo_ttft_s, slo_tpot_s: objectives of this request, instead of the configured ones; 0: none.
    """

    pool: Literal["on", "off", "local"] = "on"
    prefill: Literal["auto", "remote", "local"] = "auto"
    decode_worker: Annotated[str, Meta(max_length=128)] | None = None
    local_prefix_tokens: Natural = 0
    return_token_ids: bool = False
    priority: Priority | None = None
    slo_ttft_s: Objective | None = None
    slo_tpot_s: Objective | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage`: end the stream with token usage and the pool's report."""

    include_usage: bool | None = None


class _Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both endpoints. `null` is the default of each.

    `conductor.gateway.body_fields` says what becomes of all others.
    """

    model: Annotated[str, Meta(max_length=512)] | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    kvpool: PoolOptions | None = None

    @property
    def options(self) -> PoolOptions:
        """How to use the pool for this request."""
        return self.kvpool or PoolOptions()

    def sampling_fields(self) -> dict[str, Any]:
        """What the body says about sampling, for an engine server, which has defaults of its own."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
        }
        return {name: value for name, value in given.items() if value is not None}

    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings without empty ones.

        Raises:
            InvalidArgument: there are more than four, or one is too long.
        """
        given = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        if len(given) > 4 or any(len(text) > 256 for text in given):
            raise InvalidArgument("stop takes at most 4 strings of at most 256 characters")
        return tuple(text for text in given if text)

    def wants_usage(self) -> bool:
        """Whether the stream ends with usage and report."""
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(msgspec.Struct, frozen=True):
    type: Literal["text"]
    text: str


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model made earlier in the conversation."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"

    def plain(self) -> dict[str, Any]:
        """The call as chat templates expect it, with decoded arguments.

        Raises:
            InvalidArgument: the arguments are not JSON.
        """
        try:
            arguments = msgspec.json.decode(self.function.arguments, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise InvalidArgument(
                f"the arguments of a call of {brief(self.function.name)} are no JSON object: {brief(error)}"
            ) from None
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation, also as SDKs print the one that they received."""

    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: str | list[TextPart] | None = None
    name: Annotated[str, Meta(max_length=128)] | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=1024)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None

    def plain(self) -> dict[str, Any]:
        """The message as chat templates expect it. Text parts are lines, as in vLLM.

        Raises:
            InvalidArgument: it has neither content nor calls, or a call's arguments are not JSON.
        """
        if self.content is None and not self.tool_calls:
            raise InvalidArgument(
                f"messages: one of role {brief(self.role)} has neither content nor tool_calls"
            )
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        message: dict[str, Any] = {"role": self.role, "content": text}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatRequest(_Completion, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Positive | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(_Completion, frozen=True, kw_only=True):
    """`read_prompt` decodes `prompt`, which is text or a list of token ids."""

    prompt: msgspec.Raw


class PrefetchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Announces a request by exactly one of a session key, a conversation and a prompt."""

    model: Annotated[str, Meta(max_length=512)] = ""
    key: Annotated[str, Meta(max_length=512)] = ""
    messages: Annotated[list[ChatMessage], Meta(max_length=4096)] = []
    prompt: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)

    def given(self) -> list[str]:
        """The names of the fields that are set."""
        ways = {"key": self.key, "messages": self.messages, "prompt": bytes(self.prompt)}
        return [name for name, value in ways.items() if value]


TokenIds = list[Annotated[int, Meta(ge=0, lt=1 << 32)]]
R = TypeVar("R", ChatRequest, CompletionRequest, PrefetchRequest)
T = TypeVar("T")


def read_request(raw: bytes, shape: type[R]) -> R:
    """Decode a request's body.

    Raises:
        InvalidArgument: the body is not JSON, or a field is wrong; the first one is named.
    """
    return _decode(raw, shape, "", strict=False)


def read_prompt(raw: msgspec.Raw, max_tokens: int) -> str | list[int]:
    """Decode a completion's prompt: text, a list with one text, or token ids.

    Raises:
        InvalidArgument: the prompt is something else, several texts, or more than `max_tokens` ids.
            If one item of the list is wrong, the error names it.
    """
    prompt = bytes(raw)
    if prompt[:1] == b'"':
        return _decode(prompt, str, "prompt")
    if prompt[:1] != b"[":
        raise InvalidArgument("prompt: expected text or a list of token ids")
    if prompt[1:].lstrip()[:1] == b'"':
        texts = _decode(prompt, list[str], "prompt")
        if len(texts) != 1:
            raise InvalidArgument(f"{len(texts)} prompts in one request", hint="send one")
        return texts[0]
    # Count the commas first, so that a prompt that is too long is never decoded.
    count = prompt.count(b",") + 1
    if count > max_tokens:
        raise InvalidArgument(f"the prompt has {count} items", hint=f"the limit is {max_tokens}")
    return _decode(prompt, TokenIds, "prompt", expected=" (a token id)")


def _decode(
    raw: bytes, shape: type[T], where: str, *, strict: bool = True, expected: str = ""
) -> T:
    try:
        return msgspec.json.decode(raw, type=shape, strict=strict)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        path = (where + path.rstrip("`")).lstrip(".")
        text = what[:1].lower() + what[1:]
        raise InvalidArgument(f"{brief(path) or 'body'}: {brief(text)}{expected}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the body is not JSON: {brief(error)}") from None


class ResponseFormat:
    """Builds the JSON objects of one response: chat or completion, streamed or whole."""

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

    def document(self, text: str, finish_reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        """The response to a request that does not stream."""
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

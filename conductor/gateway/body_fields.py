"""The fields of a request's body that the gateway does not read itself. Pure.

Each is passed on to an engine server, has no effect, or is refused by name. None is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvpool.errors import InvalidArgument, brief

# What an engine server gets unchanged: how it samples, and how its connector names the blocks.
FORWARDED = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "frequency_penalty",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "kv_transfer_params",
        "length_penalty",
        "logit_bias",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
        "response_format",
        "stop_token_ids",
        "structured_outputs",
        "top_k",
        "vllm_xargs",
    }
)
# What a prefill on another engine needs too: the connector stores under names that depend on it.
OF_THE_PREFILL = frozenset({"cache_salt", "kv_transfer_params"})
# What changes no answer.
WITHOUT_EFFECT = frozenset(
    {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier"}
)
# Values that ask for what happens anyway. `null` does so in every field.
DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (0, -1),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}


def other_fields(raw: bytes, read: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a valid body that are not among `read`, and ask for something.

    Raises:
        InvalidArgument: one of them holds half of a surrogate pair or is nested too deeply.
    """
    found: dict[str, Any] = {}
    for name, value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
        if name in read or name in WITHOUT_EFFECT or bytes(value) == b"null":
            continue
        try:
            decoded = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"{brief(name)}: {brief(error)}") from None
        if not any(_is_same(decoded, default) for default in DEFAULTS.get(name, ())):
            found[name] = decoded
    return found


def check_fields(fields: Mapping[str, Any], *, is_engine_server: bool) -> None:
    """Refuse what cannot be honoured.

    Raises:
        InvalidArgument: the first such field, by name.
    """
    for name in fields:
        if name not in FORWARDED:
            raise InvalidArgument(
                f"{brief(name)}: this gateway does not support it", hint="leave it out"
            )
        if not is_engine_server:
            raise InvalidArgument(
                f"{name}: kvpool's own workers do not support it",
                hint="leave it out, or serve the model with an engine server",
            )


def _is_same(value: Any, default: Any) -> bool:
    """Equality, but a truth value is no number."""
    return bool(value == default) and isinstance(value, bool) == isinstance(default, bool)

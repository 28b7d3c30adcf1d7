"""A generation request with what travels to workers: its tokens, its chain and its sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conductor.requests.request import Request
from kvpool.blocks.hashing import cache_salt_key, hash_chain
from kvpool.blocks.layout import Namespace
from kvpool.errors import InvalidArgument
from kvpool.wire import messages as m


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """One request as it arrived at the gateway.

    Args:
        engine_fields: fields of the body that an engine server gets as they are.
    """

    facts: Request
    namespace: Namespace
    prompt: list[int]
    sampling: m.Sampling
    local_prefix_tokens: int = 0
    engine_fields: Mapping[str, Any] = field(default_factory=dict)
    _hashes: list[bytes] | None = field(default=None, repr=False)

    @property
    def request_id(self) -> str:
        return self.facts.request_id

    @property
    def hashes(self) -> list[bytes]:
        """The chain of the prompt, hashed at the first use: a flood that is refused stays cheap."""
        if self._hashes is None:
            salt = self.engine_fields.get("cache_salt")
            extra_keys = (cache_salt_key(salt),) if salt else ()
            self._hashes = hash_chain(self.namespace, self.prompt, extra_keys)
        return self._hashes


def check_prompt(prompt: Sequence[int], max_prompt_tokens: int, max_new: int, limit: int) -> None:
    """Check that a prompt is within the limits.

    Raises:
        InvalidArgument: the prompt is empty, over the configured limit, or over the model's
            context.
    """
    if not prompt:
        raise InvalidArgument("the prompt is empty")
    if len(prompt) > max_prompt_tokens:
        raise InvalidArgument(
            f"the prompt has {len(prompt)} tokens", hint=f"the limit is {max_prompt_tokens}"
        )
    if len(prompt) + max_new > limit:
        raise InvalidArgument(
            f"prompt and response need {len(prompt)} + {max_new} tokens",
            hint=f"the model's context is {limit}; shorten the prompt or lower max_tokens",
        )

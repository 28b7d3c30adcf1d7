"""Logged requests as vLLM, OpenAI clients and gateways write them: prompts as token ids or as text.

Blocks are named with `kvpool.blocks.hashing`, as a pool would name them; a tail that fills no block has no name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.blocks.hashing import hash_chain
from kvpool.blocks.layout import Layout, Namespace
from kvpool.errors import InvalidArgument, brief

Tokenize = Callable[[str], Sequence[int]]
TOKEN_KEYS = ("prompt_token_ids", "token_ids", "input_ids", "tokens")
TEXT_KEYS = ("messages", "prompt", "input", "text")
TIME_KEYS = ("timestamp", "arrival_time", "created", "created_at", "time", "ts")
OUTPUT_KEYS = ("output_length", "output_tokens", "completion_tokens", "num_output_tokens")
OUTPUT_TEXT_KEYS = ("output", "completion", "generated_text")
IDENTITY_KEYS = ("lora", "lora_name", "cache_salt")
_BYTES_A_TOKEN = 4  # of text without a tokenizer
_EPOCH_MS = 1e11  # a number above is no count of seconds since 1970 that a log holds


class RequestLog:
    """Reads one logged request after another; keeps only each model's namespace.

    Args:
        block_tokens: tokens of a block.
        time_unit_s: seconds that a time of 1 stands for; None: seconds, or milliseconds where the number can
            only be milliseconds since 1970. Texts are ISO 8601.
        tokenize: makes token ids of a text; None: each four bytes of UTF-8 count as a token.
    """

    def __init__(
        self, block_tokens: int, time_unit_s: float | None = None, tokenize: Tokenize | None = None
    ) -> None:
        self._layout = Layout("float16", 1, 1, 1, block_tokens)
        self._time_unit_s = time_unit_s
        self._tokenize = tokenize
        self._spaces: dict[str, Namespace] = {}

    def read(self, row: Mapping[str, Any]) -> tuple[float, int, int, list[int]]:
        """Time in seconds, input and output tokens, and block ids of a request.

        `body` or `request` within the row, as OpenAI's batch files have them, are read as if they stood
        in it. The model's name, a LoRA and a cache salt tell equal prompts apart.

        Raises:
            InvalidArgument: it has no prompt, or a field makes no sense.
        """
        for inner in ("body", "request"):
            if isinstance(row.get(inner), Mapping):
                row = {**row, **row[inner]}
        tokens, count = self._prompt(row)
        model = str(row.get("model") or "")
        space = self._spaces.get(model)
        if space is None:
            if len(model) > 512:
                raise InvalidArgument(f"a model's name of {len(model)} characters")
            space = self._spaces[model] = Namespace(model or "?", "trace", self._layout)
        extra = [f"{key}:{brief(row[key])}" for key in IDENTITY_KEYS if row.get(key)]
        ids = [
            int.from_bytes(h[:8], "little", signed=True) for h in hash_chain(space, tokens, extra)
        ]
        return self._time_s(row), count, self._output_tokens(row), ids

    def _prompt(self, row: Mapping[str, Any]) -> tuple[Sequence[int] | npt.NDArray[Any], int]:
        """Token ids to hash, and how many tokens there are."""
        for key in TOKEN_KEYS:
            if isinstance(row.get(key), list):
                return row[key], len(row[key])
        for key in TEXT_KEYS:
            value = row.get(key)
            if isinstance(value, list) and value and all(type(item) is int for item in value):
                return value, len(value)
            if isinstance(value, (str, list)):
                return self._tokens_of(value if isinstance(value, str) else _text_of(value))
        raise InvalidArgument(
            "no prompt",
            hint=f"one of hash_ids, {', '.join((*TOKEN_KEYS, *TEXT_KEYS))} is needed",
        )

    def _tokens_of(self, text: str) -> tuple[Sequence[int] | npt.NDArray[Any], int]:
        if self._tokenize is not None:
            tokens = self._tokenize(text)
            return tokens, len(tokens)
        data = text.encode("utf-8", "surrogatepass")
        whole = len(data) - len(data) % _BYTES_A_TOKEN
        count = -(-len(data) // _BYTES_A_TOKEN)
        return np.frombuffer(data[:whole], dtype="<u4"), count

    def _time_s(self, row: Mapping[str, Any]) -> float:
        value = next((row[key] for key in TIME_KEYS if row.get(key) is not None), 0.0)
        if isinstance(value, str):
            try:
                moment = datetime.fromisoformat(value)
            except ValueError as error:
                raise InvalidArgument(f"a time of {brief(value, 40)!r}") from error
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e18:
            raise InvalidArgument(f"a time of {brief(value, 40)}")
        if math.isnan(value):
            raise InvalidArgument("a time that is no number")
        unit_s = self._time_unit_s or (1e-3 if value > _EPOCH_MS else 1.0)
        return float(value) * unit_s

    def _output_tokens(self, row: Mapping[str, Any]) -> int:
        usage = row.get("usage")
        if isinstance(usage, Mapping):
            row = {**usage, **row}
        for key in OUTPUT_KEYS:
            count = row.get(key)
            if isinstance(count, int) and not isinstance(count, bool):
                if count < 0:
                    raise InvalidArgument(f"{key} {count}")
                return count
        for key in OUTPUT_TEXT_KEYS:
            if isinstance(row.get(key), str):
                return self._tokens_of(row[key])[1]
        return 0


def _text_of(messages: list[Any]) -> str:
    """A conversation as one text; the same messages before give the same beginning."""
    lines = []
    for message in messages:
        if isinstance(message, str):
            lines.append(message)
        elif isinstance(message, Mapping):
            content = message.get("content")
            text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
            lines.append(f"<|{message.get('role', '')}|>\n{text}\n")
        else:
            raise InvalidArgument(f"a message of {brief(message, 40)}")
    return "".join(lines)

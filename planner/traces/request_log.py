"""Reads logged requests as vLLM, OpenAI clients and gateways write them: prompts as token ids or as text.

Blocks are named with `kvpool.blocks.hashing`, as in a pool. A partly filled tail has no name.
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
_EPOCH_MS = 1e11  # larger numbers cannot be seconds since 1970


class RequestLog:
    """Reads one logged request after another. It keeps only each model's namespace.

    Args:
        block_tokens: tokens per block.
        time_unit_s: the unit of times in seconds; None: seconds, or milliseconds if the number can
            only be milliseconds since 1970. Texts are ISO 8601.
        tokenize: makes token ids of a text; None: every four bytes of UTF-8 count as a token.
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

        Fields within `body` or `request`, as in OpenAI's batch files, are read like fields of the
        row. The model's name, a LoRA and a cache salt distinguish equal prompts.

        Raises:
            InvalidArgument: there is no prompt, or a field is invalid.
        """
        for inner in ("body", "request"):
            if isinstance(row.get(inner), Mapping):
                row = {**row, **row[inner]}
        tokens, count = self._prompt(row)
        model = str(row.get("model") or "")
        space = self._spaces.get(model)
        if space is None:
            if len(model) > 512:
                raise InvalidArgument(f"the model's name has {len(model)} characters")
            space = self._spaces[model] = Namespace(model or "?", "trace", self._layout)
        extra = [f"{key}:{brief(row[key])}" for key in IDENTITY_KEYS if row.get(key)]
        ids = [
            int.from_bytes(h[:8], "little", signed=True) for h in hash_chain(space, tokens, extra)
        ]
        return self._time_s(row), count, self._output_tokens(row), ids

    def _prompt(self, row: Mapping[str, Any]) -> tuple[Sequence[int] | npt.NDArray[Any], int]:
        """The token ids to hash, and the number of tokens."""
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
            hint=f"give one of hash_ids, {', '.join((*TOKEN_KEYS, *TEXT_KEYS))}",
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
                raise InvalidArgument(f"{brief(value, 40)!r} is not a time") from error
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e18:
            raise InvalidArgument(f"{brief(value, 40)} is not a time")
        if math.isnan(value):
            raise InvalidArgument("the time is not a number")
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
                    raise InvalidArgument(f"{key} {count} is negative")
                return count
        for key in OUTPUT_TEXT_KEYS:
            if isinstance(row.get(key), str):
                return self._tokens_of(row[key])[1]
        return 0


def _text_of(messages: list[Any]) -> str:
    """A conversation as one text. Equal first messages give an equal beginning."""
    lines = []
    for message in messages:
        if isinstance(message, str):
            lines.append(message)
        elif isinstance(message, Mapping):
            content = message.get("content")
            text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
            lines.append(f"<|{message.get('role', '')}|>\n{text}\n")
        else:
            raise InvalidArgument(f"{brief(message, 40)} is not a message")
    return "".join(lines)

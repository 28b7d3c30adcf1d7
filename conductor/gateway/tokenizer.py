"""Text to token ids and back with the model's own tokenizer and chat template.

Block hashes are computed from token ids, so these must be exactly the engine's.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError, InvalidArgument, ModelNotFound, brief

_REPLACEMENT = "\ufffd"
_FIRST_WORDS = ("a", "Z")  # of two conversations that share only the system prompt
# A character never takes more tokens. A longer incomplete one is invalid, and shown as it is.
MAX_HELD_TOKENS = 8


class Tokenizer:
    """The tokenizer of one model directory.

    Raises:
        ModelNotFound: the directory holds no tokenizer.
        ConfigError: the package transformers is not installed.
    """

    def __init__(self, model_dir: Path) -> None:
        if not (model_dir / "tokenizer.json").is_file():
            raise ModelNotFound(
                f"{model_dir} has no tokenizer.json", hint="set conductor.model_path to a model"
            )
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                "tokenizing needs the package transformers, which is not installed",
                hint="pip install 'kvpool[demo]'",
            ) from error
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        self._reserved = inspect.signature(self._tokenizer.apply_chat_template).parameters.keys()

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt.

        Raises:
            InvalidArgument: the text holds half of a surrogate pair.
        """
        _check_text(text)
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def encode_more(self, text: str) -> list[int]:
        """Token ids of text that follows other text, without special tokens before it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template, up to the response.

        Args:
            options: variables of the template, such as `enable_thinking`.

        Raises:
            InvalidArgument: the model has no chat template, it refuses these messages, or an option
                is no variable: nobody may replace the template, which is a program.
        """
        variables = dict(options or {})
        for name in variables.keys() & self._reserved:
            raise InvalidArgument(
                f"chat_template_kwargs: {name} is no variable of the template", hint="leave it out"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **variables
            )
        except Exception as error:  # a template is a program of the model and may raise anything
            raise InvalidArgument(
                f"the chat template refused the messages: {brief(error)}"
            ) from error
        _check_text(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode_system(self, text: str) -> list[int]:
        """The token ids that every conversation with this system prompt starts with.

        Raises:
            InvalidArgument: the model has no chat template, or it refuses a system prompt.
        """
        system = {"role": "system", "content": text}
        chats = [
            self.encode_chat([system, {"role": "user", "content": word}]) for word in _FIRST_WORDS
        ]
        # A tokenizer may merge the prompt's end with the text after it, so compare token ids, not
        # text.
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*chats, strict=False))
        return [token for token, _ in same]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the text is not valid Unicode: {brief(error)}") from None


class TextStream:
    """Turns a growing list of token ids into pieces of text that never split a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # number of ids whose text was returned
        self._base = 0  # number of ids before the window that each push decodes again

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids and return the text that became certain."""
        self._ids += token_ids
        before = self._tokenizer.decode(self._ids[self._base : self._shown])
        after = self._tokenizer.decode(self._ids[self._base :])
        held = len(self._ids) - self._shown
        if after.endswith(_REPLACEMENT) and held < MAX_HELD_TOKENS:
            return ""
        self._base, self._shown = self._shown, len(self._ids)
        return after[len(before) :]

    def skip(self, token_ids: Sequence[int]) -> None:
        """Add ids whose text was returned elsewhere; they are context of the following ids."""
        self._base = len(self._ids)
        self._ids += token_ids
        self._shown = len(self._ids)

    def finish(self) -> str:
        """Return the text that was held back."""
        before = self._tokenizer.decode(self._ids[self._base : self._shown])
        self._shown = len(self._ids)
        return self._tokenizer.decode(self._ids[self._base :])[len(before) :]

"""Text to token ids and back, exactly as the model does it: its own tokenizer, its own chat template.

Equal ids are what equal hashes rest on, so nothing here is approximated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError, InvalidArgument, ModelNotFound, brief

_REPLACEMENT = "\ufffd"
_FIRST_WORDS = ("a", "Z")  # of two conversations that have nothing but the system prompt in common
MAX_HELD_TOKENS = 8  # a character never takes more; what is still broken then is shown as it is


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
                "tokenizing needs the package transformers", hint="pip install 'kvpool[demo]'"
            ) from error
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt.

        Raises:
            InvalidArgument: it holds half of a surrogate pair, which is no text.
        """
        _check_text(text)
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def encode_more(self, text: str) -> list[int]:
        """Token ids of text that follows other text: nothing special is put before it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation through the model's chat template, ready for the answer.

        Raises:
            InvalidArgument: the model has no chat template, or it refuses these messages.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except (
            Exception
        ) as error:  # templates are programs of the model's; they raise what they like
            raise InvalidArgument(
                f"the chat template refused the messages: {brief(error)}"
            ) from error
        _check_text(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode_system(self, text: str) -> list[int]:
        """Token ids with which every conversation under this system prompt begins.

        Raises: as `encode_chat`.
        """
        system = {"role": "system", "content": text}
        chats = [
            self.encode_chat([system, {"role": "user", "content": word}]) for word in _FIRST_WORDS
        ]
        # A tokenizer may join what follows to the prompt's end, so that no place in the text is sure.
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*chats, strict=False))
        return [token for token, _ in same]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the text is not Unicode: {brief(error)}") from None


class TextStream:
    """Turns a growing list of token ids into pieces of text that never split a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # ids whose text was given out
        self._base = 0  # ids before the window that is decoded again and again

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these ids."""
        self._ids += token_ids
        before = self._tokenizer.decode(self._ids[self._base : self._shown])
        after = self._tokenizer.decode(self._ids[self._base :])
        held = len(self._ids) - self._shown
        if after.endswith(_REPLACEMENT) and held < MAX_HELD_TOKENS:
            return ""
        self._base, self._shown = self._shown, len(self._ids)
        return after[len(before) :]

    def skip(self, token_ids: Sequence[int]) -> None:
        """Ids whose text was given out by others; it counts as context of what follows."""
        self._base = len(self._ids)
        self._ids += token_ids
        self._shown = len(self._ids)

    def finish(self) -> str:
        """What was held back."""
        before = self._tokenizer.decode(self._ids[self._base : self._shown])
        self._shown = len(self._ids)
        return self._tokenizer.decode(self._ids[self._base :])[len(before) :]

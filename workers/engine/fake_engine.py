"""An engine without a model: it sleeps for the time that a cost model gives, and computes nothing.

It serves to try out scheduling with many workers on a small machine. The KV that it "computes" for
a block is a pattern derived from all tokens up to the block's end. It compares the blocks that it
loads with that pattern, so it detects a wrong byte from the pool, which a real model would not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.blocks.layout import Layout
from kvpool.config.settings import FakeEngineConfig
from kvpool.errors import EngineFailed, InvalidArgument, WrongByteCount
from kvpool.wire.messages import Sampling
from workers.engine.contract import Bytes, Engine, LayerChunk, OnLayer, SequenceState

VOCABULARY = 1 << 17
PATTERN_BYTES = 8


@dataclass(slots=True, eq=False)
class _Sequence(SequenceState):
    owner: object = None
    patterns: list[bytes] = field(default_factory=list)  # one for each whole block of the prompt


class FakeEngine(Engine):
    """An engine that sleeps.

    A prefill takes `base + token * new + attention * new * (reused + new / 2)` seconds. One token
    takes `(base + context * tokens of KV + sequence * n) / n` seconds with n open sequences, as if
    all of them were decoded in one batch.

    Args:
        config: the cost model and the shape of the KV.
        sleep: replaced in tests.
    """

    def __init__(
        self,
        config: FakeEngineConfig,
        *,
        model_name: str = "",
        block_tokens: int = 64,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config = config
        self._model_name = model_name or "fake"
        self._layout = Layout(
            dtype="uint8",
            layers=config.layers,
            kv_heads=1,
            head_dim=config.bytes_per_token // (2 * config.layers),
            block_tokens=block_tokens,
        )
        self._sleep = sleep
        self._decoding: set[int] = set()
        self._lock = threading.Lock()

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def revision(self) -> str:
        """Equal for all fakes: their patterns depend on tokens alone."""
        return "fake-1"

    @property
    def max_model_tokens(self) -> int:
        """So large that it never matters."""
        return 1 << 24

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """None: a text ends by its length."""
        return frozenset()

    def start(self, token_ids: npt.NDArray[np.integer[Any]], max_new_tokens: int) -> SequenceState:
        prompt = np.array(token_ids, np.int64)
        if not len(prompt) or prompt.min() < 0 or prompt.max() >= VOCABULARY:
            raise InvalidArgument(f"a prompt needs token ids in [0, {VOCABULARY})")
        if max_new_tokens < 0:
            raise InvalidArgument(f"max_new_tokens is {max_new_tokens}", hint="0 or more")
        patterns = _patterns(prompt, self._layout.block_tokens)
        return _Sequence(prompt, max_new_tokens, owner=self, patterns=patterns)

    def load_prefix(self, sequence: SequenceState, blocks: Bytes) -> None:
        """Load the first blocks of the prompt, and compare them with their patterns.

        Raises:
            EngineFailed: the blocks are not those of this prompt.
            WrongByteCount, InvalidArgument: as in `Engine`.
        """
        own = self._own(sequence)
        if own.kv_tokens:
            raise InvalidArgument("a prefix must be loaded before anything is computed")
        if blocks.dtype != np.uint8 or blocks.ndim != 2 or len(blocks) > len(own.patterns):
            raise InvalidArgument(f"blocks are {blocks.dtype} of shape {blocks.shape}")
        if blocks.shape[1] != self._layout.part_bytes:
            raise WrongByteCount(f"a block part has {blocks.shape[1]} bytes")
        expected = self._bytes(own.patterns[: len(blocks)], self._layout.part_bytes)
        if not np.array_equal(blocks, expected):
            raise EngineFailed(
                "the loaded KV is not that of this prompt", hint="the pool gave a wrong block"
            )
        own.loaded_blocks = len(blocks)
        own.loaded_tokens = own.kv_tokens = min(
            len(blocks) * self._layout.block_tokens, len(own.prompt) - 1
        )

    def prefill(
        self, sequence: SequenceState, on_layer: OnLayer | None = None, chunk_tokens: int = 0
    ) -> None:
        own = self._own(sequence)
        if chunk_tokens < 0 or own.is_prefilled:
            raise InvalidArgument("the prompt is already computed, or chunk_tokens is negative")
        while not own.is_prefilled:
            step = min(chunk_tokens or len(own.prompt), len(own.prompt) - own.kv_tokens)
            self._forward(own, step, on_layer)

    def _forward(self, own: _Sequence, step: int, on_layer: OnLayer | None) -> None:
        started = time.monotonic()
        tokens = self._layout.block_tokens
        first = max(own.loaded_blocks, own.kv_tokens // tokens)
        end = (own.kv_tokens + step) // tokens
        config, layers = self._config, self._layout.layers
        seconds = (
            config.prefill_base_s
            + config.prefill_token_s * step
            + config.prefill_attention_s * step * (own.kv_tokens + step / 2)
        )
        for layer in range(layers):
            self._sleep(seconds / layers)
            if on_layer is not None and end > first:
                packing = time.monotonic()
                blocks = self._bytes(own.patterns[first:end], self._layout.layer_bytes)
                _add(own, "pack", packing)
                on_layer(LayerChunk(layer, first, blocks))
        own.kv_tokens += step
        own.computed_tokens += step
        _add(own, "prefill", started)

    def next_token(self, sequence: SequenceState, sampling: Sampling) -> int:
        """A token that depends on the text so far and on the seed."""
        own = self._own(sequence)
        if not own.is_prefilled:
            raise InvalidArgument("the prompt is not computed yet")
        text = own.prompt.tobytes() + np.array(own.generated, np.int64).tobytes()
        seed = sampling.seed if sampling.temperature else 0
        return xxhash.xxh3_64_intdigest(text, seed=seed) % VOCABULARY

    def decode(self, sequence: SequenceState, token: int) -> None:
        own = self._own(sequence)
        if not own.is_prefilled or not 0 <= token < VOCABULARY:
            raise InvalidArgument("the prompt is not computed yet, or the token is unknown")
        if len(own.generated) >= own.max_new_tokens:
            raise InvalidArgument(
                f"the sequence was started with room for {own.max_new_tokens} new tokens"
            )
        started = time.monotonic()
        with self._lock:
            self._decoding.add(id(own))
            batch = len(self._decoding)
        config = self._config
        step_s = config.tpot_base_s + config.tpot_context_s * own.kv_tokens * batch
        self._sleep((step_s + config.tpot_sequence_s * batch) / batch)
        own.generated.append(token)
        own.kv_tokens += 1
        _add(own, "decode", started)

    def export_blocks(self, sequence: SequenceState, first_block: int, count: int) -> Bytes:
        own = self._own(sequence)
        whole = min(own.kv_tokens // self._layout.block_tokens, len(own.patterns))
        if first_block < 0 or count < 0 or first_block + count > whole:
            raise InvalidArgument(
                f"blocks [{first_block}, {first_block + count}) were asked for, {whole} are whole"
            )
        return self._bytes(own.patterns[first_block : first_block + count], self._layout.part_bytes)

    def close(self, sequence: SequenceState) -> None:
        if not isinstance(sequence, _Sequence) or sequence.owner is not self:
            raise InvalidArgument("the sequence belongs to another engine")
        with self._lock:
            self._decoding.discard(id(sequence))
        sequence.is_closed = True

    def _own(self, sequence: SequenceState) -> _Sequence:
        if not isinstance(sequence, _Sequence) or sequence.owner is not self:
            raise InvalidArgument("the sequence belongs to another engine")
        if sequence.is_closed:
            raise InvalidArgument("the sequence is closed")
        return sequence

    @staticmethod
    def _bytes(patterns: Sequence[bytes], length: int) -> Bytes:
        """`[n, length]`: each row repeats its pattern, so all layers are equal."""
        rows = np.frombuffer(b"".join(patterns), np.uint8).reshape(len(patterns), PATTERN_BYTES)
        return np.tile(rows, -(-length // PATTERN_BYTES))[:, :length]


def _patterns(prompt: npt.NDArray[np.int64], block_tokens: int) -> list[bytes]:
    """For each whole block, a digest of all tokens up to its end."""
    digest = xxhash.xxh3_64()
    patterns = []
    for end in range(block_tokens, len(prompt) + 1, block_tokens):
        digest.update(prompt[end - block_tokens : end].tobytes())
        patterns.append(digest.digest())
    return patterns


def _add(own: _Sequence, phase: str, started: float) -> None:
    own.seconds[phase] = own.seconds.get(phase, 0.0) + time.monotonic() - started

"""The interface of a model engine, which computes KV, exports it and loads it as pool blocks.

An engine runs one model on one device for one caller at a time: a single thread makes all calls to
it. It does not see nodes, leases or requests. Block bytes are in pool order
(`kvpool.blocks.layout.Layout`) and in host memory, however the engine keeps KV inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpool.blocks.layout import HashAlgorithm, Layout, Namespace
from kvpool.wire.messages import Sampling

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int64]


@dataclass(slots=True, frozen=True, eq=False)
class LayerChunk:
    """One layer of a run of blocks, final: later layers and later tokens will not change it.

    `blocks` has shape `[n, layer_bytes]`; row `i` belongs to block `first_block + i` of the prompt
    and goes to byte `layer * layer_bytes` of that block's part. The receiver may keep the array:
    the engine never writes to it again.
    """

    layer: int
    first_block: int
    blocks: Bytes


OnLayer = Callable[[LayerChunk], None]


@dataclass(slots=True, eq=False)
class SequenceState:
    """One prompt on its way through an engine. Engines extend it; callers read it.

    `kv_tokens` counts the tokens whose KV is in the engine. `load_prefix` loaded `loaded_tokens` of
    them. `computed_tokens` counts the tokens of the prompt that this engine computed. `seconds`
    adds up wall time by phase: "load", "prefill", "decode", and "pack", which is a part of
    "prefill".
    """

    prompt: Tokens
    max_new_tokens: int
    kv_tokens: int = 0
    loaded_blocks: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0
    generated: list[int] = field(default_factory=list)  # tokens given to `decode`, in order
    seconds: dict[str, float] = field(default_factory=dict)
    is_closed: bool = False

    @property
    def is_prefilled(self) -> bool:
        """The whole prompt has KV, so that a next token can be drawn."""
        return self.kv_tokens >= len(self.prompt)


class Engine(Protocol):
    """A causal language model with KV that can be loaded and exported block by block.

    Every method may raise `EngineFailed` when the model itself fails, and `InvalidArgument` for a
    sequence that is closed or belongs to another engine. A method that raised has changed nothing:
    the caller may repeat it, or do something else with the same sequence.
    """

    @property
    def layout(self) -> Layout:
        """Shape and order of the block bytes that this engine loads and exports."""
        ...

    @property
    def model_name(self) -> str:
        """The name that users give in requests."""
        ...

    @property
    def revision(self) -> str:
        """Content hash of the weights: equal on every host that serves the same model."""
        ...

    @property
    def max_model_tokens(self) -> int:
        """The longest context, prompt and new tokens together."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        ...

    def namespace(
        self, tenant: str = "", salt: str = "", hash_algorithm: HashAlgorithm = "xxh3-128"
    ) -> Namespace:
        """The identity of this engine's blocks for a tenant."""
        return Namespace(self.model_name, self.revision, self.layout, tenant, salt, hash_algorithm)

    def start(self, token_ids: npt.NDArray[np.integer[Any]], max_new_tokens: int) -> SequenceState:
        """Allocate KV memory for a prompt and for the tokens that will follow it.

        Raises:
            InvalidArgument: the prompt is empty, holds an unknown token, or does not fit into
                `max_model_tokens` together with `max_new_tokens`.
        """
        ...

    def load_prefix(self, sequence: SequenceState, blocks: Bytes) -> None:
        """Load the KV of the prompt's first `n` blocks instead of computing it.

        Args:
            blocks: shape `[n, part_bytes]`, in pool order; read during the call only. They may
                cover the whole prompt: its last token is still computed, because the first new
                token is drawn from it.

        Raises:
            WrongByteCount: the rows do not have `part_bytes` bytes.
            InvalidArgument: the sequence has KV already, or the prompt has fewer whole blocks.
        """
        ...

    def prefill(
        self, sequence: SequenceState, on_layer: OnLayer | None = None, chunk_tokens: int = 0
    ) -> None:
        """Compute the KV of the rest of the prompt.

        Args:
            on_layer: called within the forward pass, once per layer and chunk, as soon as this
                layer's K and V of the blocks that the chunk completes are final and before any
                later layer is computed; not called if the chunk completes no block. Each block
                beyond the loaded prefix comes exactly once per layer, unless a chunk failed and is
                repeated. An exception from it ends the chunk and reaches the caller unchanged.
            chunk_tokens: tokens per forward pass; 0: all that remain.

        Raises:
            InvalidArgument: the prompt is computed already, or `chunk_tokens` is negative.
        """
        ...

    def next_token(self, sequence: SequenceState, sampling: Sampling) -> int:
        """Draw the token after the last one computed. Changes nothing; equal calls return equal tokens.

        Greedy at temperature 0; else nucleus sampling, seeded by `sampling.seed` and the position.

        Raises:
            InvalidArgument: the prompt is not computed yet, or temperature or top_p is out of
                range.
        """
        ...

    def decode(self, sequence: SequenceState, token: int) -> None:
        """Append `token` and compute its KV, so that the one after it can be drawn.

        Raises:
            InvalidArgument: unknown token, prompt not computed yet, or no room left.
        """
        ...

    def export_blocks(self, sequence: SequenceState, first_block: int, count: int) -> Bytes:
        """Copy whole blocks out, shape `[count, part_bytes]`, in pool order.

        Raises:
            InvalidArgument: some of the blocks are not whole yet.
        """
        ...

    def close(self, sequence: SequenceState) -> None:
        """Free the sequence's KV. Closing twice is allowed."""
        ...

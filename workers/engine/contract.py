"""What a worker asks of a model engine: compute KV, hand it out and take it in as pool blocks.

An engine runs one model on one device for one caller at a time: all of its methods, and those of its
sequences, belong to a single thread. It knows nothing of nodes, leases or requests. Block bytes cross
this seam in pool order (`kvpool.blocks.layout.Layout`), in host memory, whatever the engine does inside.
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

    `blocks` has shape `[n, layer_bytes]`; row `i` belongs to block `first_block + i` of the prompt and
    goes to byte `layer * layer_bytes` of that block's part. The receiver may keep the array: the
    engine never writes to it again.
    """

    layer: int
    first_block: int
    blocks: Bytes


OnLayer = Callable[[LayerChunk], None]


@dataclass(slots=True, eq=False)
class SequenceState:
    """One prompt on its way through an engine. Engines extend it; callers read it.

    `kv_tokens` counts tokens whose KV stands in the engine, `loaded_tokens` those of them that came by
    `load_prefix`, `computed_tokens` those of the prompt that this engine computed. `seconds` adds up
    wall time by phase: "load", "prefill", "decode", and "pack", which is a part of "prefill".
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
    sequence that is closed or belongs to another engine. A method that raised has changed nothing,
    so that the caller may try again or go another way with the same sequence.
    """

    @property
    def layout(self) -> Layout:
        """Shape and order of the block bytes that this engine takes and gives."""
        ...

    @property
    def model_name(self) -> str:
        """What users call the model."""
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
        ...

    def start(self, token_ids: npt.NDArray[np.integer[Any]], max_new_tokens: int) -> SequenceState:
        """Make room for the KV of a prompt and of the tokens that will follow it.

        Raises:
            InvalidArgument: the prompt is empty, holds an unknown token, or does not fit into
                `max_model_tokens` together with `max_new_tokens`.
        """
        ...

    def load_prefix(self, sequence: SequenceState, blocks: Bytes) -> None:
        """Put the KV of the prompt's first `n` blocks in place, instead of computing it.

        Args:
            blocks: shape `[n, part_bytes]`, in pool order; read during the call only. Blocks up to
                the very end of the prompt are welcome: its last token is computed all the same,
                because the first new token is drawn from it.

        Raises:
            WrongByteCount: the rows have not `part_bytes` bytes.
            InvalidArgument: the sequence has KV already, or the prompt has fewer whole blocks.
        """
        ...

    def prefill(
        self, sequence: SequenceState, on_layer: OnLayer | None = None, chunk_tokens: int = 0
    ) -> None:
        """Compute the KV of the rest of the prompt.

        Args:
            on_layer: called within the forward pass, once per layer and chunk, as soon as this
                layer's K and V of the blocks that the chunk completes are final and before any later
                layer is computed; not called when the chunk completes none. Each block beyond the
                loaded prefix comes exactly once per layer, unless a chunk failed and is done again.
                What it raises ends the chunk and reaches the caller unchanged.
            chunk_tokens: tokens per forward pass; 0 takes the whole rest at once.

        Raises:
            InvalidArgument: the prompt is computed already, or `chunk_tokens` is negative.
        """
        ...

    def next_token(self, sequence: SequenceState, sampling: Sampling) -> int:
        """Draw the token after the last one computed. Changes nothing; equal calls, equal answers.

        Greedy at temperature 0; else nucleus sampling, seeded by `sampling.seed` and the position.

        Raises:
            InvalidArgument: the prompt is not computed yet, or temperature or top_p is out of range.
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

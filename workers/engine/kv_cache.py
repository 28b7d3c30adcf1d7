"""The KV of one sequence, in the form of transformers' attention and of the pool.

K and V of all layers are in one array `[layer, kv, head, token, dim]` as large as the whole
sequence, so that a step writes in place and copies nothing (transformers' DynamicCache concatenates
on every step). The order of the dimensions is the pool's, except that the pool puts the block
between head and token: loading and exporting blocks is one strided copy of runs of `block_tokens *
head_dim` elements. Batch size 1.

Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvpool.blocks.layout import DTYPE_BYTES, Layout

Bytes = npt.NDArray[np.uint8]
# layer, first block, one past the last block
BlocksFinal = Callable[[int, int, int], None]

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class BlockedCache(Cache):
    """A transformers Cache of fixed capacity whose content can be loaded and packed as pool blocks.

    Args:
        layout: the pool's blocks, in the default order and with one part (`tp_size` 1).
        capacity_tokens: rounded up to whole blocks.
    """

    def __init__(self, layout: Layout, capacity_tokens: int, device: torch.device) -> None:
        self.layout = layout
        self.capacity_blocks = max(1, -(-capacity_tokens // layout.block_tokens))
        self.on_blocks_final: BlocksFinal | None = None
        self.is_notifying = False
        tokens = self.capacity_blocks * layout.block_tokens
        shape = (layout.layers, layout.kv_per_token, layout.kv_heads, tokens, layout.head_dim)
        dtype = TORCH_DTYPES[layout.dtype]
        if device.type == "cpu":
            # numpy asks for huge pages, torch does not: 46 MB are touched in 5 ms instead of 20
            size = int(np.prod(shape)) * DTYPE_BYTES[layout.dtype]
            self._storage = torch.from_numpy(np.empty(size, np.uint8)).view(dtype).view(shape)
        else:
            self._storage = torch.empty(shape, dtype=dtype, device=device)
        self._bytes = self._storage.view(torch.uint8).view(
            layout.layers, layout.kv_per_token, layout.kv_heads, self.capacity_blocks, -1
        )
        self._filled = [_Layer(self._storage[i]) for i in range(layout.layers)]
        super().__init__(layers=list(self._filled))

    @property
    def length(self) -> int:
        """Tokens that have KV in every layer."""
        return min(layer.length for layer in self._filled)

    @property
    def capacity_tokens(self) -> int:
        """The most tokens that it holds."""
        return self.capacity_blocks * self.layout.block_tokens

    def set_length(self, tokens: int) -> None:
        """Declare the first `tokens` tokens of all layers valid, and everything after them void."""
        for layer in self._filled:
            layer.length = tokens

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's new K and V in place; return views of all its K and V so far.

        Calls `on_blocks_final` when this completes blocks. `is_notifying` stays true if the call
        raises, so that the caller can tell its error from an error of the model.
        """
        layer = self._filled[layer_idx]
        first = layer.length // self.layout.block_tokens
        states = layer.update(key_states, value_states)
        end = layer.length // self.layout.block_tokens
        if self.on_blocks_final is not None and end > first:
            self.is_notifying = True
            self.on_blocks_final(layer_idx, first, end)
            self.is_notifying = False
        return states

    def load_blocks(self, blocks: Bytes) -> None:
        """Copy `blocks`, `[n, part_bytes]`, to the start of every layer. Does not change the length."""
        count = len(blocks)
        target = self._bytes[:, :, :, :count]
        # splitting the last dimension never copies, whatever the stride between rows
        source = blocks.reshape(count, *self._bytes.shape[:3], -1)
        if target.device.type == "cpu":
            # by numpy, because torch warns of arrays that are read-only, as leased ones are
            np.copyto(target.numpy(), source.transpose(1, 2, 3, 0, 4))
        else:
            writable = source if source.flags.writeable else source.copy()
            staged = torch.from_numpy(writable).to(target.device)
            target.copy_(staged.permute(1, 2, 3, 0, 4))

    def pack_layer(self, layer: int, first_block: int, end_block: int) -> Bytes:
        """One layer of a run of blocks as a new array `[n, layer_bytes]` in pool order."""
        source = self._bytes[layer, :, :, first_block:end_block].permute(2, 0, 1, 3)
        return _gather(source, end_block - first_block)

    def pack_blocks(self, first_block: int, end_block: int) -> Bytes:
        """All layers of a run of blocks as a new array `[n, part_bytes]` in pool order."""
        source = self._bytes[:, :, :, first_block:end_block].permute(3, 0, 1, 2, 4)
        return _gather(source, end_block - first_block)


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """K and V of one layer: views of the sequence's storage, and how far they are filled."""

    is_sliding = False

    def __init__(self, storage: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys = self._keys = storage[0].unsqueeze(0)
        self.values = self._values = storage[1].unsqueeze(0)
        self.is_initialized = True
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the storage exists from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.length + key_states.shape[-2]
        self._keys[:, :, self.length : end].copy_(key_states)
        self._values[:, :, self.length : end].copy_(value_states)
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return int(self._keys.shape[-2])

    def reset(self) -> None:
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        self.length -= abs(tokens_to_remove)


def _gather(source: torch.Tensor, rows: int) -> Bytes:
    out = np.empty(source.shape, np.uint8)
    torch.from_numpy(out).copy_(source)
    return out.reshape(rows, -1) if rows else out.reshape(0, int(np.prod(source.shape[1:])))

"""vLLM's paged KV, read off its registered tensors: one page of all layers as one row of bytes.

What is not recognised is refused at start-up: KV moved by a wrong idea of its layout gives wrong text, silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvpool.errors import ConfigError
from kvpool.transports.copying import Int64Array


class UnsupportedLayout(ConfigError):
    """The KV of this model, on this device, is laid out in a way that this connector does not know."""

    code = "unsupported_layout"


class PagedKV:
    """The pages of one rank."""

    def __init__(self, layers: dict[str, torch.Tensor], page_tokens: int, order: str) -> None:
        self.layer_names = list(layers)
        self._layers = list(layers.values())
        self.layer_bytes = self._layers[0].shape[1] * self._layers[0].element_size()
        self.page_bytes = self.layer_bytes * len(layers)
        self.page_tokens = page_tokens
        self.order = order

    @classmethod
    def read(cls, kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any) -> PagedKV:
        """Recognise the layout.

        Raises:
            UnsupportedLayout: more than one group of layers, another kind of attention than full, or tensors
                that are no pages of [head, token, K and V].
        """
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        groups = kv_cache_config.kv_cache_groups
        kinds = {type(group.kv_cache_spec) for group in groups}
        if len(groups) != 1 or kinds != {FullAttentionSpec}:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise UnsupportedLayout(f"{len(groups)} groups of KV pages, of kind {names}")
        spec = groups[0].kv_cache_spec
        cell = (spec.num_kv_heads, spec.block_size, spec.head_size + spec.head_size_v)
        layers = {}
        for name, cache in kv_caches.items():
            is_known = cache.shape[1:] == cell and cache.dtype == spec.dtype
            if not is_known or not cache[0].is_contiguous():
                raise UnsupportedLayout(
                    f"{name} is {cache.dtype} of shape {tuple(cache.shape)} and strides {cache.stride()},"
                    f" expected pages of {cell}"
                )
            layers[name] = cache.view(cache.shape[0], -1).view(torch.int64)
        if not layers:
            raise UnsupportedLayout("vLLM registered no KV cache")
        return cls(layers, spec.block_size, "page,layer,head,token,kv,dim")

    def gather(self, pages: Int64Array, out: torch.Tensor, layers: slice | None = None) -> None:
        """Copy pages to the rows of `out`, uint8 of shape [n, page_bytes]; of `layers` their columns alone."""
        index = torch.from_numpy(pages)
        rows = out.view(torch.int64)
        width = self.layer_bytes // 8
        for i in range(*(layers or slice(None)).indices(len(self._layers))):
            rows[:, i * width : (i + 1) * width] = self._layers[i].index_select(0, index)

    def scatter(self, pages: Int64Array, source: torch.Tensor, layers: slice | None = None) -> None:
        """The inverse of `gather`."""
        index = torch.from_numpy(pages)
        rows = source.view(torch.int64)
        width = self.layer_bytes // 8
        for i in range(*(layers or slice(None)).indices(len(self._layers))):
            self._layers[i].index_copy_(0, index, rows[:, i * width : (i + 1) * width])

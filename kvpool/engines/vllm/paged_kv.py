"""Pages of vLLM's KV cache, gathered into and scattered from plain bytes in bulk.

A page's bytes are those of all its layers in the order in which they stand in memory, without gaps. What that
order is, `page_layout` finds out; here bytes are only moved.

Which operation (32 pages of 30 layers, pieces of 98 KB, one thread, ratios to one memcpy of the same 94 MB):
gathering by `index_select` 0.94, by advanced indexing 0.06 to 0.17; scattering by numpy's assignment 0.90, by
`index_copy_` 0.10 (bytes) to 0.28 (8 bytes at a time), by `index_put_` 0.13 to 0.46; a loop of memmove 0.90, but
1,000 calls. Both that are used let go of the GIL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import numpy as np
import torch

from kvpool.engines.vllm.page_layout import Axis, Band, LayoutFacts, PageLayout, read_page_layout
from kvpool.errors import InvalidArgument, WrongByteCount, brief
from kvpool.transports.copy import Int64Array


@dataclass(slots=True, frozen=True)
class _View:
    """A band's memory as `word`s of shape [page, strided axes ..., contiguous run].

    Args:
        layer_axis: where L is in the shape; None where it was merged with its neighbours.
        column: words of a page's row before this band's.
    """

    memory: torch.Tensor
    layer_axis: int | None
    column: int


class PagedKV:
    """vLLM's registered KV caches as numbered pages of `page_bytes`.

    Attributes:
        order: names the order of a page's bytes; differs wherever that differs.
        dtype: kvpool's name of the elements' type.
        page_tokens: tokens of a page.
        page_bytes: one page, all layers, this rank.
        layer_names: of the layers that own KV, in the order of their bytes. A layer that shares another's
            cache is not among them.
        layer_bytes: one layer of a page.
        pages: how many there are.
        device: where they are.
        facts: what the scheduler must know of it.
    """

    def __init__(self, layout: PageLayout) -> None:
        self.facts: LayoutFacts = layout.facts
        self.order = layout.facts.order
        self.dtype = layout.facts.dtype
        self.page_tokens = layout.facts.page_tokens
        self.page_bytes = layout.facts.page_bytes
        self.layer_names = list(layout.layer_names)
        self.layer_bytes = self.page_bytes // len(self.layer_names)
        self.pages = layout.pages
        self.device = layout.bands[0].tensor.device
        self._bands = layout.bands
        self._word = _widest_word(layout)
        self._whole = [self._view(band, keep_layers=False) for band in layout.bands]
        self._by_layer = [self._view(band, keep_layers=True) for band in layout.bands]

    @classmethod
    def read(
        cls,
        kv_caches: Mapping[str, torch.Tensor],
        kv_cache_config: Any,
        backend: str = "",
        packing: str | None = None,
    ) -> Self:
        """See `read_page_layout`. Raises UnsupportedLayout with the reason."""
        return cls(read_page_layout(kv_caches, kv_cache_config, backend, packing))

    @property
    def has_layers_in_runs(self) -> bool:
        """Whether the bytes of a layer follow each other within a row: layer i at `i * layer_bytes`."""
        return all(view.layer_axis in (None, 1) for view in self._by_layer)

    def gather(self, pages: Int64Array, out: torch.Tensor, layers: slice | None = None) -> None:
        """Copy pages into the rows of `out`. On a device: enqueued on the current stream if `out` is there too.

        Args:
            pages: their numbers, in any order.
            out: uint8 [len(pages), page_bytes], contiguous.
            layers: only these; the other bytes of `out` stay as they are.

        Raises:
            InvalidArgument: a page that does not exist.
            WrongByteCount: `out` has another shape or type.
        """
        index = torch.from_numpy(self._check_pages(pages)).to(self.device)
        for memory, rows in self._moves(len(index), out, layers):
            if rows.device == memory.device:
                torch.index_select(memory, 0, index, out=rows)
            else:
                rows.copy_(torch.index_select(memory, 0, index))

    def scatter(self, pages: Int64Array, source: torch.Tensor, layers: slice | None = None) -> None:
        """Copy the rows of `source` to pages: the inverse of `gather`, with the same arguments and errors.

        Which row a page gets that is named twice is not defined.
        """
        ids = self._check_pages(pages)
        for memory, rows in self._moves(len(ids), source, layers):
            if memory.device.type == "cpu":
                memory.numpy()[ids] = rows.numpy()
            else:
                memory.index_copy_(0, torch.from_numpy(ids).to(self.device), rows.to(self.device))

    def runs(self, pages: Int64Array, layers: slice | None = None) -> tuple[Int64Array, Int64Array]:
        """Where the bytes of pages are: addresses and lengths of contiguous pieces, in the order of a row.

        All pieces have one length; neighbours are not merged.

        Raises:
            InvalidArgument: a page that does not exist, or `layers` has a step.
        """
        ids = self._check_pages(pages)
        word_bytes = self._word.itemsize
        per_band = []
        run_bytes = 0
        for _, memory in self._selected(layers):
            start = memory.data_ptr() + ids * (memory.stride(0) * word_bytes)
            for size, stride in zip(memory.shape[1:-1], memory.stride()[1:-1], strict=True):
                steps = np.arange(size, dtype=np.int64) * (stride * word_bytes)
                start = start[..., None] + steps
            per_band.append(start.reshape(len(ids), -1))
            run_bytes = memory.shape[-1] * word_bytes
        addresses = np.concatenate([np.empty((len(ids), 0), dtype=np.int64), *per_band], axis=1)
        return addresses.ravel(), np.full(addresses.size, run_bytes, dtype=np.int64)

    def regions(self) -> list[tuple[int, int]]:
        """Address and bytes of each piece of memory that holds pages, for registering it with a transport."""
        storages = {
            (storage := band.tensor.untyped_storage()).data_ptr(): storage.nbytes()
            for band in self._bands
        }
        return sorted(storages.items())

    def _moves(
        self, count: int, rows: torch.Tensor, layers: slice | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each band: its pages, and the same axes of `rows`."""
        if (
            rows.dtype != torch.uint8
            or rows.shape != (count, self.page_bytes)
            or not rows.is_contiguous()
        ):
            raise WrongByteCount(
                f"{rows.dtype} {list(rows.shape)} for {count} pages",
                hint=f"a contiguous uint8 tensor [{count}, {self.page_bytes}] is needed",
            )
        if rows.data_ptr() % self._word.itemsize:
            raise InvalidArgument(f"a buffer that is not aligned to {self._word.itemsize} bytes")
        words = rows.view(self._word)
        for view, memory in self._selected(layers):
            shape = view.memory.shape[1:]
            mine = words.narrow(1, view.column, prod(shape)).view(count, *shape)
            yield memory, _narrow(mine, view.layer_axis, self._range(layers))

    def _selected(self, layers: slice | None) -> Iterator[tuple[_View, torch.Tensor]]:
        """The bands that hold some of `layers`, each with the memory of these."""
        chosen = self._range(layers)
        if len(chosen) == len(self.layer_names):
            yield from ((view, view.memory) for view in self._whole)
            return
        for band, view in zip(self._bands, self._by_layer, strict=True):
            if view.layer_axis is not None:
                yield view, _narrow(view.memory, view.layer_axis, chosen)
            elif band.first_layer in chosen:
                yield view, view.memory

    def _range(self, layers: slice | None) -> range:
        chosen = range(len(self.layer_names))[layers or slice(None)]
        if chosen.step != 1:
            raise InvalidArgument(f"layers {layers}: neighbours are needed")
        return chosen

    def _view(self, band: Band, *, keep_layers: bool) -> _View:
        merged: list[Axis] = []
        for axis in reversed(_in_words(band, self._word.itemsize)):  # innermost first
            last = merged[-1] if merged else None
            is_layer = keep_layers and "L" in (axis.letter, last.letter if last else "")
            if last is not None and not is_layer and axis.stride == last.size * last.stride:
                merged[-1] = Axis(last.letter, axis.size * last.size, last.stride)
            else:
                merged.append(axis)
        merged.reverse()
        letters = [axis.letter for axis in merged]
        storage, item = band.tensor.untyped_storage(), self._word.itemsize
        memory = torch.empty(0, dtype=self._word, device=self.device).set_(
            storage,
            (band.base - storage.data_ptr()) // item,
            (self.pages, *(axis.size for axis in merged)),
            (band.page_stride // item, *(axis.stride for axis in merged)),
        )
        return _View(
            memory,
            letters.index("L") + 1 if keep_layers and "L" in letters else None,
            band.first_layer * self.layer_bytes // item,
        )

    def _check_pages(self, pages: Int64Array) -> Int64Array:
        ids = np.ascontiguousarray(pages, dtype=np.int64)
        if ids.ndim != 1 or (ids.size and (ids.min() < 0 or ids.max() >= self.pages)):
            raise InvalidArgument(
                f"pages {brief(pages)}", hint=f"a list of numbers from 0 to {self.pages - 1}"
            )
        return ids


def _in_words(band: Band, word_bytes: int) -> list[Axis]:
    """The axes within a page, strides in words, the last one's elements counted in words."""
    *outer, content = band.inner
    item = band.tensor.element_size()
    return [
        *(Axis(axis.letter, axis.size, axis.stride // word_bytes) for axis in outer),
        Axis(content.letter, content.size * item // word_bytes, 1),
    ]


def _widest_word(layout: PageLayout) -> torch.dtype:
    """8 bytes at a time where everything is so aligned, which on devices is a multiple of bytes' speed."""
    places = [layout.facts.page_bytes]
    for band in layout.bands:
        content = band.inner[-1].size * band.tensor.element_size()
        places += [band.base, band.page_stride, content, *(a.stride for a in band.inner[:-1])]
    return torch.int64 if all(place % 8 == 0 for place in places) else torch.uint8


def _narrow(tensor: torch.Tensor, axis: int | None, chosen: range) -> torch.Tensor:
    return tensor if axis is None else tensor.narrow(axis, chosen.start, len(chosen))

"""The pages of one SGLang host pool: their layout, and the address of each in memory.

The layout is read from the pool and compared with the page addresses that the pool gives; if they
disagree, the pages are stored as opaque bytes. A page is one block of kvpool.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpool.blocks.layout import DTYPE_BYTES, Layout
from kvpool.client import BlockSpans
from kvpool.engines.shared.dtypes import DTYPE_NAMES
from kvpool.errors import ConfigError, InvalidArgument, WrongByteCount
from kvpool.transports.copy import Int64Array

# Order of a page's bytes, by SGLang's name of the layout. MLA has one head and one vector, so the
# places of "head" and "kv" do not matter.
MHA_ORDERS = {
    "layer_first": "kv,layer,token,head,dim",  # runs of single layers, sorted into this order here
    "page_first": "kv,token,layer,head,dim",
    "page_first_direct": "kv,layer,token,head,dim",
    "page_head": "kv,head,token,layer,dim",
}
MLA_ORDERS = {
    "layer_first": "kv,layer,token,head,dim",
    "page_first": "kv,token,layer,head,dim",
    "page_first_direct": "kv,layer,token,head,dim",
}


@dataclass(slots=True, frozen=True)
class Sharing:
    """How ranks share a pool's pages: each page has `ranks` parts, and this process has `part`.

    If all ranks hold the same bytes (MLA), there is one part, and `is_writer` is true for one rank
    only.
    """

    ranks: int
    part: int
    is_writer: bool


class HostPages:
    """A registered host pool of SGLang.

    Args:
        pool: a pool of `sglang.srt.mem_cache.pool_host`, or one with the same interface.
        name: SGLang's name of it, e.g. "kv".
        kv_cache_dtype: the format of an 8-bit pool's bytes; "" or "auto" if unknown.

    Raises:
        ConfigError: its pages have no addresses, or the format of its bytes is unknown.
    """

    def __init__(self, pool: Any, name: str, sharing: Sharing, kv_cache_dtype: str) -> None:
        self.pool = pool
        self.name = name
        self.sharing = sharing
        # How many slots of the host pool make a page.
        self.page_size = int(getattr(pool, "logical_page_size", None) or pool.page_size)
        self.memory = _tensors(pool)
        self._bounds = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in self.memory]
        try:
            _, sizes = pool.get_page_buffer_meta(torch.arange(self.page_size))
        except (ValueError, NotImplementedError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"cannot get the addresses of pages of SGLang's pool {name!r}"
                f" ({type(pool).__name__}, layout {pool.layout}): {error}",
                hint=f"use --hicache-mem-layout {', '.join(MHA_ORDERS)}",
            ) from error
        self._run_bytes = np.array(sizes, dtype=np.int64)
        known = self._known_layout(kv_cache_dtype)
        self._is_by_layer = (
            known is not None and known.kv_per_token == 2 and pool.layout == "layer_first"
        )
        self.layout = known or self._opaque_layout(kv_cache_dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of this rank's part of a page."""
        return self.layout.part_bytes

    def spans(self, pages: int, host_indices: torch.Tensor) -> BlockSpans:
        """Where pages are in memory, by the addresses that the pool gives.

        Args:
            host_indices: the slots of all pages, `page_size` for each.

        Raises:
            WrongByteCount: the indices do not make that many pages, or the pages have another size.
            InvalidArgument: an address lies outside the pool.
        """
        if len(host_indices) != pages * self.page_size:
            raise WrongByteCount(
                f"{len(host_indices)} indices for {pages} pages of {self.page_size} slots"
                f" in {self.name!r}"
            )
        pointers, sizes = self.pool.get_page_buffer_meta(host_indices)
        runs = len(self._run_bytes)
        if len(pointers) != pages * runs or sizes != self._run_bytes.tolist() * pages:
            raise WrongByteCount(f"pages of {self.name!r} have other sizes than when registered")
        addresses = np.array(pointers, dtype=np.int64).reshape(pages, runs)
        self._check_bounds(addresses)
        if self._is_by_layer:
            # The pool gives K and V layer by layer; stored pages have all K first, as in
            # page_first_direct.
            addresses = np.concatenate((addresses[:, ::2], addresses[:, 1::2]), axis=1)
        return BlockSpans(addresses, self._run_bytes, self.memory or self.pool)

    def _check_bounds(self, addresses: Int64Array) -> None:
        if not self._bounds:
            return  # another pool owns the memory
        is_inside = np.zeros(addresses.shape, dtype=bool)
        for low, high in self._bounds:
            is_inside |= (addresses >= low) & (addresses + self._run_bytes <= high)
        if not is_inside.all():
            raise InvalidArgument(f"an index lies outside SGLang's pool {self.name!r}")

    # ------------------------------------------------------------ layouts

    def _known_layout(self, kv_cache_dtype: str) -> Layout | None:
        """The layout of plain K and V or MLA vectors.

        None if the pool's pages are something else.
        """
        pool, ranks = self.pool, self.sharing.ranks
        if _is_a(pool, "MHATokenToKVPoolHost") and pool.layout in MHA_ORDERS:
            shape = (pool.layer_num, pool.head_num * ranks, pool.head_dim)
            order, vectors = MHA_ORDERS[pool.layout], 2
        elif _is_a(pool, "MLATokenToKVPoolHost") and pool.layout in MLA_ORDERS and ranks == 1:
            shape = (pool.layer_num, 1, pool.kv_cache_dim)
            order, vectors = MLA_ORDERS[pool.layout], 1
        else:
            return None
        dtype = self._dtype(kv_cache_dtype)
        if not dtype:
            return None
        layers, heads, dim = shape
        layout = Layout(dtype, layers, heads, dim, self.page_size, ranks, vectors, order)
        return layout if layout.part_bytes == int(self._run_bytes.sum()) else None

    def _opaque_layout(self, kv_cache_dtype: str) -> Layout:
        """A layout of plain bytes, equal if class, layout, dtype and all run lengths are equal."""
        pool, ranks = self.pool, self.sharing.ranks
        total = int(self._run_bytes.sum())
        tokens = self.page_size if total % self.page_size == 0 else 1
        runs = hashlib.sha256(self._run_bytes.astype("<i8").tobytes()).hexdigest()[:16]
        parts = (type(pool).__name__, pool.layout, _dtype_names(pool), kv_cache_dtype, runs)
        order = "sglang," + ",".join(map(str, parts))
        return Layout("uint8", 1, ranks, total // tokens, tokens, ranks, 1, order)

    def _dtype(self, kv_cache_dtype: str) -> str:
        """kvpool's name of the pool's element type; "" if it has none.

        SGLang keeps 8-bit KV as plain bytes, whatever its format.

        Raises:
            ConfigError: the format of 8-bit KV is unknown.
        """
        name = DTYPE_NAMES.get(self.pool.dtype, "")
        if name != "uint8":
            return name
        if kv_cache_dtype in ("", "auto"):
            raise ConfigError(
                f"SGLang's pool {self.name!r} holds bytes of an unknown format",
                hint="set kv_cache_dtype as SGLang's --kv-cache-dtype, e.g. fp8_e4m3",
            )
        return kv_cache_dtype if kv_cache_dtype in DTYPE_BYTES else ""


def is_logical(pool: Any) -> bool:
    """Whether a pool counts pages but has no memory: the data are in its side pools."""
    return getattr(pool, "kv_buffer", None) is None and not _tensors(pool)


def _is_a(pool: Any, class_name: str) -> bool:
    # By name, because not every build of SGLang can import the classes' modules.
    return any(cls.__name__ == class_name for cls in type(pool).__mro__)


def _tensors(pool: Any) -> list[torch.Tensor]:
    """The host memory that a pool owns, as contiguous tensors."""
    own = getattr(pool, "get_hybrid_pool_buffer", None)
    found: Sequence[Any] = own() if own is not None else [getattr(pool, "kv_buffer", None)]
    flat: list[Any] = []
    for item in found:
        flat += item if isinstance(item, (list, tuple)) else [item]
    return [t for t in flat if isinstance(t, torch.Tensor) and t.device.type == "cpu" and t.nbytes]


def _dtype_names(pool: Any) -> str:
    names = {str(t.dtype).removeprefix("torch.") for t in _tensors(pool)}
    return "+".join(sorted(names)) or str(getattr(pool, "dtype", ""))

"""The pages of one of SGLang's host pools: their layout, and where in memory each of them is.

The layout is read off the pool, and compared with the addresses that the pool itself gives for a page: what does
not agree is not stored. A page is one block of kvpool.
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
from kvpool.errors import ConfigError, InvalidArgument, WrongByteCount
from kvpool.transports.copy import Int64Array

# Order of the bytes of a page, by SGLang's name of the layout. MLA has one head and one vector: where "head" and
# "kv" stand among the others says nothing there.
MHA_ORDERS = {
    "layer_first": "kv,layer,token,head,dim",  # runs of single layers, brought into this order here
    "page_first": "kv,token,layer,head,dim",
    "page_first_direct": "kv,layer,token,head,dim",
    "page_head": "kv,head,token,layer,dim",
}
MLA_ORDERS = {
    "layer_first": "kv,layer,token,head,dim",
    "page_first": "kv,token,layer,head,dim",
    "page_first_direct": "kv,layer,token,head,dim",
}
TORCH_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.int8: "int8",
    torch.uint8: "uint8",
}


@dataclass(slots=True, frozen=True)
class Sharing:
    """How the ranks of an instance share a pool's pages: `ranks` parts, of which this process has `part`.

    One part where all ranks hold the same bytes (MLA); then `is_writer` is true of one rank alone.
    """

    ranks: int
    part: int
    is_writer: bool


class HostPages:
    """A registered host pool.

    Args:
        pool: one of `sglang.srt.mem_cache.pool_host`'s, or alike.
        name: as SGLang calls it, e.g. "kv".
        kv_cache_dtype: what the bytes of an 8-bit pool mean; "" or "auto": not known.

    Raises:
        ConfigError: its pages cannot be addressed, or not told from others.
    """

    def __init__(self, pool: Any, name: str, sharing: Sharing, kv_cache_dtype: str) -> None:
        self.pool = pool
        self.name = name
        self.sharing = sharing
        # Slots of the host pool that SGLang names for one page.
        self.page_size = int(getattr(pool, "logical_page_size", None) or pool.page_size)
        self.memory = _tensors(pool)
        self._bounds = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in self.memory]
        try:
            _, sizes = pool.get_page_buffer_meta(torch.arange(self.page_size))
        except (ValueError, NotImplementedError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"pages of SGLang's pool {name!r} ({type(pool).__name__}, layout {pool.layout}) cannot be"
                f" addressed: {error}",
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
        """Bytes of this rank's share of a page."""
        return self.layout.part_bytes

    def spans(self, pages: int, host_indices: torch.Tensor) -> BlockSpans:
        """Where pages are, by the pool's own addresses.

        Args:
            host_indices: the slots of each page in turn, `page_size` a page.

        Raises:
            WrongByteCount: these are not so many pages, or not of the size that was registered.
            InvalidArgument: an address lies outside the pool.
        """
        if len(host_indices) != pages * self.page_size:
            raise WrongByteCount(
                f"{pages} pages of {self.page_size} slots in {self.name!r}, got {len(host_indices)} indices"
            )
        pointers, sizes = self.pool.get_page_buffer_meta(host_indices)
        runs = len(self._run_bytes)
        if len(pointers) != pages * runs or sizes != self._run_bytes.tolist() * pages:
            raise WrongByteCount(f"pages of {self.name!r} have other sizes than when registered")
        addresses = np.array(pointers, dtype=np.int64).reshape(pages, runs)
        self._check_bounds(addresses)
        if self._is_by_layer:
            # K and V of each layer in turn; in the pool all K come first, as in page_first_direct.
            addresses = np.concatenate((addresses[:, ::2], addresses[:, 1::2]), axis=1)
        return BlockSpans(addresses, self._run_bytes, self.memory or self.pool)

    def _check_bounds(self, addresses: Int64Array) -> None:
        if not self._bounds:
            return  # memory that another pool owns
        is_inside = np.zeros(addresses.shape, dtype=bool)
        for low, high in self._bounds:
            is_inside |= (addresses >= low) & (addresses + self._run_bytes <= high)
        if not is_inside.all():
            raise InvalidArgument(f"an index lies outside SGLang's pool {self.name!r}")

    # ------------------------------------------------------------ layouts

    def _known_layout(self, kv_cache_dtype: str) -> Layout | None:
        """The layout of plain K and V or MLA vectors; None where the pool's pages are something else."""
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
        """Pages as bytes: alike where class, layout, dtype and every run of bytes are."""
        pool, ranks = self.pool, self.sharing.ranks
        total = int(self._run_bytes.sum())
        tokens = self.page_size if total % self.page_size == 0 else 1
        runs = hashlib.sha256(self._run_bytes.astype("<i8").tobytes()).hexdigest()[:16]
        parts = (type(pool).__name__, pool.layout, _dtype_names(pool), kv_cache_dtype, runs)
        order = "sglang," + ",".join(map(str, parts))
        return Layout("uint8", 1, ranks, total // tokens, tokens, ranks, 1, order)

    def _dtype(self, kv_cache_dtype: str) -> str:
        """kvpool's name of what the pool holds; "" where it has none.

        8-bit KV is held as plain bytes, whatever their format.

        Raises:
            ConfigError: it is not told which format.
        """
        name = TORCH_DTYPES.get(self.pool.dtype, "")
        if name != "uint8":
            return name
        if kv_cache_dtype in ("", "auto"):
            raise ConfigError(
                f"SGLang's pool {self.name!r} holds bytes of an unknown format",
                hint="set kv_cache_dtype as SGLang's --kv-cache-dtype, e.g. fp8_e4m3",
            )
        return kv_cache_dtype if kv_cache_dtype in DTYPE_BYTES else ""


def is_logical(pool: Any) -> bool:
    """Whether a pool counts pages without holding any: their data are in its side pools."""
    return getattr(pool, "kv_buffer", None) is None and not _tensors(pool)


def _is_a(pool: Any, class_name: str) -> bool:
    # By name: the classes live in modules that not every build of SGLang can import.
    return any(cls.__name__ == class_name for cls in type(pool).__mro__)


def _tensors(pool: Any) -> list[torch.Tensor]:
    """The host memory of a pool, as far as it owns some; each in one piece."""
    own = getattr(pool, "get_hybrid_pool_buffer", None)
    found: Sequence[Any] = own() if own is not None else [getattr(pool, "kv_buffer", None)]
    flat: list[Any] = []
    for item in found:
        flat += item if isinstance(item, (list, tuple)) else [item]
    return [t for t in flat if isinstance(t, torch.Tensor) and t.device.type == "cpu" and t.nbytes]


def _dtype_names(pool: Any) -> str:
    names = {str(t.dtype).removeprefix("torch.") for t in _tensors(pool)}
    return "+".join(sorted(names)) or str(getattr(pool, "dtype", ""))

"""SGLang's own classes, imported on a machine without a GPU, and its host memory pools on the CPU.

SGLang's memory pools import its models, which import torchvision. These tests do not use
torchvision, and it needs another build of torch, so it is a stub during the import.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a package, and whatever is asked for within it, as empty modules."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self._package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


@contextmanager
def _stubbed(package: str) -> Iterator[None]:
    """`package` is a stub within, unless it is installed; afterwards it is missing as before."""
    if importlib.util.find_spec(package) is not None:
        yield
        return
    finder = _StubFinder(package)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] == package]:
            del sys.modules[name]


def import_sglang() -> None:
    """Import what the tests use, so that no later import of it needs the stub."""
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # remembered: not to be found by it later
    with warnings.catch_warnings(), _stubbed("torchvision"):
        warnings.simplefilter("ignore")
        for name in ("pool_host.mha", "pool_host.mla", "pool_host.mamba", "storage"):
            importlib.import_module(f"sglang.srt.mem_cache.{name}")
        importlib.import_module("sglang.srt.mem_cache.memory_pool_host")
        importlib.import_module("sglang.srt.managers.cache_controller")


import_sglang()

from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402

LAYERS, HEADS, HEAD_DIM = 3, 2, 16
LATENT, ROPE = 32, 16
PAGE = 8
CPU = torch.device("cpu")

__all__ = ["LogicalHostPool"]  # and what is defined here


def _pointers(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)


def mha_pool(
    layout: str,
    *,
    pages: int = 16,
    page_size: int = PAGE,
    layers: int = LAYERS,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.bfloat16,
    start_layer: int = 0,
) -> Any:
    """SGLang's host pool of K and V, filled with noise."""
    shape = (page_size, heads, head_dim)
    k, v = (tuple(torch.zeros(shape, dtype=dtype) for _ in range(layers)) for _ in range(2))
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k,
            v=v,
            k_data_ptrs=_pointers(k),
            v_data_ptrs=_pointers(v),
            layout=KVBufferLayout.NHD,
        ),
        page_size=page_size,
        head_num=heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        dtype=dtype,
        device=CPU,
    )
    with host_memory_budget_scope(1 << 30):
        pool = MHATokenToKVPoolHost(
            info,
            1.0,
            0,
            page_size,
            layout,
            pin_memory=False,
            device_capacity_tokens=page_size,
            start_layer=start_layer,
            end_layer=start_layer + layers,
            host_token_capacity=pages * page_size,
        )
    return filled(pool)


def mla_pool(
    layout: str, *, pages: int = 16, page_size: int = PAGE, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """SGLang's host pool of latent vectors, filled with noise."""
    width = LATENT + ROPE
    buffers = tuple(torch.zeros((page_size, 1, width), dtype=dtype) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=_pointers(buffers),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=page_size,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        kv_cache_dim=width,
        dtype=dtype,
        device=CPU,
    )
    with host_memory_budget_scope(1 << 30):
        pool = MLATokenToKVPoolHost(
            info,
            1.0,
            0,
            page_size,
            layout,
            pin_memory=False,
            device_capacity_tokens=page_size,
            start_layer=0,
            end_layer=LAYERS,
            target_layer_num=LAYERS,
            host_token_capacity=pages * page_size,
        )
    return filled(pool)


def mamba_pool(*, slots: int = 16, layout: str = "page_first") -> Any:
    """SGLang's host pool for states of linear layers: two separate buffers, one slot per page."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros((2, slots, 4, 8), dtype=torch.float32),
        conv=(torch.zeros((2, slots, 6, 3), dtype=torch.bfloat16),),
    )
    with host_memory_budget_scope(1 << 30):
        pool = MambaPoolHost(info, 1.0, 0, device_capacity=slots, pin_memory=False, layout=layout)
    return filled(pool)


def filled(pool: Any) -> Any:
    """The same pool with noise of its own in it."""
    buffers = pool.kv_buffer if isinstance(pool.kv_buffer, list) else [pool.kv_buffer]
    for buffer in buffers:
        raw = buffer.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    return pool


def page_bytes(pool: Any, page: int) -> bytes:
    """What a page holds, by SGLang's own reading of it."""
    return bytes(pool.get_data_page(page * pool.page_size).view(torch.uint8).numpy())


def indices(pool: Any, pages: Sequence[int]) -> torch.Tensor:
    """The slots of pages, as SGLang names them."""
    slots = [torch.arange(p * pool.page_size, (p + 1) * pool.page_size) for p in pages]
    return torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)


def storage_config(extra: dict[str, Any], **fields: Any) -> HiCacheStorageConfig:
    """What SGLang's controller would hand over."""
    common: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "tests/model",
    }
    return HiCacheStorageConfig(**(common | fields), extra_config=extra)

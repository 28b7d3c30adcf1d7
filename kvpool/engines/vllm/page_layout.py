"""Reads the layout of vLLM's paged KV cache from the tensors that vLLM registers.

vLLM gives each layer a tensor with the logical axes [page, head, token, content]; the strides
define the places in memory. This module refuses, with the reason, every layout that is not surely a
whole page of KV per layer. It moves no bytes; `paged_kv` does.

Axes are written as in vLLM, outermost first in memory: L layer, B page, H head, N token, C content,
and in some layouts X (K or V, kept apart) and S (equal pieces that the kernel splits a page into).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import msgspec
import torch

from kvpool.blocks.layout import MAX_ORDER_CHARS, Layout
from kvpool.engines.shared.dtypes import DTYPE_NAMES
from kvpool.errors import UnsupportedLayout

# Exact types only: a subclass may keep something else in its pages, or free them early.
_FULL, _MLA = "FullAttentionSpec", "MLAAttentionSpec"
# Only quantised caches whose scales are part of the weights; others keep scales outside the pages.
_QUANT_MODES = ("NONE", "FP8_PER_TENSOR")
_NO_HYBRID = "--disable-hybrid-kv-cache-manager makes vLLM keep every token's KV of every layer"


class LayoutFacts(msgspec.Struct, frozen=True):
    """What a worker tells the scheduler about its pages: enough for a namespace's layout.

    Args:
        order: order of a page's bytes; equal orders mean interchangeable bytes.
        heads: KV heads of this rank.
        replicas: how many consecutive ranks hold the same heads.
    """

    order: str
    dtype: str
    page_tokens: int
    page_bytes: int
    layers: int
    heads: int
    head_dim: int
    kv_per_token: int
    replicas: int = 1

    def part_of(self, tp_rank: int) -> int:
        """The part that a tensor-parallel rank reads and writes."""
        return tp_rank // self.replicas

    def layout(self, block_tokens: int, tp_size: int) -> Layout:
        """The layout of blocks of `block_tokens` tokens over `tp_size` ranks. Raises as `Layout`.

        Ranks that hold the same bytes share one part.

        Args:
            block_tokens: a multiple of `page_tokens`.
        """
        parts = max(1, tp_size // self.replicas)
        return Layout(
            dtype=self.dtype,
            layers=self.layers,
            kv_heads=self.heads * parts,
            head_dim=self.head_dim,
            block_tokens=block_tokens,
            tp_size=parts,
            kv_per_token=self.kv_per_token,
            order=self.order,
        )


@dataclass(slots=True, frozen=True)
class Axis:
    """One axis of the cache: its letter, length, and stride in bytes."""

    letter: str
    size: int
    stride: int


@dataclass(slots=True, frozen=True)
class Band:
    """Layers at equal distances in one storage, or a single layer.

    Args:
        base: address of the first layer's page 0.
        page_stride: bytes from one page to the next.
        inner: the axes within a page, outermost first; with L if there are several layers.
    """

    first_layer: int
    layers: int
    tensor: torch.Tensor
    base: int
    page_stride: int
    inner: tuple[Axis, ...]


@dataclass(slots=True, frozen=True)
class PageLayout:
    """Where the bytes of a page are, and the identity of their order."""

    facts: LayoutFacts
    pages: int
    layer_names: tuple[str, ...]
    bands: tuple[Band, ...]


def read_page_layout(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: Any,
    backend: str = "",
    packing: str | None = None,
) -> PageLayout:
    """The layout of registered KV caches.

    Args:
        kv_caches: tensors by layer, as in `register_kv_caches`.
        kv_cache_config: vLLM's `KVCacheConfig` for them.
        backend: names of the attention backends; each may lay out a page differently.
        packing: how kernels arrange bytes within a page; default: as vLLM's CPU backend says, and
            "" on devices.

    Raises:
        UnsupportedLayout: the layout is not recognised.
    """
    spec = check_groups(kv_cache_config)
    group = kv_cache_config.kv_cache_groups[0]
    tensors = _owners(kv_caches, group.layer_names)
    pages = kv_cache_config.num_blocks
    first = next(iter(tensors.values()))
    dtype = DTYPE_NAMES.get(first.dtype)
    if dtype is None:
        raise UnsupportedLayout(
            f"KV of {first.dtype}", hint=f"one of {', '.join(DTYPE_NAMES.values())}"
        )
    shape = _read_axes(first, spec, pages)
    for name, tensor in tensors.items():
        if (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) != (
            first.shape,
            first.stride(),
            first.dtype,
            first.device,
        ):
            raise UnsupportedLayout(
                f"layers {name} and {next(iter(tensors))} differ in shape, strides, dtype or device"
            )
    bands = _bands(list(tensors.values()), shape)
    memory, inner = _check_disjoint(bands, pages)
    if packing is None:
        packing = _cpu_packing(spec, shape) if first.device.type == "cpu" else ""
    heads, head_dim, kv_per_token = _content(spec)
    order = _order(memory, inner, spec, f"{backend}/{packing}", list(tensors))
    layer_bytes = prod(axis.size for axis in shape[1:]) * first.element_size()
    facts = LayoutFacts(
        order=order,
        dtype=dtype,
        page_tokens=spec.block_size,
        page_bytes=layer_bytes * len(tensors),
        layers=len(tensors),
        heads=heads,
        head_dim=head_dim,
        kv_per_token=kv_per_token,
        replicas=max(1, getattr(kv_cache_config, "kv_tp_replicas", 1)),
    )
    if facts.layout(spec.block_size, facts.replicas).part_bytes != facts.page_bytes:
        raise UnsupportedLayout(
            f"a page has {facts.page_bytes} bytes, which does not match {heads} heads of"
            f" {head_dim} elements"
        )
    return PageLayout(facts, pages, tuple(tensors), bands)


def check_groups(kv_cache_config: Any) -> Any:
    """Check that the model has one group of layers that the pool supports; return its spec.

    Raises:
        UnsupportedLayout: there is not exactly one group, or its pages do not hold all KV of their
            tokens.
    """
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1:
        raise UnsupportedLayout(
            f"the model has {len(groups)} KV cache groups ({', '.join(kinds) or 'no KV'})",
            hint=f"kvpool supports one group of full attention or MLA; {_NO_HYBRID}",
        )
    spec = groups[0].kv_cache_spec
    if kinds[0] == "UniformTypeKVCacheSpecs":
        specs = list(spec.kv_cache_specs.values())
        if any(other != specs[0] for other in specs[1:]):
            raise UnsupportedLayout(
                "the model's layers have KV of different sizes or kinds",
                hint="all layers must be alike",
            )
        spec, kinds = specs[0], [type(specs[0]).__name__]
    if kinds[0] not in (_FULL, _MLA):
        raise UnsupportedLayout(
            f"layers of kind {kinds[0]}: their pages do not hold the KV of every token",
            hint=f"kvpool supports full attention and MLA; {_NO_HYBRID}",
        )
    if spec.kv_quant_mode.name not in _QUANT_MODES:
        raise UnsupportedLayout(
            f"a KV cache quantised as {spec.kv_quant_mode.name}: scales may be outside the pages",
            hint="use --kv-cache-dtype auto or fp8",
        )
    if spec.non_causal:
        raise UnsupportedLayout("attention that is not causal: KV depends on tokens that follow")
    if spec.tokens_per_state != 1:
        raise UnsupportedLayout(f"KV compressed over {spec.tokens_per_state} tokens a state")
    if kinds[0] == _MLA and (spec.model_version or spec.cache_role.name != "SPARSE"):
        raise UnsupportedLayout(
            f"MLA with a further cache ({spec.model_version or spec.cache_role.name})"
        )
    if not groups[0].enable_kv_transfer or groups[0].host_resident:
        raise UnsupportedLayout("vLLM does not let this cache be transferred")
    return spec


def _owners(kv_caches: Mapping[str, torch.Tensor], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The layers that own KV, in the group's order; without those that share another's tensor."""
    missing = [name for name in names if name not in kv_caches]
    if missing:
        raise UnsupportedLayout(f"layer {missing[0]} has no registered KV cache")
    owners: dict[str, torch.Tensor] = {}
    places: set[tuple[Any, ...]] = set()
    for name in [*names, *(name for name in kv_caches if name not in set(names))]:
        tensor = kv_caches[name]
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedLayout(
                f"layer {name} registered a {type(tensor).__name__}, not a tensor"
            )
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place in places:
            continue
        if name not in names:
            raise UnsupportedLayout(f"layer {name} is registered, but belongs to no KV cache group")
        places.add(place)
        owners[name] = tensor
    if not owners:
        raise UnsupportedLayout("the model has no KV cache")
    return owners


def _read_axes(tensor: torch.Tensor, spec: Any, pages: int) -> tuple[Axis, ...]:
    """The axes of one layer: B first, the others in order of their strides, C last."""
    size = tensor.element_size()
    packed = {"H": spec.num_heads, "C": spec.state_content_size_bytes // size}
    apart = {"H": spec.num_kv_heads, "C": spec.head_size, "X": 2}
    # If the documented order fits, use it: another one could fit only by a coincidence of sizes.
    found = _readings(tensor, spec, pages, packed, ("BHNC",)) or [
        *_readings(tensor, spec, pages, packed, ("BNHC", "BNC")),
        *_readings(tensor, spec, pages, apart, ("XBHNC", "BXHNC", "XBNHC", "BXNHC")),
    ]
    if len(found) != 1:
        raise UnsupportedLayout(
            f"a KV cache of shape {tuple(tensor.shape)}; [page, head, token, content] would be"
            f" {[pages, packed['H'], spec.block_size, packed['C']]}",
            hint="docs/vllm.md lists the supported layouts",
        )
    letters, splits = found[0]
    axes = {
        letter: Axis(letter, length, stride * size)
        for letter, length, stride in zip(letters, tensor.shape, tensor.stride(), strict=True)
    }
    page = axes.pop("B")
    if splits > 1:
        axes["S"] = Axis("S", splits, page.stride)
        page = Axis("B", pages, page.stride * splits)
    if axes["C"].stride != size:
        raise UnsupportedLayout("the content of a head is not contiguous")
    inner = sorted(
        (axis for axis in axes.values() if axis.size > 1 or axis.letter == "C"),
        key=lambda axis: -axis.stride,
    )
    return (page, *inner)


def _readings(
    tensor: torch.Tensor, spec: Any, pages: int, sizes: Mapping[str, int], orders: Sequence[str]
) -> list[tuple[str, int]]:
    """The `orders` that fit the tensor's shape, each with the number of pieces of a page."""
    found = []
    for letters in orders:
        shape = dict(zip(letters, tensor.shape, strict=False))
        splits = shape["B"] // pages if len(letters) == tensor.dim() else 0
        if not splits or spec.block_size % splits or ("H" not in letters and sizes["H"] > 1):
            continue
        expected = {**sizes, "B": pages * splits, "N": spec.block_size // splits}
        if all(shape[letter] == expected[letter] for letter in letters):
            found.append((letters, splits))
    return found


def _bands(tensors: list[torch.Tensor], shape: tuple[Axis, ...]) -> tuple[Band, ...]:
    """One band if all layers are at equal distances in one storage, else one for each layer."""
    page, *inner = shape
    bases = [tensor.data_ptr() for tensor in tensors]
    steps = {after - before for before, after in pairwise(bases)}
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(steps) == 1 and len(storages) == 1 and (step := steps.pop()) > 0:
        axes = sorted([Axis("L", len(tensors), step), *inner], key=lambda axis: -axis.stride)
        return (Band(0, len(tensors), tensors[0], bases[0], page.stride, tuple(axes)),)
    return tuple(
        Band(i, 1, tensor, base, page.stride, tuple(inner))
        for i, (tensor, base) in enumerate(zip(tensors, bases, strict=True))
    )


def _check_disjoint(bands: tuple[Band, ...], pages: int) -> tuple[str, tuple[Axis, ...]]:
    """Check that no two elements share memory.

    Returns the letters of all axes, and a page's axes.
    """
    band = bands[0]
    axes = sorted(
        [*band.inner, Axis("B", pages, band.page_stride)],
        key=lambda axis: (-axis.stride, axis.size),
    )
    if any(axis.size > 1 and axis.stride <= 0 for axis in axes):
        raise UnsupportedLayout("elements overlap in memory")
    for outer, inner in pairwise(axes):
        if outer.size > 1 and outer.stride < inner.size * inner.stride:
            raise UnsupportedLayout(f"axes {outer.letter} and {inner.letter} overlap in memory")
    if len(bands) > 1:
        extent = axes[0].size * axes[0].stride
        starts = sorted(other.base for other in bands)
        if any(after - before < extent for before, after in pairwise(starts)):
            raise UnsupportedLayout("layers overlap in memory, or alternate at unequal distances")
        layers = Axis("L", len(bands), 0)
        return "L" + "".join(axis.letter for axis in axes), (layers, *band.inner)
    return "".join(axis.letter for axis in axes), band.inner


def _content(spec: Any) -> tuple[int, int, int]:
    """KV heads, elements of a vector, vectors per token and head.

    Their product is a token's elements.
    """
    item = spec.dtype.itemsize
    token_elements = spec.num_heads * spec.state_content_size_bytes // item
    if spec.head_size_v == spec.head_size and token_elements == (
        2 * spec.num_kv_heads * spec.head_size
    ):
        return spec.num_kv_heads, spec.head_size, 2
    return spec.num_heads, spec.state_content_size_bytes // item, 1


def _order(
    memory: str,
    inner: tuple[Axis, ...],
    spec: Any,
    packing: str,
    names: list[str],
) -> str:
    page = ".".join(f"{axis.letter}{axis.size}" for axis in inner)
    content = f"{spec.num_kv_heads}x{spec.head_size}+{spec.head_size_v}"
    layers = hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]
    order = f"vllm-1:{memory}:{page}:{content}:{packing}:{layers}"
    if len(order) > MAX_ORDER_CHARS:
        raise UnsupportedLayout(f"the layout's description is too long: {order}")
    return order


def _cpu_packing(spec: Any, shape: tuple[Axis, ...]) -> str:
    """The instruction set of vLLM's CPU kernels. It decides how keys are arranged in a page."""
    tokens = next((axis.size for axis in shape if axis.letter == "N"), 1)
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        # For fp8 the model's dtype decides. The namespace contains it, so any fixed dtype is right
        # here.
        dtype = spec.dtype if spec.dtype.itemsize > 1 else torch.bfloat16
        return str(_get_attn_isa(dtype, tokens, spec.head_size))
    except (ImportError, TypeError) as error:
        raise UnsupportedLayout(
            f"cannot find out how vLLM's CPU kernels arrange a page: {error}",
            hint="use a supported version of vLLM",
        ) from error

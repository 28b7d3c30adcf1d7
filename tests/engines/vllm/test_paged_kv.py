"""vLLM's own allocations, in each of its layouts, through kvpool's reading of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import InvalidArgument, UnsupportedLayout, WrongByteCount
from kvpool.transports.copy import copy

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    compute_layout_strides,
)
from vllm.v1.worker.utils import allocate_kv_cache  # noqa: E402

from kvpool.engines.vllm.paged_kv import PagedKV  # noqa: E402
from tests.support.sizes import examples  # noqa: E402

LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(3)]
PAGES = 7
FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32)
# K and V of a head in slots of their own, as FlashInfer publishes it
SLOTS = replace(FULL, num_head_slots=4, state_content_bytes=32)
MLA = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=24, dtype=torch.float32)
ODD = FullAttentionSpec(block_size=16, num_kv_heads=3, head_size=5, dtype=torch.bfloat16)
PADDED = replace(FULL, page_size_padded=FULL.page_size_bytes + 512)
SPECS = {"full": FULL, "slots": SLOTS, "mla": MLA, "odd": ODD}


def config_of(spec: Any, layout: KVCacheLayout, layers: list[str] = LAYERS) -> KVCacheConfig:
    layer_stride, block_stride, *_ = compute_layout_strides(spec, PAGES, len(layers), layout)
    size = len(layers) * PAGES * spec.page_size_bytes
    return KVCacheConfig(
        num_blocks=PAGES,
        kv_cache_tensors=[KVCacheTensor(size, list(layers), layer_stride, block_stride)],
        kv_cache_groups=[KVCacheGroupSpec(list(layers), spec)],
    )


def allocate(
    spec: Any, layout: KVCacheLayout, kernel_tokens: int | None = None
) -> tuple[dict[str, torch.Tensor], KVCacheConfig]:
    """vLLM's allocation, every element numbered by its place in vLLM's logical view."""
    config = config_of(spec, layout)
    sizes = None if kernel_tokens is None else [kernel_tokens]
    caches = allocate_kv_cache(config, torch.device("cpu"), layout, sizes)
    for number, cache in enumerate(caches.values()):
        count = cache.numel()
        values = torch.arange(number * count, (number + 1) * count)
        if spec.dtype.itemsize < 4:
            values = values % 251
        cache.copy_(values.view(cache.shape))
    return caches, config


def logical(caches: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([cache.clone() for cache in caches.values()])


ALL = [
    pytest.param(spec, layout, id=f"{name}-{layout.name}")
    for name, spec in SPECS.items()
    for layout in KVCacheLayout
]


@pytest.mark.parametrize(("spec", "layout"), ALL)
def test_gathered_pages_scattered_elsewhere_are_equal_in_vllms_own_view(
    spec: Any, layout: KVCacheLayout
) -> None:
    caches, config = allocate(spec, layout)
    paged = PagedKV.read(caches, config)
    assert paged.page_bytes == len(LAYERS) * spec.page_size_bytes
    assert paged.page_tokens == spec.block_size
    before = logical(caches)
    rows = torch.empty((3, paged.page_bytes), dtype=torch.uint8)
    paged.gather(np.array([5, 0, 2]), rows)
    paged.scatter(np.array([1, 6, 0]), rows)
    expected = before.clone()
    expected[:, [1, 6, 0]] = before[:, [5, 0, 2]]
    assert torch.equal(logical(caches), expected)


@pytest.mark.parametrize(("spec", "layout"), ALL)
def test_the_order_says_how_a_pages_bytes_are_arranged(spec: Any, layout: KVCacheLayout) -> None:
    caches, config = allocate(spec, layout)
    paged = PagedKV.read(caches, config)
    row = torch.empty((1, paged.page_bytes), dtype=torch.uint8)
    paged.gather(np.array([4]), row)
    axes = [part[0] for part in paged.order.split(":")[2].split(".")]
    page = dict(zip("LHNC", logical(caches)[:, 4].shape, strict=True))
    assert all(page[letter] == 1 for letter in "LHNC" if letter not in axes)
    view = logical(caches)[:, 4].squeeze()
    names = [letter for letter in "LHNC" if page[letter] > 1]
    expected = view.permute([names.index(letter) for letter in axes]).contiguous()
    assert torch.equal(row.view(spec.dtype)[0], expected.flatten())


@pytest.mark.parametrize(("spec", "layout"), ALL)
def test_runs_lead_to_the_bytes_that_gather_gives(spec: Any, layout: KVCacheLayout) -> None:
    caches, config = allocate(spec, layout)
    paged = PagedKV.read(caches, config)
    pages = np.array([3, 6])
    for layers in (None, slice(1, 3)):
        rows = torch.zeros((2, paged.page_bytes), dtype=torch.uint8)
        other = torch.full_like(rows, 255)
        paged.gather(pages, rows, layers)
        paged.gather(pages, other, layers)
        addresses, lengths = paged.runs(pages, layers)
        packed = torch.zeros(int(lengths.sum()), dtype=torch.uint8)
        targets = packed.data_ptr() + np.cumsum(lengths) - lengths
        copy(targets, addresses, lengths)
        assert torch.equal(packed, rows[rows == other])
        start, size = paged.regions()[0]
        assert (addresses >= start).all()
        assert (addresses + lengths <= start + size).all()


@pytest.mark.parametrize(("spec", "layout"), ALL)
def test_layers_moved_one_by_one_are_the_page(spec: Any, layout: KVCacheLayout) -> None:
    caches, config = allocate(spec, layout)
    paged = PagedKV.read(caches, config)
    pages = np.array([6, 1])
    whole = torch.empty((2, paged.page_bytes), dtype=torch.uint8)
    paged.gather(pages, whole)
    pieces = torch.full_like(whole, 99)
    before = logical(caches)
    for layer in range(len(LAYERS)):
        paged.gather(pages, pieces, slice(layer, layer + 1))
    assert torch.equal(pieces, whole)
    paged.scatter(np.array([0, 2]), whole, slice(1, 2))
    expected = before.clone()
    expected[1, [0, 2]] = before[1, [6, 1]]
    assert torch.equal(logical(caches), expected)


def test_no_two_layouts_specs_or_packings_have_one_order() -> None:
    orders: dict[str, str] = {}
    for name, spec in {**SPECS, "padded": PADDED}.items():
        for layout in KVCacheLayout:
            if name == "padded" and not layout.is_block_compact:
                continue
            for packing in ("vec", "amx"):
                caches, config = allocate(spec, layout)
                order = PagedKV.read(caches, config, packing=packing).order
                assert len(order) <= 256
                orders.setdefault(order, f"{name} {layout.name} {packing}")
    # With one head, the place of the heads' axis changes no byte: 2 of 6 layouts remain.
    counted = {name: sum(name in what for what in orders.values()) for name in SPECS}
    assert counted == {"full": 12, "slots": 12, "odd": 12, "mla": 4}
    assert sum("padded" in what for what in orders.values()) == 0  # the same bytes in every page


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
def test_pages_that_kernels_split_are_put_together(layout: KVCacheLayout) -> None:
    caches, config = allocate(FULL, layout, kernel_tokens=8)
    assert caches[LAYERS[0]].shape[0] == 4 * PAGES
    paged = PagedKV.read(caches, config)
    whole, whole_config = allocate(FULL, layout)
    assert paged.order != PagedKV.read(whole, whole_config).order

    def in_pages() -> torch.Tensor:
        return logical(caches).reshape(len(caches), PAGES, 4, -1)

    before = in_pages()
    rows = torch.empty((1, paged.page_bytes), dtype=torch.uint8)
    paged.gather(np.array([5]), rows)
    paged.scatter(np.array([2]), rows)
    assert torch.equal(in_pages()[:, 2], before[:, 5])


def test_padding_between_pages_is_neither_read_nor_written() -> None:
    caches, config = allocate(PADDED, KVCacheLayout.BLHNC)
    paged = PagedKV.read(caches, config)
    assert paged.page_bytes == len(LAYERS) * FULL.page_size_bytes
    raw = torch.empty(0, dtype=torch.uint8).set_(caches[LAYERS[0]].untyped_storage())
    before, seen = raw.clone(), logical(caches)
    paged.scatter(np.array([3]), torch.full((1, paged.page_bytes), 7, dtype=torch.uint8))
    assert int((raw != before).sum()) <= paged.page_bytes
    assert not torch.equal(logical(caches)[:, 3], seen[:, 3])
    assert torch.equal(logical(caches)[:, 4], seen[:, 4])


def test_layers_in_storages_of_their_own_are_read_and_written() -> None:
    _, config = allocate(FULL, KVCacheLayout.LBHNC)
    caches = {name: torch.rand(PAGES, 2, 32, 16) for name in LAYERS}
    paged = PagedKV.read(caches, config)
    before = logical(caches)
    rows = torch.empty((1, paged.page_bytes), dtype=torch.uint8)
    paged.gather(np.array([5]), rows)
    paged.scatter(np.array([2]), rows, slice(0, 2))
    expected = before.clone()
    expected[:2, 2] = before[:2, 5]
    assert torch.equal(logical(caches), expected)
    assert len(paged.regions()) == len(LAYERS)


@pytest.mark.parametrize(
    ("shape", "letters"),
    [
        ((2, PAGES, 2, 32, 8), "XBHNC"),
        ((PAGES, 2, 32, 2, 8), "BXNHC"),
        ((2, PAGES, 32, 2, 8), "XBNHC"),
    ],
)
def test_k_and_v_apart_are_known_by_their_shape(shape: tuple[int, ...], letters: str) -> None:
    _, config = allocate(FULL, KVCacheLayout.LBHNC)
    caches = {name: torch.rand(shape) for name in LAYERS}
    paged = PagedKV.read(caches, config)
    assert f"L{letters}:" in paged.order
    before = logical(caches)
    rows = torch.empty((1, paged.page_bytes), dtype=torch.uint8)
    paged.gather(np.array([5]), rows)
    paged.scatter(np.array([2]), rows)
    axis = 1 + letters.index("B")
    assert torch.equal(logical(caches).select(axis, 2), before.select(axis, 5))


def test_a_layer_that_shares_anothers_cache_is_stored_once() -> None:
    caches, config = allocate(FULL, KVCacheLayout.LBHNC)
    caches["model.layers.3.self_attn.attn"] = caches[LAYERS[2]]
    paged = PagedKV.read(caches, config)
    assert paged.layer_names == LAYERS
    del caches["model.layers.3.self_attn.attn"]
    assert paged.order == PagedKV.read(caches, config).order


def test_the_facts_make_a_layout_of_the_same_size() -> None:
    for spec in SPECS.values():
        caches, config = allocate(spec, KVCacheLayout.LBHNC)
        paged = PagedKV.read(caches, config)
        layout = paged.facts.layout(4 * paged.page_tokens, tp_size=2)
        assert layout.part_bytes == 4 * paged.page_bytes
        assert (layout.order, layout.tp_size) == (paged.order, 2)


def test_ranks_that_hold_the_same_bytes_share_a_part() -> None:
    caches, config = allocate(MLA, KVCacheLayout.LBHNC)
    config.kv_tp_replicas = 4
    layout = PagedKV.read(caches, config).facts.layout(32, tp_size=8)
    assert (layout.tp_size, layout.kv_heads) == (2, 2)


SLIDING = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=64
)
MAMBA = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
REFUSED = {
    "SlidingWindowSpec": SLIDING,
    "MambaSpec": MAMBA,
    "RSWASpec": RSWASpec(
        block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32, rswa_window=64
    ),
    "INT8_PER_TOKEN_HEAD": replace(FULL, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD),
    "not causal": replace(FULL, non_causal=True),
    "compressed over 4 tokens": replace(MLA, tokens_per_state=4),
    "further cache": replace(MLA, model_version="deepseek_v4"),
    "different sizes or kinds": UniformTypeKVCacheSpecs(
        block_size=32,
        kv_cache_specs={LAYERS[0]: FULL, LAYERS[1]: FULL, LAYERS[2]: replace(FULL, head_size=16)},
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_may_not_hold_all_kv_is_refused_with_the_reason(reason: str) -> None:
    caches, config = allocate(FULL, KVCacheLayout.LBHNC)
    config.kv_cache_groups[0].kv_cache_spec = REFUSED[reason]
    with pytest.raises(UnsupportedLayout, match=reason):
        PagedKV.read(caches, config)


def test_windowed_layers_of_a_group_that_keeps_all_tokens_are_served() -> None:
    # What vLLM makes of a model with windows when its hybrid cache manager is off.
    caches, config = allocate(replace(FULL, sliding_window=64), KVCacheLayout.LBHNC)
    assert PagedKV.read(caches, config).layer_names == LAYERS


def test_several_groups_are_refused_and_the_way_out_is_named() -> None:
    caches, config = allocate(FULL, KVCacheLayout.LBHNC)
    config.kv_cache_groups.append(KVCacheGroupSpec(["other"], SLIDING))
    with pytest.raises(UnsupportedLayout, match=r"2 KV cache groups.*disable-hybrid"):
        PagedKV.read(caches, config)


def test_tensors_that_are_not_what_the_spec_says_are_refused() -> None:
    caches, config = allocate(FULL, KVCacheLayout.LBHNC)

    def refuse(match: str, **changed: torch.Tensor) -> None:
        given = dict(zip(LAYERS, caches.values(), strict=True))
        given.update({LAYERS[int(k[1:])]: v for k, v in changed.items()})
        with pytest.raises(UnsupportedLayout, match=match):
            PagedKV.read(given, config)

    refuse("shape", **{f"l{i}": torch.zeros(PAGES, 2, 32, 17) for i in range(3)})
    refuse("shape", **{f"l{i}": torch.zeros(PAGES + 1, 2, 32, 16) for i in range(3)})
    refuse("differ in shape, strides", l1=torch.zeros(PAGES, 2, 32, 16, dtype=torch.int32))
    turned = torch.zeros(PAGES, 32, 2, 16).permute(0, 2, 1, 3)
    refuse("differ in shape, strides", l1=turned)
    holes = torch.zeros(PAGES, 2, 32, 32)[..., ::2]
    refuse("not contiguous", l0=holes, l1=holes, l2=holes)
    flat = torch.zeros(16).expand(PAGES, 2, 32, 16)
    refuse("overlap", l0=flat, l1=flat, l2=flat)
    one = caches[LAYERS[0]]
    shifted = torch.zeros(one.numel() + 64)
    refuse(
        "overlap",
        **{f"l{i}": shifted[i * i :][: one.numel()].view(one.shape) for i in range(3)},
    )
    with pytest.raises(UnsupportedLayout, match="no registered"):
        PagedKV.read({LAYERS[0]: one}, config)
    with pytest.raises(UnsupportedLayout, match="belongs to no"):
        PagedKV.read({**caches, "draft": torch.zeros(1)}, config)


def test_pages_that_do_not_exist_and_wrong_buffers_are_refused() -> None:
    caches, config = allocate(FULL, KVCacheLayout.LBHNC)
    paged = PagedKV.read(caches, config)
    row = torch.zeros((1, paged.page_bytes), dtype=torch.uint8)
    for page in (-1, PAGES):
        with pytest.raises(InvalidArgument, match="pages"):
            paged.scatter(np.array([page]), row)
    for wrong in (row[:, 1:], row.float(), row.repeat(2, 1)):
        with pytest.raises(WrongByteCount):
            paged.gather(np.array([1]), wrong)


CASES = [allocate(spec, layout) for spec in (FULL, ODD) for layout in KVCacheLayout]
OPENED = [(caches, PagedKV.read(caches, config)) for caches, config in CASES]


@given(st.data())
@settings(max_examples=examples(150), deadline=None)
def test_any_pages_survive_a_round_trip(data: st.DataObject) -> None:
    caches, paged = data.draw(st.sampled_from(OPENED))
    sources = data.draw(st.lists(st.integers(0, PAGES - 1), max_size=PAGES))
    targets = data.draw(st.permutations(range(PAGES)))[: len(sources)]
    start = data.draw(st.integers(0, len(LAYERS)))
    layers = slice(start, data.draw(st.integers(start, len(LAYERS))))
    before = logical(caches)
    rows = torch.empty((len(sources), paged.page_bytes), dtype=torch.uint8)
    paged.gather(np.array(sources, dtype=np.int64), rows)
    paged.scatter(np.array(targets, dtype=np.int64), rows, layers)
    expected = before.clone()
    expected[layers, targets] = before[layers, sources]
    assert torch.equal(logical(caches), expected)

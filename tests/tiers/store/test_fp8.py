"""fp8 on disk: every code and value against torch's, bounds for each element, and odd input."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvpool.blocks.layout import Layout
from kvpool.errors import WrongByteCount
from tiers.store.fp8 import decode, encode, encoding_of, stored_bytes, to_e4m3

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Octets = npt.NDArray[np.uint8]


def layout(dtype: str, **sizes: Any) -> Layout:
    return Layout(
        dtype, **{"layers": 3, "kv_heads": 2, "head_dim": 16, "block_tokens": 32, **sizes}
    )


def part(shape: Layout, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    """Normal values, each group with another magnitude."""
    random = torch.Generator().manual_seed(seed)
    groups = shape.layers * shape.kv_per_token * shape.heads_per_part
    values = torch.randn(groups, shape.block_tokens * shape.head_dim, generator=random)
    sizes = (torch.randn(groups, 1, generator=random) * spread).exp()
    return (values * sizes).to(TYPES[shape.dtype])


def octets(values: torch.Tensor) -> Octets:
    return values.contiguous().view(torch.uint8).numpy().reshape(-1)


def there_and_back(shape: Layout, values: torch.Tensor) -> torch.Tensor:
    data = octets(values)
    out = np.empty_like(data)
    decode(shape, encode(shape, data), out)
    return torch.from_numpy(out).view(values.dtype).reshape(values.shape)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_code_is_the_one_that_torch_makes(dtype: str) -> None:
    shape = layout(dtype)
    values = part(shape)
    values[:, ::7] = 0
    values[:, 1::7] *= 1e-3  # subnormal codes
    stored = encode(shape, octets(values))
    groups = len(values)
    scales = torch.from_numpy(stored[: 4 * groups].view("<f4").copy())[:, None]
    codes = stored[4 * groups :].reshape(groups, -1)
    expected = (values.double() / scales).float().to(torch.float8_e4m3fn)
    assert np.array_equal(codes, expected.view(torch.uint8).numpy())
    back = there_and_back(shape, values)
    assert torch.equal(back, (expected.double() * scales).to(values.dtype))


def test_each_of_the_256_values_has_its_own_code() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = to_e4m3(values.numpy())
    is_number = ~torch.isnan(values).numpy()
    assert np.array_equal(codes[is_number], np.arange(256)[is_number])
    assert set(codes[~is_number]) <= {0x7F, 0xFF}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_the_error_of_each_element_is_bounded(dtype: str, spread: float) -> None:
    shape = layout(dtype)
    values = part(shape, 1, spread)
    back = there_and_back(shape, values).double()
    error = (back - values.double()).abs()
    largest = values.double().abs().amax(dim=1, keepdim=True)
    # Half a step of three binary digits; below the 14 orders of normal codes, half the smallest
    # step.
    bound = torch.maximum(values.double().abs() / 16, largest * 2.0**-17)
    assert (error <= bound).all()
    relative_rms = (error.square().sum() / values.double().square().sum()).sqrt()
    assert 0.02 < relative_rms < 0.03


@pytest.mark.parametrize("dtype", TYPES)
def test_what_was_decoded_is_encoded_again_without_loss(dtype: str) -> None:
    shape = layout(dtype)
    once = there_and_back(shape, part(shape, 2))
    assert torch.equal(there_and_back(shape, once), once)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_not_finite_comes_back_as_nan_and_spoils_nothing_else(dtype: str) -> None:
    shape = layout(dtype)
    values = part(shape, 3)
    clean = there_and_back(shape, values)
    values[1, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    values[2] = float("nan")
    back = there_and_back(shape, values)
    assert back[1, :3].isnan().all()
    assert back[2].isnan().all()
    assert torch.equal(back[1, 3:], clean[1, 3:])
    assert torch.equal(back[3:], clean[3:])


@pytest.mark.parametrize("dtype", TYPES)
def test_the_largest_and_the_smallest_groups_stay_finite(dtype: str) -> None:
    shape = layout(dtype)
    values = part(shape, 4, 0.0)
    info = torch.finfo(values.dtype)
    values[0, 0], values[1, 0] = info.max, info.min
    values[2] = info.smallest_normal
    values[3] = 0
    back = there_and_back(shape, values).double()
    assert back.isfinite().all()
    assert (back[:2, 0].abs() >= info.max * 0.93).all()
    assert ((back[2] - info.smallest_normal).abs() <= info.smallest_normal / 16).all()
    assert torch.equal(back[3], torch.zeros_like(back[3]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_groups_of_an_odd_length_and_other_orders_work(dtype: str) -> None:
    for shape in (
        layout(dtype, head_dim=5, block_tokens=3),
        layout(dtype, order="token,layer,kv,head,dim", kv_per_token=1),
        layout(dtype, kv_heads=4, tp_size=2),
    ):
        values = part(shape, 5)
        error = (there_and_back(shape, values) - values).double().abs()
        assert (error <= values.double().abs().amax() / 16).all()


def test_a_part_takes_half_the_bytes_and_its_scales() -> None:
    shape = layout("bfloat16")
    assert stored_bytes(shape, "as_is") == shape.part_bytes
    assert stored_bytes(shape, "fp8") == shape.part_bytes // 2 + 4 * 3 * 2 * 2
    assert len(encode(shape, octets(part(shape)))) == stored_bytes(shape, "fp8")
    assert stored_bytes(layout("float32"), "fp8") == stored_bytes(shape, "fp8")


def test_layouts_of_one_byte_an_element_are_stored_as_they_are() -> None:
    for dtype in ("fp8_e4m3", "fp8_e5m2", "int8", "uint8"):
        assert encoding_of(layout(dtype), "fp8") == "as_is"
    assert encoding_of(layout("bfloat16"), "fp8") == "fp8"
    assert encoding_of(layout("bfloat16"), "as_is") == "as_is"


def test_wrong_lengths_are_typed_errors() -> None:
    shape = layout("bfloat16")
    data = octets(part(shape))
    with pytest.raises(WrongByteCount):
        encode(shape, data[:-2])
    with pytest.raises(WrongByteCount):
        decode(shape, encode(shape, data)[:-1], data.copy())
    with pytest.raises(WrongByteCount):
        decode(shape, encode(shape, data), data[:-2].copy())

"""fp8 on disk: 16 and 32 bit floats as e4m3 codes with one scale per layer, K or V, and head.

An encoded part is its scales (little-endian float32, one for each group), then one code byte for
each element. A group is a run of `block_tokens * head_dim` elements. In the default order that is
the K or V of one head in one layer. In another order it is any run of that length, which works as
well: elements are coded one by one, and e4m3 has 15 binary orders of range.

Scales are powers of two, so that
- a part that was decoded is encoded again without further loss, and
- codes come from tables: 64 KiB for each scale to encode 16 bit floats, 256 KiB to decode two codes
  at a time. With them NumPy's `take` converts 3 GB/s of bfloat16 in either direction on one core,
  faster than the disk; torch 4 and 0.2.

Values that are not finite are read back as NaN. Layouts with one byte for each element are never
encoded.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from kvpool.blocks.layout import DTYPE_BYTES, Layout
from kvpool.errors import WrongByteCount

Encoding = Literal["as_is", "fp8"]
Octets = npt.NDArray[np.uint8]

MAX_E4M3 = 448.0
NAN_CODE = 0x7F
SCALE_BYTES = 4
_LOWEST_POWER = -126  # of a scale: a normal float32
_CHUNK_ELEMENTS = 1 << 17  # its index of 8 bytes an element stays in the cache
_LARGEST = {"bfloat16": 3.3895313892515355e38, "float16": 65504.0, "float32": 3.4028234663852886e38}


def encoding_of(layout: Layout, wanted: Encoding) -> Encoding:
    """How parts of a layout are stored if `wanted` is configured."""
    return "as_is" if DTYPE_BYTES[layout.dtype] == 1 else wanted


def stored_bytes(layout: Layout, encoding: Encoding) -> int:
    """Bytes of one part on disk."""
    if encoding == "as_is":
        return layout.part_bytes
    elements = layout.part_bytes // DTYPE_BYTES[layout.dtype]
    return elements + SCALE_BYTES * _groups(layout)


def encode(layout: Layout, data: Octets) -> Octets:
    """The fp8 form of one part.

    Raises:
        WrongByteCount: `data` is not one part of the layout.
    """
    _check(len(data), layout.part_bytes)
    groups = _groups(layout)
    out = np.empty(stored_bytes(layout, "fp8"), dtype=np.uint8)
    scales = out[: SCALE_BYTES * groups].view("<f4")
    codes = out[SCALE_BYTES * groups :].reshape(groups, -1)
    elements = _elements(data, layout.dtype).reshape(groups, -1)
    powers = _powers(elements, layout.dtype)
    scales[:] = np.ldexp(np.float32(1), powers)
    for rows in _chunks(elements):
        if layout.dtype == "float32":
            codes[rows] = to_e4m3(elements[rows] / scales[rows, None])
        else:
            tables, which = _tables(_encode_table, layout.dtype, powers[rows])
            index = elements[rows].astype(np.intp)
            index += (which << 16)[:, None]
            codes[rows] = tables.take(index)
    return out


def decode(layout: Layout, stored: Octets, out: Octets) -> None:
    """Decode the fp8 form of one part into `out`.

    Raises:
        WrongByteCount: a length is not that of the layout.
    """
    _check(len(stored), stored_bytes(layout, "fp8"))
    _check(len(out), layout.part_bytes)
    groups = _groups(layout)
    codes = stored[SCALE_BYTES * groups :].reshape(groups, -1)
    target = _elements(out, layout.dtype).reshape(groups, -1)
    scales = stored[: SCALE_BYTES * groups].view("<f4")
    powers = np.frexp(scales)[1].astype(np.intp) - 1
    if layout.dtype == "float32" or codes.shape[1] % 2:
        make, bits = _decode_table, 8
    else:  # two codes at a time: half the look-ups
        make, bits = _decode_pairs, 16
        codes, target = codes.view("<u2"), target.view("<u4")
    for rows in _chunks(codes):
        tables, which = _tables(make, layout.dtype, powers[rows])
        index = codes[rows].astype(np.intp)
        index += (which << bits)[:, None]
        target[rows] = tables.take(index)


def to_e4m3(values: npt.NDArray[Any]) -> Octets:
    """The nearest e4m3 code of each value, ties to even; beyond 448 is 448, not finite is NaN."""
    with np.errstate(invalid="ignore"):
        size = np.minimum(np.abs(values.astype(np.float64)), MAX_E4M3)
    is_finite = np.isfinite(values)
    size = np.where(is_finite, size, 0.0)
    power = np.where(size < 2**-6, -6, np.frexp(size)[1] - 1)  # subnormal codes have the least
    steps = np.rint(np.ldexp(size, 3 - power))  # 16: the next power's 8
    codes = np.where(is_finite, (power + 6) * 8 + steps, NAN_CODE).astype(np.uint8)
    return cast(Octets, codes | (np.signbit(values).astype(np.uint8) << 7))


# ------------------------------------------------------------ within


def _check(got: int, expected: int) -> None:
    if got != expected:
        raise WrongByteCount(f"{got} bytes where the layout has {expected}")


def _groups(layout: Layout) -> int:
    return layout.layers * layout.kv_per_token * layout.heads_per_part


def _elements(data: Octets, dtype: str) -> npt.NDArray[Any]:
    """16 bit elements as unsigned integers, 32 bit ones as floats."""
    return data.view("<f4" if dtype == "float32" else "<u2")


def _chunks(rows: npt.NDArray[Any]) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS // rows.shape[1])
    return [slice(i, i + step) for i in range(0, len(rows), step)]


def _values(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """The values of 16 bit floats, as float32."""
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _powers(elements: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.intp]:
    """For each group the smallest k with which its largest finite element is at most 448 * 2**k."""
    if dtype == "float32":
        sizes = np.abs(elements)
        largest = np.where(np.isfinite(sizes), sizes, 0).max(axis=1)
    else:  # bits of positive floats are ordered as the floats are
        bits = (elements & 0x7FFF).max(axis=1)
        infinity = 0x7C00 if dtype == "float16" else 0x7F80
        for row in np.flatnonzero(bits >= infinity):
            sizes = elements[row] & 0x7FFF
            bits[row] = np.where(sizes < infinity, sizes, 0).max()
        largest = _values(bits, dtype)
    mantissa, power = np.frexp(largest)
    needed = power - np.where(mantissa <= MAX_E4M3 / 512, 9, 8)
    powers: npt.NDArray[np.intp] = np.maximum(
        np.where(largest > 0, needed, 0), _LOWEST_POWER
    ).astype(np.intp)
    return powers


def _tables(
    make: Any, dtype: str, powers: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.intp]]:
    """The tables of all powers that occur, concatenated, and the number of each row's table."""
    occurring, which = np.unique(powers, return_inverse=True)
    return np.concatenate([make(dtype, int(power)) for power in occurring]), which


@lru_cache(maxsize=64)  # 64 KiB each; real models need about ten
def _encode_table(dtype: str, power: int) -> Octets:
    with np.errstate(invalid="ignore"):
        values = _values(np.arange(1 << 16, dtype=np.uint16), dtype).astype(np.float64)
    return to_e4m3(np.ldexp(values, -power))


@lru_cache(maxsize=64)
def _decode_table(dtype: str, power: int) -> npt.NDArray[Any]:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(
        exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(mantissa / 8.0, -6)
    )
    size = np.minimum(np.ldexp(size, power), _LARGEST[dtype])
    size[(codes & 0x7F) == NAN_CODE] = np.nan
    values = np.where(codes < 128, size, -size)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    values = values.astype(np.float32)
    return values if dtype == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16)


@lru_cache(maxsize=64)  # 256 KiB each
def _decode_pairs(dtype: str, power: int) -> npt.NDArray[np.uint32]:
    table: npt.NDArray[np.uint32] = _decode_table(dtype, power).astype(np.uint32)
    return np.ravel(table[None, :] | table[:, None] << np.uint32(16))

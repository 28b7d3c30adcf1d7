"""Turns callers' memory into addresses: numpy arrays, torch tensors, and buffer objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.blocks.resharding import TransferPlan
from kvpool.errors import InvalidArgument, WrongByteCount
from kvpool.transports.copy import Int64Array


@dataclass(slots=True, frozen=True, eq=False)
class BlockSpans:
    """Blocks by address, each in one or several runs of bytes, as in an engine's paged KV memory.

    Block i consists of `lengths[j]` bytes at `addresses[i, j]` for every j, in order. The caller
    guarantees that every address is valid.

    Args:
        addresses: int64, shape [blocks, runs]; addresses in this process's host memory.
        lengths: int64, shape [runs]; bytes of each run, the same for all blocks.
        owner: keeps the memory alive.

    Raises:
        InvalidArgument: a shape or dtype is wrong, or a length or an address is not positive.
    """

    addresses: Int64Array
    lengths: Int64Array
    owner: Any

    def __post_init__(self) -> None:
        shapes = (self.addresses.shape, self.lengths.shape)
        if len(shapes[0]) != 2 or len(shapes[1]) != 1 or shapes[0][1:] != shapes[1]:
            raise InvalidArgument(
                f"addresses of shape {shapes[0]} and lengths of shape {shapes[1]}",
                hint="pass [blocks, runs] and [runs]",
            )
        if self.addresses.dtype != np.int64 or self.lengths.dtype != np.int64:
            raise InvalidArgument("addresses and lengths must be arrays of int64")
        if (self.lengths <= 0).any() or (self.addresses <= 0).any():
            raise InvalidArgument("an address or a length is not positive")

    def __len__(self) -> int:
        return len(self.addresses)


def memory_span(data: Any, *, writable: bool) -> tuple[int, int, Any]:
    """Address, size in bytes and owner of one contiguous buffer of host memory.

    Raises:
        InvalidArgument: `data` is not contiguous, is read-only but `writable` is asked for, is on a
            device, or is no buffer.
    """
    if hasattr(data, "data_ptr"):  # torch, without importing it
        if data.device.type != "cpu":
            raise InvalidArgument(
                f"a tensor on {data.device} cannot be a block buffer here", hint="use a CPU tensor"
            )
        if not data.is_contiguous():
            raise InvalidArgument("the tensor is not contiguous", hint="pass t.contiguous()")
        return data.data_ptr(), data.numel() * data.element_size(), data
    if isinstance(data, np.ndarray):
        array = data
        if not array.flags.c_contiguous:
            raise InvalidArgument("the array is not C-contiguous")
        if writable and not array.flags.writeable:
            raise InvalidArgument("the array is read-only")
        return int(array.ctypes.data), array.nbytes, array
    try:
        view = memoryview(data)
    except TypeError as error:
        raise InvalidArgument(
            f"{type(data).__name__} is not a buffer",
            hint="pass numpy, torch, bytearray or memoryview",
        ) from error
    if writable and view.readonly:
        raise InvalidArgument(f"{type(data).__name__} is read-only", hint="pass a bytearray")
    if not view.c_contiguous:
        raise InvalidArgument("the buffer is not contiguous")
    array = np.frombuffer(view, dtype=np.uint8)
    return int(array.ctypes.data) if array.nbytes else 0, array.nbytes, array


def block_addresses(
    data: Any, count: int, plan: TransferPlan, *, writable: bool
) -> tuple[Int64Array, Any, TransferPlan]:
    """Addresses of `count` blocks in the caller's memory, its owner, and a plan that fits it.

    Args:
        data: as for `part_addresses`, or `BlockSpans` of `count` blocks.
        plan: a plan for memory in which each block is contiguous.

    Returns:
        Addresses of shape [count], or [count, runs] for `BlockSpans`; the owner; and the plan, cut
        to the runs.

    Raises:
        WrongByteCount: `data` has the wrong size.
        InvalidArgument: `data` is not usable memory, or is `BlockSpans` while the plan has several
            pieces.
    """
    if not isinstance(data, BlockSpans):
        return *part_addresses(data, count, plan.rank_bytes, writable=writable), plan
    if len(data) != count:
        raise WrongByteCount(f"{count} blocks need {count} rows of addresses, got {len(data)}")
    return data.addresses, data.owner, plan.in_runs(data.lengths)


def part_addresses(
    data: Any, count: int, part_bytes: int, *, writable: bool
) -> tuple[Int64Array, Any]:
    """Addresses of `count` block parts of `part_bytes` bytes each, and the owner of the memory.

    Args:
        data: one contiguous buffer of exactly `count * part_bytes` bytes (of any shape and dtype),
            or a sequence of `count` buffers of `part_bytes` each.

    Raises:
        WrongByteCount: the sizes do not match.
        InvalidArgument: a buffer is not contiguous, read-only, on a device, or no buffer.
    """
    if isinstance(data, Sequence) and not isinstance(data, (bytes, bytearray, memoryview, str)):
        if len(data) != count:
            raise WrongByteCount(f"{count} blocks need {count} buffers, got {len(data)}")
        addresses = np.empty(count, dtype=np.int64)
        owners = []
        for i, piece in enumerate(data):
            address, size, owner = memory_span(piece, writable=writable)
            if size != part_bytes:
                raise WrongByteCount(f"buffer {i} has {size} bytes, a block part has {part_bytes}")
            addresses[i] = address
            owners.append(owner)
        return addresses, owners
    address, size, owner = memory_span(data, writable=writable)
    if size != count * part_bytes:
        raise WrongByteCount(
            f"{count} blocks of {part_bytes} bytes are {count * part_bytes} bytes, got {size}"
        )
    return address + np.arange(count, dtype=np.int64) * part_bytes, owner

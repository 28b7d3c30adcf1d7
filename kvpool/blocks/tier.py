"""The tiers of a pool node."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """Where a copy of a block is kept, fastest first.

    The value is at once the rank (smaller is faster), the code on the wire and the order. `str`
    gives the name that people read and write: "hbm", "dram" or "nvme".
    """

    HBM = 0
    DRAM = 1
    NVME = 2

    def __str__(self) -> str:
        return self.name.lower()


_BY_CODE = tuple(Tier)


def unpack_tiers(codes: bytes) -> tuple[Tier, ...]:
    """The tiers of a packed list, one byte each."""
    return tuple([_BY_CODE[code] for code in codes])

"""What a benchmark reports: one row per measurement, and the arithmetic behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE_BYTES = 4096


@dataclass(slots=True, frozen=True)
class Row:
    """One operation of one shape.

    `gbps` and the percentiles are of warm calls; `first_gbps` is of the first call. GB are 10^9
    bytes.
    """

    op: str
    transport: str
    block_bytes: int
    batch: int
    gbps: float
    ratio_memcpy: float
    p50_us: float
    p99_us: float
    first_gbps: float
    iterations: int

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of values in ascending order."""
    return sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))]


def row(
    op: str,
    transport: str,
    block_bytes: int,
    batch: int,
    first_s: float,
    seconds: Sequence[float],
    memcpy_s: float,
) -> Row:
    """A row from the seconds of the first call, of the warm calls, and of a memcpy of the same bytes."""
    size = block_bytes * batch
    ordered = sorted(seconds)
    p50 = percentile(ordered, 0.5)
    return Row(
        op=op,
        transport=transport,
        block_bytes=block_bytes,
        batch=batch,
        gbps=size / p50 / 1e9,
        ratio_memcpy=memcpy_s / p50,
        p50_us=p50 * 1e6,
        p99_us=percentile(ordered, 0.99) * 1e6,
        first_gbps=size / first_s / 1e9,
        iterations=len(ordered),
    )


def aligned(size: int) -> npt.NDArray[np.uint8]:
    """Memory that begins at a page, as an engine's KV does; numpy's own begins 16 bytes into one."""
    memory = np.empty(size + PAGE_BYTES, dtype=np.uint8)
    skip = -memory.ctypes.data % PAGE_BYTES
    return memory[skip : skip + size]

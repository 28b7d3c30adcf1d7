"""A trace as flat arrays in temporary files: read once, replayed many times, in bounded memory.

The files take 24 bytes per request and 8 per block (16 with the next uses), in `TMPDIR`.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.errors import KvpoolError
from planner.traces import (
    MOONCAKE_BLOCK_TOKENS,
    EmptyTrace,
    Tokenize,
    TraceReport,
    TraceRequest,
    open_trace,
    read_trace,
    why_empty,
)

NEVER = (1 << 63) - 1  # the next use of a block that is not used again
_FLUSH = 1 << 16  # numbers kept in memory before they are written
_BUCKET = 1 << 22  # blocks whose next uses are found at a time

Numbers = npt.NDArray[Any]


@dataclass(slots=True, frozen=True)
class Span:
    """Consecutive requests of a trace, as plain lists, which Python iterates fastest."""

    times_s: list[float]
    input_tokens: list[int]
    output_tokens: list[int]
    ends: list[int]  # where each request's blocks end, counted from the start of the trace
    first_block: int


class CompactTrace:
    """The requests of a trace in the order of time. `close` it, or use `with`, to remove its files.

    Attributes:
        requests, blocks: their numbers.
        block_tokens: tokens per block.
    """

    def __init__(self, directory: tempfile.TemporaryDirectory[str], block_tokens: int) -> None:
        self._directory = directory
        self.block_tokens = block_tokens
        root = Path(directory.name)
        self._times = _mapped(root / "times", "<f8")
        self._inputs = _mapped(root / "inputs", "<i8")
        self._outputs = _mapped(root / "outputs", "<i8")
        self._lengths = _mapped(root / "lengths", "<i8")
        self._ids = _mapped(root / "ids", "<i8")
        self._next: Numbers | None = None
        self.requests = len(self._times)
        self.blocks = len(self._ids)

    def __enter__(self) -> CompactTrace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the files."""
        self._directory.cleanup()

    @property
    def ids(self) -> Numbers:
        """The block ids of all requests, one after another."""
        return self._ids

    @property
    def lengths(self) -> Numbers:
        """The number of blocks of each request."""
        return self._lengths

    @property
    def times_s(self) -> Numbers:
        """The arrival time of each request."""
        return self._times

    @property
    def input_tokens(self) -> Numbers:
        """Tokens of each prompt."""
        return self._inputs

    @property
    def output_tokens(self) -> Numbers:
        """Tokens of each answer."""
        return self._outputs

    @property
    def span_s(self) -> tuple[float, float]:
        """Time of the first and of the last request."""
        return float(self._times[0]), float(self._times[-1])

    def spans(self, blocks: int = 1 << 18) -> Iterator[Span]:
        """The requests in pieces of about `blocks` blocks, and of at least one request."""
        start, first_block = 0, 0
        while start < self.requests:
            lengths = self._lengths[start : start + max(1, blocks // 8)]
            ends = np.cumsum(lengths) + first_block
            count = max(1, int(np.searchsorted(ends, first_block + blocks, side="right")))
            stop = start + count
            yield Span(
                self._times[start:stop].tolist(),
                self._inputs[start:stop].tolist(),
                self._outputs[start:stop].tolist(),
                ends[:count].tolist(),
                first_block,
            )
            start, first_block = stop, int(ends[count - 1])

    def chains(self) -> Iterator[list[int]]:
        """The block ids of each request."""
        for span in self.spans():
            ids = self._ids[span.first_block : span.ends[-1]].tolist()
            start = 0
            for end in span.ends:
                end -= span.first_block
                yield ids[start:end]
                start = end

    def next_uses(self) -> Numbers:
        """For each use of a block, the position of its next use, or `NEVER`.

        Computed once, in buckets of ids that fit into memory.
        """
        if self._next is None:
            path = Path(self._directory.name) / "next"
            self._next = _find_next_uses(self._ids, path, _BUCKET)
        return self._next


def load_trace(
    path: str,
    *,
    block_tokens: int | None = None,
    time_unit_s: float | None = None,
    is_strict: bool = False,
    tokenize: Tokenize | None = None,
) -> tuple[CompactTrace, TraceReport]:
    """Read a file (see `read_trace`) into a compact trace.

    Raises:
        ConfigError: it cannot be read, holds no request, or a line is wrong and `is_strict`.
    """
    report = TraceReport()
    requests = read_trace(
        open_trace(path),
        report,
        name=path,
        block_tokens=block_tokens,
        time_unit_s=time_unit_s,
        is_strict=is_strict,
        tokenize=tokenize,
    )
    try:
        trace = compact(requests)
    except EmptyTrace as error:
        raise EmptyTrace(f"{path} holds no request{why_empty(report)}") from error
    trace.block_tokens = report.block_tokens
    return trace, report


def compact(
    requests: Iterable[TraceRequest], block_tokens: int = MOONCAKE_BLOCK_TOKENS
) -> CompactTrace:
    """Write requests to temporary files, sorted by time.

    Raises:
        EmptyTrace: there is no request.
        KvpoolError: the temporary files cannot be written.
    """
    directory = tempfile.TemporaryDirectory(prefix="kvpool-trace-", ignore_cleanup_errors=True)
    try:
        is_sorted = _write(requests, Path(directory.name))
        trace = CompactTrace(directory, block_tokens)
        if not trace.requests:
            raise EmptyTrace("the trace holds no request")
        return trace if is_sorted else _sorted(trace)
    except OSError as error:
        directory.cleanup()
        raise KvpoolError(
            f"cannot write temporary files to {tempfile.gettempdir()}: {error.strerror or error}",
            hint="set TMPDIR to a directory with more space",
        ) from error
    except BaseException:
        directory.cleanup()
        raise


def _write(requests: Iterable[TraceRequest], root: Path) -> bool:
    times = array("d")
    inputs, outputs, lengths, ids = array("q"), array("q"), array("q"), array("q")
    columns: dict[str, array[Any]] = {
        "times": times,
        "inputs": inputs,
        "outputs": outputs,
        "lengths": lengths,
        "ids": ids,
    }
    files = {name: (root / name).open("wb") for name in columns}
    latest, is_sorted = float("-inf"), True
    try:
        for request in requests:
            is_sorted = is_sorted and request.time_s >= latest
            latest = request.time_s
            times.append(request.time_s)
            inputs.append(request.input_tokens)
            outputs.append(request.output_tokens)
            lengths.append(len(request.block_ids))
            ids.extend(request.block_ids)
            if len(ids) >= _FLUSH or len(times) >= _FLUSH:
                _flush(columns, files)
        _flush(columns, files)
    finally:
        for file in files.values():
            file.close()
    return is_sorted


def _flush(columns: dict[str, array[Any]], files: dict[str, Any]) -> None:
    for name, numbers in columns.items():
        numbers.tofile(files[name])
        del numbers[:]


def _sorted(trace: CompactTrace) -> CompactTrace:
    """The same requests by time. Requests with equal times keep their order."""
    order = np.argsort(trace.times_s, kind="stable")
    starts = np.cumsum(trace.lengths) - trace.lengths

    def by_time() -> Iterator[TraceRequest]:
        for at in order.tolist():
            start = int(starts[at])
            yield TraceRequest(
                float(trace.times_s[at]),
                int(trace.input_tokens[at]),
                int(trace.output_tokens[at]),
                trace.ids[start : start + int(trace.lengths[at])].tolist(),
            )

    try:
        return compact(by_time(), trace.block_tokens)
    finally:
        trace.close()


def _mapped(path: Path, kind: str) -> Numbers:
    # An empty file cannot be mapped.
    if not path.stat().st_size:
        return np.zeros(0, kind)
    return np.memmap(path, kind, mode="r")


def _find_next_uses(ids: Numbers, path: Path, bucket: int) -> Numbers:
    path.touch()
    if not len(ids):
        return np.zeros(0, "<i8")
    found: Numbers = np.memmap(path, "<i8", mode="w+", shape=ids.shape)
    buckets = -(-len(ids) // bucket)
    for number in range(buckets):
        pieces = []
        for start in range(0, len(ids), bucket):
            piece = np.asarray(ids[start : start + bucket])
            mixed = piece.view("<u8") * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
            pieces.append(np.flatnonzero(mixed % np.uint64(buckets) == number) + start)
        positions = np.concatenate(pieces)
        mine = ids[positions]
        order = np.argsort(mine, kind="stable")
        positions, mine = positions[order], mine[order]
        following = np.full(len(positions), NEVER, "<i8")
        following[:-1][mine[1:] == mine[:-1]] = positions[1:][mine[1:] == mine[:-1]]
        found[positions] = following
    return found

"""Measures how fast an engine computes prompts and decodes, alone in its process or behind a running worker.

It measures; what follows from it is fitted elsewhere (`kvpool worker profile`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool.blocks.hashing import token_bytes
from kvpool.errors import InvalidArgument, Unavailable
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from workers.engine.contract import Engine, SequenceState

DECODE_STEPS = 8
VOCABULARY = 997  # token ids used, small enough for every model
TIMEOUT_S = 600.0


@dataclass(slots=True)
class Samples:
    """Samples: (new tokens, reused tokens, seconds), (context tokens, sequences, seconds a step)."""

    prefill: list[tuple[int, int, float]] = field(default_factory=list)
    decode: list[tuple[int, int, float]] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class MeasurementGrid:
    """What is measured: prompts of these lengths, and each of these batches at each length.

    Raises:
        InvalidArgument: nothing, or a length or batch that is not positive.
    """

    lengths: tuple[int, ...] = (128, 512, 1024, 2048)
    batches: tuple[int, ...] = (1, 2, 4)

    def __post_init__(self) -> None:
        if not self.lengths or not self.batches or min(*self.lengths, *self.batches, 1) < 1:
            raise InvalidArgument("lengths and batches must be positive, at least one of each")

    def within(self, max_model_tokens: int) -> MeasurementGrid:
        """As far as the model's context goes."""
        room = max_model_tokens - DECODE_STEPS - 2
        kept = tuple(length for length in self.lengths if length <= room)
        if not kept:
            raise InvalidArgument(f"no length fits into the model's {max_model_tokens} tokens")
        return MeasurementGrid(kept, self.batches)


OnStep = Callable[[str], None]


def measure_engine(
    engine: Engine, grid: MeasurementGrid, on_step: OnStep = lambda _text: None
) -> Samples:
    """Measure an engine that nobody else uses; the first, unmeasured round warms it up."""
    measured = Samples()
    grid = grid.within(engine.max_model_tokens)
    _round(engine, min(grid.lengths), 1, Samples())
    for length in grid.lengths:
        for batch in grid.batches:
            _round(engine, length, batch, measured)
            on_step(f"{length} tokens, batch {batch}")
    return measured


def _round(engine: Engine, length: int, batch: int, measured: Samples) -> None:
    """Prefill `batch` prompts one after the other, then decode them in turns."""
    sampling = m.Sampling(DECODE_STEPS, ignore_eos=True)
    with contextlib.ExitStack() as stack:
        sequences: list[SequenceState] = []
        for number in range(batch):
            sequence = engine.start(_prompt(length, number), DECODE_STEPS + 1)
            stack.callback(engine.close, sequence)
            started = time.perf_counter()
            engine.prefill(sequence)
            measured.prefill.append((length, 0, time.perf_counter() - started))
            sequences.append(sequence)
        started = time.perf_counter()
        for _ in range(DECODE_STEPS):
            for sequence in sequences:
                engine.decode(sequence, engine.next_token(sequence, sampling))
        step_s = (time.perf_counter() - started) / DECODE_STEPS
        measured.decode.append((batch * (length + DECODE_STEPS // 2), batch, step_s))


async def measure_worker(
    client: WireClient,
    worker: m.WorkerDescriptor,
    grid: MeasurementGrid,
    on_step: OnStep = lambda _text: None,
) -> Samples:
    """Measure a running worker by requests that neither read nor write the pool.

    What others ask of it meanwhile is measured, too.

    Raises:
        Unavailable, Overloaded, EngineFailed: it did not serve one.
    """
    measured = Samples()
    grid = grid.within(worker.max_model_tokens)
    for length in grid.lengths:
        for batch in grid.batches:
            replies = await asyncio.gather(
                *(_generate(client, worker, length, number) for number in range(batch))
            )
            if batch == 1:  # with more at once a prefill's time holds waits for the others
                seconds = replies[0].phases["prefill_compute_time"]
                measured.prefill.append((replies[0].computed_tokens, 0, seconds))
            steps = [r.phases.get("per_token_decode_time", 0.0) for r in replies]
            step_s = float(np.median([step for step in steps if step > 0] or [0.0]))
            if step_s:
                context = batch * (length + DECODE_STEPS // 2)
                measured.decode.append((context, batch, step_s))
            on_step(f"{length} tokens, batch {batch}")
    return measured


async def _generate(
    client: WireClient, worker: m.WorkerDescriptor, length: int, number: int
) -> m.GenerateReply:
    request = m.Generate(
        f"profile-{length}-{number}-{time.monotonic_ns()}",
        worker.namespace.namespace_id,
        bytes(token_bytes(_prompt(length, time.monotonic_ns() + number))),
        *(b"", [], []),
        m.Sampling(DECODE_STEPS + 1, ignore_eos=True),
        TIMEOUT_S,
        use_pool=False,
        store=False,
    )
    reply = None
    async for item in client.stream(request, TIMEOUT_S):
        if isinstance(item, m.GenerateReply):
            reply = item
    if reply is None:
        raise Unavailable(f"worker {worker.worker_id} ended the stream without a result")
    return reply


def _prompt(length: int, salt: int) -> np.ndarray:
    """Tokens that nobody asked before, so that no cache of the engine's own helps."""
    numbers = np.arange(length, dtype=np.int64) * 7919
    return (numbers + salt) % VOCABULARY + 1


def parse_numbers(text: str) -> tuple[int, ...]:
    """ "128,512" as numbers.

    Raises:
        InvalidArgument: something else.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InvalidArgument(f"{text!r} is no list of numbers", hint="as in 128,512") from None


__all__: Sequence[str] = (
    "MeasurementGrid",
    "Samples",
    "measure_engine",
    "measure_worker",
    "parse_numbers",
)

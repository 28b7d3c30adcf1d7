"""Measures how fast an engine prefills and decodes, alone in this process or behind a running worker.

`workers.service.profile_fit` fits a cost profile to the samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvpool.blocks.hashing import token_bytes
from kvpool.errors import InvalidArgument, Unavailable
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from workers.engine.contract import Engine, SequenceState

DECODE_STEPS = 8
VOCABULARY = 997  # token ids below this exist in every model
TIMEOUT_S = 600.0


@dataclass(slots=True)
class Samples:
    """Samples: (new tokens, reused tokens, seconds), (context tokens, sequences, seconds a step)."""

    prefill: list[tuple[int, int, float]] = field(default_factory=list)
    decode: list[tuple[int, int, float]] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class MeasurementGrid:
    """The prompt lengths to measure, and the batches to measure at each length.

    Raises:
        InvalidArgument: there is no length or no batch, or one is not positive.
    """

    lengths: tuple[int, ...] = (128, 512, 1024, 2048)
    batches: tuple[int, ...] = (1, 2, 4)

    def __post_init__(self) -> None:
        if not self.lengths or not self.batches or min(*self.lengths, *self.batches, 1) < 1:
            raise InvalidArgument("lengths and batches must be positive, at least one of each")

    def within(self, max_model_tokens: int) -> MeasurementGrid:
        """The part whose lengths fit into the model's context.

        Raises:
            InvalidArgument: no length fits.
        """
        longest = max_model_tokens - DECODE_STEPS - 2
        kept = tuple(length for length in self.lengths if length <= longest)
        if not kept:
            raise InvalidArgument(f"no length fits into the model's {max_model_tokens} tokens")
        return MeasurementGrid(kept, self.batches)


OnStep = Callable[[str], None]


def measure_engine(
    engine: Engine, grid: MeasurementGrid, on_step: OnStep = lambda _text: None
) -> Samples:
    """Measure an engine that nobody else uses. A first, unmeasured round warms it up."""
    measured = Samples()
    grid = grid.within(engine.max_model_tokens)
    _round(engine, min(grid.lengths), 1, Samples())
    for length in grid.lengths:
        for batch in grid.batches:
            _round(engine, length, batch, measured)
            on_step(f"{length} tokens, batch {batch}")
    return measured


def _round(engine: Engine, length: int, batch: int, measured: Samples) -> None:
    """Prefill `batch` prompts one after another, then decode them in turns."""
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

    Other requests to the worker at the same time distort the figures.

    Raises:
        Unavailable, Overloaded, EngineFailed: the worker did not serve a request.
    """
    measured = Samples()
    grid = grid.within(worker.max_model_tokens)
    for length in grid.lengths:
        for batch in grid.batches:
            replies = await asyncio.gather(
                *(_generate(client, worker, length, number) for number in range(batch))
            )
            if batch == 1:  # with more at once, a prefill's time includes waits for the others
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
    """The tokens of a new prompt, so that the engine's own cache does not help."""
    numbers = np.arange(length, dtype=np.int64) * 7919
    return (numbers + salt) % VOCABULARY + 1


def parse_numbers(text: str) -> tuple[int, ...]:
    """The numbers in a text like "128,512".

    Raises:
        InvalidArgument: the text is not a list of numbers.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InvalidArgument(f"{text!r} is not a list of numbers", hint="write 128,512") from None

"""The fake engine keeps the contract of engines, sleeps as long as it says, and detects wrong KV."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.config.settings import FakeEngineConfig
from kvpool.errors import EngineFailed, InvalidArgument, WrongByteCount
from kvpool.wire.messages import Sampling
from workers.engine.contract import LayerChunk
from workers.engine.fake_engine import FakeEngine

CONFIG = FakeEngineConfig(
    prefill_base_s=1.0,
    prefill_token_s=0.1,
    prefill_attention_s=0.001,
    tpot_base_s=2.0,
    tpot_context_s=0.0,
    tpot_sequence_s=0.5,
    layers=2,
    bytes_per_token=32,
)
PROMPT = np.arange(70)


class Clock:
    def __init__(self) -> None:
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(clock: Clock) -> FakeEngine:
    return FakeEngine(CONFIG, block_tokens=16, sleep=clock.sleep)


def test_a_prefill_takes_what_the_cost_model_says_and_hands_out_every_layer_once(
    engine: FakeEngine, clock: Clock
) -> None:
    sequence = engine.start(PROMPT, 4)
    chunks: list[LayerChunk] = []
    engine.prefill(sequence, chunks.append)
    assert sum(clock.slept) == pytest.approx(1.0 + 0.1 * 70 + 0.001 * 70 * 35)
    assert [(c.layer, c.first_block, c.blocks.shape) for c in chunks] == [
        (0, 0, (4, engine.layout.layer_bytes)),
        (1, 0, (4, engine.layout.layer_bytes)),
    ]
    whole = np.concatenate([c.blocks for c in chunks], axis=1)
    assert np.array_equal(whole, engine.export_blocks(sequence, 0, 4))


def test_reuse_saves_time_and_equal_prompts_have_equal_blocks(
    engine: FakeEngine, clock: Clock
) -> None:
    first = engine.start(PROMPT, 4)
    engine.prefill(first)
    blocks = engine.export_blocks(first, 0, 3)
    clock.slept.clear()
    second = engine.start(PROMPT, 4)
    engine.load_prefix(second, blocks)
    engine.prefill(second)
    assert second.computed_tokens == 70 - 48
    assert sum(clock.slept) == pytest.approx(1.0 + 0.1 * 22 + 0.001 * 22 * (48 + 11))
    assert engine.next_token(first, Sampling(1)) == engine.next_token(second, Sampling(1))


def test_kv_of_another_prompt_or_one_wrong_byte_is_detected(engine: FakeEngine) -> None:
    other = engine.start(PROMPT + 1, 4)
    engine.prefill(other)
    sequence = engine.start(PROMPT, 4)
    with pytest.raises(EngineFailed):
        engine.load_prefix(sequence, engine.export_blocks(other, 0, 3))
    own = engine.start(PROMPT, 4)
    engine.prefill(own)
    wrong = engine.export_blocks(own, 0, 3).copy()
    wrong[2, -1] ^= 1
    with pytest.raises(EngineFailed):
        engine.load_prefix(sequence, wrong)
    with pytest.raises(WrongByteCount):
        engine.load_prefix(sequence, wrong[:, :-1])


def test_a_batch_shares_the_time_of_a_step(engine: FakeEngine, clock: Clock) -> None:
    sequences = [engine.start(PROMPT, 4) for _ in range(2)]
    for sequence in sequences:
        engine.prefill(sequence)
        engine.decode(sequence, 1)
    clock.slept.clear()
    for sequence in sequences:
        engine.decode(sequence, 1)
    assert sum(clock.slept) == pytest.approx(2.0 + 0.5 * 2)
    engine.close(sequences[0])
    clock.slept.clear()
    engine.decode(sequences[1], 1)
    assert sum(clock.slept) == pytest.approx(2.5)


def test_misuse_is_refused(engine: FakeEngine) -> None:
    with pytest.raises(InvalidArgument):
        engine.start(np.array([], np.int64), 1)
    sequence = engine.start(PROMPT, 0)
    with pytest.raises(InvalidArgument):
        engine.next_token(sequence, Sampling(1))
    engine.prefill(sequence)
    with pytest.raises(InvalidArgument):
        engine.decode(sequence, 1)
    engine.close(sequence)
    with pytest.raises(InvalidArgument):
        engine.export_blocks(sequence, 0, 1)

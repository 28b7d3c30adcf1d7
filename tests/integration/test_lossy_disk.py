"""What fp8 on disk does to a real model: SmolLM2's KV goes through it, and the model goes on from there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoTokenizer

from kvpool.wire.messages import Sampling
from tiers.store.fp8 import decode, encode
from workers.engine.contract import Bytes, Engine, SequenceState
from workers.engine.kv_cache import TORCH_DTYPES
from workers.engine.model_files import default_cache_dir, prepare_model
from workers.engine.transformers_engine import TransformersEngine

STEPS = 24
GREEDY = Sampling(max_tokens=STEPS)
SUBJECTS = ("the printing press", "key-value caches", "a function that computes Fibonacci numbers")
TOPIC = "The pool keeps blocks of computed attention state under the hash of all tokens before. "

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield TransformersEngine(prepare_model("smollm2-135m", default_cache_dir()), block_tokens=64)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[npt.NDArray[Any]]:
    tokenizer = AutoTokenizer.from_pretrained(prepare_model("smollm2-135m", default_cache_dir()))
    texts = [TOPIC * 24 + f"\n\nNow explain {subject} in a few words." for subject in SUBJECTS]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in texts
    ]
    return [np.array(tokenizer(chat)["input_ids"]) for chat in chats]


def continued(
    engine: Engine, sequence: SequenceState, forced: list[int] | None = None
) -> list[int]:
    """The most likely next token at each step, going on with it or with `forced`."""
    tokens = []
    for step in range(STEPS):
        tokens.append(engine.next_token(sequence, GREEDY))
        engine.decode(sequence, forced[step] if forced else tokens[-1])
    return tokens


def resumed(engine: Engine, prompt: npt.NDArray[Any], blocks: Bytes) -> SequenceState:
    sequence = engine.start(prompt, STEPS)
    engine.load_prefix(sequence, blocks)
    engine.prefill(sequence)
    return sequence


def through_fp8(engine: Engine, blocks: Bytes) -> Bytes:
    out = np.empty_like(blocks)
    for block, target in zip(blocks, out, strict=True):
        decode(engine.layout, encode(engine.layout, block), target)
    return out


def test_real_kv_goes_through_fp8_with_a_bounded_error_and_nearly_the_same_next_tokens(
    engine: Engine, prompts: list[npt.NDArray[Any]]
) -> None:
    agreeing = 0
    for prompt in prompts:
        sequence = engine.start(prompt, STEPS)
        engine.prefill(sequence)
        blocks = engine.export_blocks(sequence, 0, len(prompt) // 64)
        exact = continued(engine, sequence)
        assert continued(engine, resumed(engine, prompt, blocks)) == exact

        lossy = through_fp8(engine, blocks)
        shape = (len(blocks), *engine.layout.part_shape)
        dtype = TORCH_DTYPES[engine.layout.dtype]
        before, after = (
            torch.from_numpy(kv).view(dtype).reshape(shape).double() for kv in (blocks, lossy)
        )
        error = (after - before).abs()
        largest = before.abs().amax(dim=(-2, -1), keepdim=True)
        assert (error <= torch.maximum(before.abs() / 16, largest * 2.0**-17)).all()
        for kv in (0, 1):
            power = before[:, :, kv].square().sum()
            assert 0.02 < (error[:, :, kv].square().sum() / power).sqrt() < 0.03

        # Step by step on the exact text: else one disagreement would count as many.
        tokens = continued(engine, resumed(engine, prompt, lossy), forced=exact)
        agreeing += sum(a == b for a, b in zip(tokens, exact, strict=True))
    print(f"next tokens that agree: {agreeing} of {STEPS * len(prompts)}")
    assert agreeing >= 0.88 * STEPS * len(prompts)  # seen: 71 of 72

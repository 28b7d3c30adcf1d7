"""Drawing from logits at the limits of float32: temperatures and top_p that are 0 in effect."""

from __future__ import annotations

import pytest
import torch

from kvpool.wire.messages import Sampling
from workers.engine.sampling import draw

LOGITS = torch.tensor([0.0, 3.0, -2.0, 2.999])


@pytest.mark.parametrize("tiny", [1e-300, 1e-46, 1e-38, 1e-12])
def test_a_tiny_temperature_or_top_p_takes_the_best_token(tiny: float) -> None:
    for seed in range(16):
        assert draw(LOGITS, Sampling(1, temperature=tiny, seed=seed), position=seed) == 1
        one = Sampling(1, temperature=1.0, top_p=tiny, seed=seed)
        assert draw(LOGITS, one, position=seed) == 1


def test_a_moderate_temperature_still_draws() -> None:
    drawn = {draw(LOGITS, Sampling(1, temperature=1.0, seed=s), position=0) for s in range(64)}
    assert drawn >= {1, 3}

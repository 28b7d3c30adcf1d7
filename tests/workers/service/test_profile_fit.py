"""Cost profiles fitted to measurements."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import InvalidArgument
from workers.service.profile_fit import fit_decode, fit_prefill

LENGTHS = (64, 256, 1024, 4096)
coefficients = st.floats(1e-7, 1e-1)


@given(coefficients, coefficients, st.floats(1e-9, 1e-5))
def test_a_fit_finds_the_coefficients_that_made_the_samples(a: float, b: float, c: float) -> None:
    samples = [(n, r, a + b * n + c * n * (r + n / 2)) for n in LENGTHS for r in (0, 512)]
    fitted = fit_prefill(samples)
    for new, reused, seconds in samples:
        predicted = fitted.base_s + fitted.token_s * new
        predicted += fitted.attention_s * new * (reused + new / 2)
        assert predicted == pytest.approx(seconds, rel=0.02)


def test_a_coefficient_measured_as_zero_or_less_stays_positive() -> None:
    flat = fit_decode([(100, 1, 0.02), (1000, 1, 0.02), (2000, 2, 0.02)])
    assert min(msgspec.structs.astuple(flat)) > 0
    assert flat.base_s == pytest.approx(0.02, rel=0.01)
    falling = fit_prefill([(100, 0, 0.2), (1000, 0, 0.1)])
    assert min(msgspec.structs.astuple(falling)) > 0
    with pytest.raises(InvalidArgument):
        fit_prefill([])
    with pytest.raises(InvalidArgument):
        fit_prefill([(10, 0, 0.0)])

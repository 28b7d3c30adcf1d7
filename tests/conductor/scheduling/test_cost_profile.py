"""Profiles: fitted to measurements, written, read back, refused when wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from conductor.scheduling.cost_model import CostModel, LinkProfile, Profile
from conductor.scheduling.cost_profile import (
    document,
    fit_prefill,
    fit_tpot,
    parse_profile,
    read_profile,
)
from kvpool.errors import ConfigError, InvalidArgument

LENGTHS = (64, 256, 1024, 4096)
coefficients = st.floats(1e-7, 1e-1)


@given(coefficients, coefficients, st.floats(1e-9, 1e-5))
def test_a_fit_finds_the_coefficients_that_made_the_samples(a: float, b: float, c: float) -> None:
    samples = [(n, r, a + b * n + c * n * (r + n / 2)) for n in LENGTHS for r in (0, 512)]
    fitted = fit_prefill(samples)
    for new, reused, seconds in samples:
        predicted = fitted[0] + fitted[1] * new + fitted[2] * new * (reused + new / 2)
        assert predicted == pytest.approx(seconds, rel=0.02)


def test_a_coefficient_that_measures_as_nothing_or_less_stays_positive() -> None:
    flat = fit_tpot([(100, 1, 0.02), (1000, 1, 0.02), (2000, 2, 0.02)])
    assert min(flat) > 0
    assert flat[0] == pytest.approx(0.02, rel=0.01)
    falling = fit_prefill([(100, 0, 0.2), (1000, 0, 0.1)])
    assert min(falling) > 0
    with pytest.raises(InvalidArgument):
        fit_prefill([])
    with pytest.raises(InvalidArgument):
        fit_prefill([(10, 0, 0.0)])


@pytest.mark.parametrize("name", ["p.yaml", "p.json"])
def test_what_was_measured_becomes_a_file_that_predictions_start_from(
    tmp_path: Path, name: str
) -> None:
    prefill = [(n, 0, 1e-3 + 2e-5 * n + 1e-9 * n * n / 2) for n in LENGTHS]
    decode = [(n * b, b, 5e-3 + 1e-7 * n * b + 1e-3 * b) for n in LENGTHS for b in (1, 4)]
    content = document(prefill, decode, "m", "cpu")
    path = tmp_path / name
    path.write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))
    cost = CostModel(read_profile(path))
    assert cost.prefill_s("anybody", 2000) == pytest.approx(0.043, rel=0.01)
    assert cost.tpot_s("anybody", 8000, 4) == pytest.approx(0.0098, rel=0.01)
    assert cost.profile.same_host == Profile().same_host


def test_what_a_file_leaves_out_keeps_its_default_and_links_can_be_given() -> None:
    profile = parse_profile(
        {
            "kvpool_profile": 1,
            "other_host": {"latency_s": 1e-5, "bytes_per_s": 2.5e10},
            "tier_bytes_per_s": {"nvme": 7e9},
        },
        "here",
    )
    assert profile.other_host == LinkProfile(1e-5, 2.5e10)
    assert profile.tier_bytes_per_s == {"nvme": 7e9}
    assert profile.prefill_token_s == Profile().prefill_token_s


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"kvpool_profile": 2},
        {"kvpool_profile": 1, "speed": 3},
        {"kvpool_profile": 1, "prefill": {"base_s": 1.0}},
        {"kvpool_profile": 1, "prefill": {"base_s": -1.0, "token_s": 1.0, "attention_s": 1.0}},
        [1, 2],
        "text",
    ],
)
def test_what_is_no_profile_is_refused_by_name(content: object) -> None:
    with pytest.raises(ConfigError, match="here"):
        parse_profile(content, "here")


def test_a_file_that_cannot_be_read_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(tmp_path / "absent.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(tmp_path / "broken.yaml")

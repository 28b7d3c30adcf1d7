"""Profiles: written, read back, refused when wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from conductor.scheduling.cost_model import CostModel, LinkProfile, Profile
from conductor.scheduling.cost_profile import profile_from_file, read_profile
from kvpool.blocks.tier import Tier
from kvpool.config.profile_file import parse_profile_file, write_profile_file
from kvpool.errors import ConfigError
from workers.service.profile_fit import fit_profile

LENGTHS = (64, 256, 1024, 4096)


@pytest.mark.parametrize("name", ["p.yaml", "p.json"])
def test_measurements_become_a_file_from_which_predictions_start(tmp_path: Path, name: str) -> None:
    prefill = [(n, 0, 1e-3 + 2e-5 * n + 1e-9 * n * n / 2) for n in LENGTHS]
    decode = [(n * b, b, 5e-3 + 1e-7 * n * b + 1e-3 * b) for n in LENGTHS for b in (1, 4)]
    path = tmp_path / name
    write_profile_file(path, fit_profile(prefill, decode, "m", "cpu"))
    cost = CostModel(read_profile(path))
    assert cost.prefill_s("anybody", 2000) == pytest.approx(0.043, rel=0.01)
    assert cost.tpot_s("anybody", 8000, 4) == pytest.approx(0.0098, rel=0.01)
    assert cost.profile.same_host == Profile().same_host


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "p.yaml",
            "kvpool_profile: 1\ntpot: {base_s: 5e-3, context_s: 1e-07, sequence_s: 0.001}\n",
        ),
        (
            "p.json",
            '{"kvpool_profile": 1, "tpot":'
            ' {"base_s": 5e-3, "context_s": 1e-07, "sequence_s": 0.001}}',
        ),
    ],
)
def test_a_small_coefficient_written_without_a_dot_is_a_number(
    tmp_path: Path, name: str, text: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert read_profile(path).tpot_context_s == 1e-7


def test_values_that_a_file_leaves_out_keep_their_defaults() -> None:
    content = {
        "kvpool_profile": 1,
        "other_host": {"latency_s": 1e-5, "bytes_per_s": 2.5e10},
        "tier_bytes_per_s": {"nvme": 7e9},
    }
    profile = profile_from_file(parse_profile_file(content, "here"), "here")
    assert profile.other_host == LinkProfile(1e-5, 2.5e10)
    assert profile.tier_bytes_per_s == {Tier.NVME: 7e9}
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
def test_a_file_that_is_no_profile_is_refused_by_name(content: object) -> None:
    with pytest.raises(ConfigError, match="here"):
        profile_from_file(parse_profile_file(content, "here"), "here")


def test_a_file_that_cannot_be_read_is_a_configuration_error(tmp_path: Path) -> None:
    for suffix, language in (("yaml", "YAML"), ("json", "JSON")):
        with pytest.raises(ConfigError, match="cannot read"):
            read_profile(tmp_path / f"absent.{suffix}")
        (tmp_path / f"broken.{suffix}").write_text("a: [")
        with pytest.raises(ConfigError, match=f"not valid {language}"):
            read_profile(tmp_path / f"broken.{suffix}")

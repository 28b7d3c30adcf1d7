"""Sizes of KV from models' numbers, and transfers over links: known figures are met exactly."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conductor.scheduling.cost_model import exposed_s
from kvpool.errors import ConfigError
from planner.sizing.hardware import GPUS, fitting, link_named, value_bytes
from planner.sizing.model_presets import PRESETS, model_named
from planner.sizing.model_shape import shape_of
from planner.sizing.transfer_size import size_report, transfers
from tests.support.fork_server import run_kvpool

# Parameters in billions as published with each model: total, and active where the model says so.
PUBLISHED = {
    "smollm2-135m": (0.1345, None),
    "llama-3-8b": (8.03, None),
    "llama-3-70b": (70.55, None),
    "llama-3.1-405b": (405.85, None),
    "qwen2.5-7b": (7.62, None),
    "qwen2.5-72b": (72.7, None),
    "qwen3-32b": (32.8, None),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235.0, 22.0),
    "deepseek-v2-lite": (15.7, 2.4),
    "deepseek-v3": (671.0, 37.0),
    "kimi-k2": (1030.0, 32.0),
    "mistral-7b-v0.3": (7.25, None),
    "mistral-small-24b": (23.6, None),
    "mistral-large-123b": (123.0, None),
    "mixtral-8x7b": (46.7, 12.9),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
    "gemma-3-27b": (27.0, None),
}


def config(**changes: Any) -> dict[str, Any]:
    base = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    return {name: value for name, value in (base | changes).items() if value is not None}


def per_token(**changes: Any) -> int:
    return shape_of(config(**changes), "m", "test").bytes_per_token(2)


def test_llama_3_70b_keeps_320_kib_a_token_and_half_in_fp8() -> None:
    model = model_named("llama-3-70b")
    assert model.bytes_per_token(2) == 327_680
    assert model.kv_bytes(8192, 2) == 2_684_354_560
    assert model.kv_bytes(8192, value_bytes("fp8")) == 2_684_354_560 // 2


def test_an_8b_model_with_8_kv_heads_moves_32k_tokens_as_fast_as_the_links_allow() -> None:
    model = model_named("llama-3-8b")
    assert model.bytes_per_token(2) == 128 * 1024
    assert model.kv_bytes(1000, 2) == pytest.approx(128e6, rel=0.03)
    size = model.kv_bytes(32_768, 2)
    assert size == 4 << 30
    seconds = [size / link_named(n).bytes_per_s for n in ("100GbE", "400Gb", "8x400Gb")]
    assert seconds == pytest.approx([0.344, 0.0859, 0.0107], rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_counted_from_the_numbers_are_those_published(name: str) -> None:
    model = model_named(name)
    total, active = PUBLISHED[name]
    assert model.total_params / 1e9 == pytest.approx(total, rel=0.006)
    if active:
        assert model.active_params / 1e9 == pytest.approx(active, rel=0.1)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_sized_and_says_where_it_comes_from(name: str) -> None:
    model = model_named(name)
    assert model.source.startswith("https://huggingface.co/")
    assert 0 < model.kv_bytes(1000, 1) <= model.kv_bytes(2000, 1)
    assert fitting(model, GPUS["b200"], weight_bytes=1).kv_capacity_tokens > 10_000


def test_mqa_keeps_one_head_and_mha_keeps_all() -> None:
    one_head = 2 * 128 * 32 * 2
    assert per_token(num_key_value_heads=None, multi_query=True) == one_head
    assert per_token(num_key_value_heads=1) == one_head
    assert per_token(num_key_value_heads=None) == 32 * one_head
    assert model_named("falcon-7b").bytes_per_token(2) == 2 * 64 * 32 * 2


def test_mla_keeps_one_latent_vector_a_layer() -> None:
    assert model_named("deepseek-v3").bytes_per_token(2) == 61 * (512 + 64) * 2
    indexed = model_named("deepseek-v3.2").bytes_per_token(2)
    assert indexed == 61 * ((512 + 64) * 2 + 128 + 4)


def test_a_sliding_window_bounds_what_its_layers_keep() -> None:
    model = model_named("mistral-7b-v0.1")
    assert model.kv_bytes(4096, 2) == model.kv_bytes(100_000, 2) == 4096 * 131_072
    oss = model_named("gpt-oss-120b")
    one_layer = 2 * 8 * 64 * 2
    assert oss.kv_bytes(128, 2) == 128 * 36 * one_layer
    assert oss.kv_bytes(10_000, 2) == (128 * 18 + 10_000 * 18) * one_layer
    assert oss.smallest_window == 128
    off = shape_of(config(sliding_window=4096, use_sliding_window=False), "m", "test")
    assert off.smallest_window == 0
    gemma = model_named("gemma-3-27b")
    assert sorted((k.window, k.layers) for k in gemma.kept) == [(0, 10), (1024, 52)]


def test_layers_of_linear_attention_keep_a_state_and_no_tokens() -> None:
    model = model_named("qwen3-next-80b-a3b")
    assert model.bytes_per_token(2) == 12 * 2 * 2 * 256 * 2
    assert model.kv_bytes(1, 2) == model.bytes_per_token(2) + model.state_bytes
    assert model.state_bytes == 36 * 32 * 128 * 128 * 4


def test_a_config_file_or_its_directory_is_taken_and_nested_text_configs_are_read(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config()}))
    for path in (tmp_path, tmp_path / "config.json"):
        assert model_named(str(path)).bytes_per_token(2) == 131_072


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"num_attention_heads": "many"}, "num_attention_heads is 'many'"),
        ({"num_key_value_heads": 7}, "cannot share 7"),
        ({"layer_types": ["mystery"] * 32}, "mystery"),
        ({"layer_types": ["linear_attention"] * 32}, "no layer"),
    ],
)
def test_invalid_numbers_are_named(broken: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        shape_of(config(**broken), "m", "test")


def test_a_layerwise_send_shows_its_last_layer_or_what_the_network_cannot_keep_up_with() -> None:
    assert exposed_s(8.0, 4.0, 80) == pytest.approx(4.0 / 80)
    assert exposed_s(4.0, 8.0, 80) == pytest.approx(8.0 + 4.0 / 80 - 4.0)
    model = model_named("llama-3-70b")
    machine = fitting(model, GPUS["h100"], 8)
    slow, fast = transfers(model, 8192, 2, [link_named("10GbE"), link_named("400Gb")], machine)
    assert (slow.verdict, fast.verdict) == ("network bound", "masked")
    assert fast.exposed_s == pytest.approx(fast.transfer_s / 80)
    assert slow.exposed_s > 0.5 * slow.transfer_s


@pytest.mark.parametrize(
    ("text", "gbytes"),
    [("100GbE", 12.5), ("400Gb", 50), ("8x400Gb", 400), ("25GB/s", 25), ("4 x 200Gbps", 100)],
)
def test_links_are_read(text: str, gbytes: float) -> None:
    assert link_named(text).bytes_per_s == gbytes * 1e9


@pytest.mark.parametrize("text", ["", "fast", "0Gb", "4x", "-1GB/s", "0x400Gb", "1e9GB/s"])
def test_unknown_links_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="unknown link"):
        link_named(text)


def test_the_report_has_the_documented_fields() -> None:
    model = model_named("llama-3-8b")
    machine = fitting(model, GPUS["h100"])
    report = size_report(model, 1000, "fp16", 2, [link_named("100GbE")], machine)
    assert {"model", "tokens", "dtype", "bytes_per_token", "kv_bytes", "links"} <= set(report)
    assert {"link", "gbytes_per_s", "transfer_s"} <= set(report["links"][0])


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_kvpool("plan", *arguments)


def test_the_command_prints_one_document_and_refuses_in_one_line() -> None:
    done = run("size", "llama-3-70b", "--tokens", "8192", "--dtype", "fp8", "--json")
    assert json.loads(done.stdout)["kv_bytes"] == 1_342_177_280
    for bad in (
        ["lama-3-70b"],
        ["no/config.json"],
        ["llama-3-70b", "--tokens", "-5"],
        ["llama-3-70b", "--link", "x"],
    ):
        done = run("size", *bad)
        assert done.returncode == 2
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        assert done.stderr.startswith("error: ")

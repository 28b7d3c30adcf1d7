"""What docs/vllm.md and the README tell users to type is what vLLM and kvpool take."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.config import KVEventsConfig, KVTransferConfig

from kvpool.config.loader import load_settings
from kvpool.engines.shared.settings import EngineSettings
from kvpool.engines.vllm.metrics import COUNTS, TIMES
from kvpool.engines.vllm.settings import VllmSettings, read
from tests.support.pages import commands

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "vllm.md").read_text()
FLAG = "--kv-transfer-config"


def transfers(name: str) -> list[KVTransferConfig]:
    found = commands((ROOT / name).read_text(), "vllm serve")
    return [KVTransferConfig(**json.loads(words[words.index(FLAG) + 1])) for words in found]


@pytest.mark.parametrize(("name", "count"), [("docs/vllm.md", 2), ("README.md", 1)])
def test_each_command_names_the_connector_with_settings_that_it_takes(
    name: str, count: int
) -> None:
    configs = transfers(name)
    assert len(configs) == count
    for config in configs:
        module = importlib.import_module(str(config.kv_connector_module_path))
        assert getattr(module, str(config.kv_connector)).__name__ == "KVPoolConnector"
        assert config.kv_load_failure_policy == "recompute"
        assert read(config.kv_connector_extra_config).conductor.endswith(":7800")


def test_from_python_the_same_settings_are_given() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    seen: dict[str, Any] = {}

    class Llm:
        def __init__(self, **options: Any) -> None:
            seen.update(options)

    # The model alone is not loaded here; tests/engines/vllm/test_real_model.py does.
    exec(code.replace("from vllm import LLM", ""), {"LLM": Llm})
    first = transfers("docs/vllm.md")[0]
    assert seen["kv_transfer_config"].kv_connector_extra_config == first.kv_connector_extra_config
    assert seen["kv_transfer_config"].kv_role == first.kv_role == "kv_both"


def test_the_flag_for_events_is_one_that_binds() -> None:
    [text] = re.findall(r"--kv-events-config '([^']*)'", PAGE)
    config = KVEventsConfig(**json.loads(text))
    assert config.enable_kv_cache_events
    assert "*" in config.endpoint


def test_the_conductors_part_is_a_configuration_of_ours(tmp_path: Path) -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "kvpool.yaml"
    file.write_text(text)
    engines = load_settings(file, env={}).settings.conductor.engines
    assert [one.role for one in engines] == ["prefill", "decode"]
    assert yaml.safe_load(text)["conductor"]["engines"][0]["model"] == engines[0].model


def test_the_tables_name_every_setting_and_every_figure() -> None:
    settings = PAGE.partition("## Settings")[2].partition("## Prefill")[0]
    named = set(re.findall(r"`(\w+)`", settings))
    own = VllmSettings.model_fields.keys() - EngineSettings.model_fields.keys()
    assert own <= named
    figures = PAGE.partition("## How to see")[2].partition("## What happens")[0]
    rows = set(re.findall(r"`(\w+)`", figures))
    shown = {f"{name.removesuffix('_s')}_seconds_total" for name in COUNTS if name.endswith("_s")}
    shown |= {f"{name}_total" for name in COUNTS if not name.endswith("_s")}
    shown |= {f"{name.removesuffix('_s')}_seconds" for name in TIMES}
    assert shown <= rows

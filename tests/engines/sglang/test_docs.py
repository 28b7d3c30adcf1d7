"""What docs/sglang.md tells users to type is what SGLang and kvpool take."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.server_args import ServerArgs
from typer.testing import CliRunner

from kvpool.cli.app import app
from kvpool.engines.sglang.settings import SOURCE, SGLangSettings
from kvpool.engines.shared.settings import read_settings
from tests.engines.sglang.conftest import LOADED, MakeBackend, keys
from tests.engines.sglang.real import indices, mha_pool
from tests.support.pages import commands
from tests.support.process_cluster import Cluster, wait_until

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "sglang.md").read_text()
LAUNCH = "python -m sglang.launch_server"


@pytest.mark.parametrize("name", ["docs/sglang.md", "README.md"])
def test_the_launch_command_is_one_that_sglang_understands(name: str) -> None:
    [words] = commands((ROOT / name).read_text(), LAUNCH)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    args = parser.parse_args(words[3:])
    assert args.hicache_storage_backend == "dynamic"
    extra, *_, passes_prefix_keys = HybridCacheController.parse_storage_backend_extra_config(
        args.hicache_storage_backend_extra_config
    )
    assert passes_prefix_keys is True
    assert extra.items() >= LOADED.items()
    assert read_settings(SGLangSettings, extra, SOURCE).conductor == "127.0.0.1:7800"


def test_the_request_that_attaches_to_a_running_server_carries_the_same_settings() -> None:
    body = next(json.loads(w[w.index("-d") + 1]) for w in commands(PAGE, "curl -X PUT"))
    extra = json.loads(body["hicache_storage_backend_extra_config_json"])
    assert extra.items() >= LOADED.items()
    assert body["hicache_storage_backend"] == "dynamic"
    read_settings(SGLangSettings, extra, SOURCE)


def test_the_table_of_settings_has_each_with_its_default() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|([^|]*)\|", PAGE.partition("## Settings")[2], re.MULTILINE)
    told: dict[str, str] = {}
    for names, defaults in rows:
        keys_ = re.findall(r"`(\w+)`", names)
        values = re.findall(r"`([^`]*)`", defaults)
        told |= dict(
            zip(keys_, values if len(values) == len(keys_) else [""] * len(keys_), strict=True)
        )
    own = [n for n, f in SGLangSettings.model_fields.items() if n not in SGLANGS_OWN]
    assert set(told) == set(own)
    for name, default in told.items():
        if default and not default.startswith("--"):  # "as" another flag
            actual = SGLangSettings.model_fields[name].default
            assert json.dumps(actual).strip('"') == default, name


SGLANGS_OWN = {
    *("backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold"),
    *("prefetch_timeout_base", "prefetch_timeout_per_ki_token", "file_storage_path"),
    *("hicache_storage_pass_prefix_keys", "tp_lcm_size"),
}


def test_the_commands_that_show_the_pages_show_them(
    make_backend: MakeBackend, cluster: Cluster
) -> None:
    pool = mha_pool("page_first")
    backend: Any = make_backend(pool, extra={"model": "MODEL"})
    backend.batch_set_v1(keys(2), indices(pool, [0, 1]))
    wait_until(lambda: backend.batch_exists(keys(2)) == 2, "the index hears of them")
    address = ["--conductor", cluster.conductor["wire"]]
    shown = commands(PAGE, "kvpool ls") + commands(PAGE, "kvpool stats")
    assert len(shown) == 2
    for words in shown:
        result = CliRunner().invoke(app, [*words[1:], *address])
        assert result.exit_code == 0, result.output
        assert ("MODEL:sglang/kv" in result.output) == (words[1] == "ls")

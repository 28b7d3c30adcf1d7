"""Settings, the identity of the model, and what the backend tells of itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from sglang.srt import runtime_context

from kvpool.blocks.model_revision import revision_of
from kvpool.engines.sglang import identity as identity_module
from kvpool.engines.sglang.identity import identify
from kvpool.engines.sglang.settings import SOURCE, SGLangSettings
from kvpool.engines.shared.settings import read_settings
from kvpool.errors import ConfigError
from tests.engines.sglang.conftest import LOADED, MakeBackend, keys
from tests.engines.sglang.real import indices, mha_pool, storage_config
from tests.support.process_cluster import wait_until


def model_dir(directory: Path, weights: bytes = b"\0" * 64) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "tests"}))
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def identity_of(model_name: str | None, **settings: Any) -> identity_module.ModelIdentity:
    told = read_settings(SGLangSettings, LOADED | settings, SOURCE)
    return identify(told, storage_config({}, model_name=model_name))


def test_an_unknown_setting_is_named_with_the_nearest(make_backend: MakeBackend) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'lease_seconds'.*'lease_s'"):
        make_backend(mha_pool("page_first"), extra={"lease_seconds": 3})


def test_settings_of_sglang_itself_are_no_mistake() -> None:
    own = {"prefetch_threshold": 256, "hicache_storage_pass_prefix_keys": True}
    read_settings(SGLangSettings, LOADED | own, SOURCE)


def test_equal_files_are_one_model_wherever_they_lie(tmp_path: Path) -> None:
    here = model_dir(tmp_path / "here" / "model-a")
    there = model_dir(tmp_path / "there" / "model-a")
    tuned = model_dir(tmp_path / "tuned" / "model-a", b"\1" * 64)
    assert identity_of(str(here)) == identity_of(str(there))
    assert identity_of(str(here)).name == "model-a"
    assert identity_of(str(here)).revision == revision_of(here)
    assert identity_of(str(tuned)).revision != identity_of(str(here)).revision


def test_what_cannot_be_identified_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights cannot be identified.*set revision"):
        identity_of("nobody/has-this")
    directory = str(model_dir(tmp_path / "base"))
    with pytest.raises(ConfigError, match="set model, too"):
        identity_of(directory, revision="main")
    assert identity_of(directory, revision="main", model="m").name == "m"
    with pytest.raises(ConfigError, match="set model"):
        identity_of(None, revision="main")


def test_what_sglang_has_published_goes_before_its_name_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft = model_dir(tmp_path / "served"), model_dir(tmp_path / "draft", b"\2" * 64)
    bags = {
        "get_model": SimpleNamespace(
            model_path=str(model), revision=None, kv_cache_dtype="fp8_e5m2"
        ),
        "get_spec": SimpleNamespace(
            speculative_draft_model_path=str(draft), speculative_draft_model_revision=None
        ),
    }
    for name, bag in bags.items():
        monkeypatch.setattr(runtime_context, name, lambda bag=bag: bag)
    found = identity_of("a name to show")
    assert (found.name, found.revision) == ("served", revision_of(model))
    assert (found.draft_revision, found.kv_cache_dtype) == (revision_of(draft), "fp8_e5m2")


def test_another_sglang_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_module, "sglang_version", "0.6.0")
    with pytest.raises(ConfigError, match=r"SGLang 0\.6\.0.*0\.5\.x is supported"):
        identity_of("m", revision="r")


def test_settings_can_be_read_without_sglang() -> None:
    code = (
        "import sys; sys.modules['sglang'] = None\n"
        "import kvpool.engines.sglang, kvpool.engines.sglang.settings"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_names_of_pages_never_change(make_backend: MakeBackend) -> None:
    pool = mha_pool("page_first")
    for algorithm, expected in (
        ("xxh3-128", "3b2b45b63a724529a107fbcbaac26b16"),
        ("sha256", "d9cbe06ecb79e94677082a00b7382ae1"),
    ):
        extra = {"revision": "golden", "model": "golden", "hash_algorithm": algorithm}
        space = make_backend(pool, extra=extra)._space("kv")
        assert space.hashes(["a" * 64])[0].hex() == expected


def test_pages_bytes_and_batches_are_counted(make_backend: MakeBackend) -> None:
    def counted(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels | {"pool": "kv", "rank": "7"}) or 0.0

    pool = mha_pool("page_first")
    fields = {"tp_rank": 7, "tp_size": 8, "enable_storage_metrics": True}
    backend = make_backend(pool, is_mla_model=False, **fields)
    size = backend._space("kv").pages.page_bytes
    backend.batch_set_v1(keys(2), indices(pool, [0, 1]))
    assert counted("kvpool_sglang_pages_total", operation="store", outcome="stored") == 2
    assert counted("kvpool_sglang_bytes_total", operation="store") == 2 * size
    backend.batch_exists(keys(2))  # the other ranks have stored nothing
    assert counted("kvpool_sglang_pages_total", operation="lookup", outcome="miss") == 2

    stats = backend.get_stats()
    assert stats.backup_pgs == [2]
    assert stats.backup_bandwidth[0] > 0
    assert stats.prefetch_pgs == []
    assert backend.get_stats().backup_pgs == []
    assert make_backend(pool, extra={"revision": "x"}).get_stats() is None


def test_the_pool_shows_the_pages_under_the_models_name(
    make_backend: MakeBackend, cluster: Any
) -> None:
    pool = mha_pool("page_first")
    backend = make_backend(pool, extra={"model": "org/shown"})
    backend.batch_set_v1(keys(2), indices(pool, [0, 1]))
    wait_until(lambda: backend.batch_exists(keys(2)) == 2, "the index hears of them")
    listed = backend._pool.list_blocks(model="org/shown:sglang/kv")
    assert [len(space.blocks) for node in listed for space in node.namespaces] == [2]

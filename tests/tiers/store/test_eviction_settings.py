"""Settings of eviction, retention and quotas: names, shares and sizes as users write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpool.config.loader import load_settings, parse_override
from kvpool.config.settings import EVICTION_POLICIES, GIB, NodeConfig
from kvpool.errors import ConfigError
from tiers.policies import DEFAULT, POLICIES
from tiers.store.config import StoreConfig


def node(tmp_path: Path, *sets: str, env: dict[str, str] | None = None, file: str = "") -> Any:
    path = None
    if file:
        path = tmp_path / "settings.yaml"
        path.write_text(file)
    overrides = [parse_override(text) for text in sets]
    return load_settings(path, env or {}, overrides, directory=tmp_path).settings.node


def test_settings_know_the_policies_that_the_tiers_have() -> None:
    assert set(EVICTION_POLICIES) == set(POLICIES)
    assert (
        NodeConfig().eviction
        == NodeConfig().advanced.nvme_eviction
        == StoreConfig().eviction
        == DEFAULT
    )


def test_each_tier_has_its_own_policy(tmp_path: Path) -> None:
    config = node(
        tmp_path, "node.eviction=s3fifo", env={"KVPOOL_NODE__ADVANCED__NVME_EVICTION": "gdsf"}
    )
    assert (config.eviction, config.advanced.nvme_eviction) == ("s3fifo", "gdsf")


def test_an_unknown_policy_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node\.eviction: .*did you mean prefix-lru\?"):
        node(tmp_path, "node.eviction=prefix_lru")
    with pytest.raises(ConfigError, match=r"one of prefix-lru, lru, lfu, fifo, s3fifo, gdsf"):
        node(tmp_path, "node.advanced.nvme_eviction=best")


QUOTAS = {"search": 0.25, "chat": 2 * GIB, "batch": 1.0 / 8}


def test_quotas_are_shares_or_sizes_in_files_flags_and_environment(tmp_path: Path) -> None:
    text = "search=0.25, chat=2GiB, batch=12.5%"
    file = "node: {quotas: {search: 0.25, chat: 2GiB, batch: 12.5%}}"
    assert node(tmp_path, f"node.quotas={text}").quotas == QUOTAS
    assert node(tmp_path, env={"KVPOOL_NODE__QUOTAS": text}).quotas == QUOTAS
    assert node(tmp_path, file=file).quotas == QUOTAS
    assert node(tmp_path).quotas == {}
    StoreConfig(quotas=QUOTAS)


@pytest.mark.parametrize(
    "quotas", ["a", "a=", "=0.5", "a=0", "a=-1", "a=much", "a=0.6,b=50%", "a=200%", "a=nan"]
)
def test_quotas_that_make_no_sense_are_refused(tmp_path: Path, quotas: str) -> None:
    with pytest.raises(ConfigError, match=r"node\.quotas"):
        node(tmp_path, f"node.quotas={quotas}")


def test_one_means_all_and_one_byte_must_be_said(tmp_path: Path) -> None:
    for text, quota in (("a=1", 1.0), ("a=1B", 1), ("a=2", 2)):
        found = node(tmp_path, f"node.quotas={text}").quotas["a"]
        assert found == quota
        assert type(found) is type(quota)

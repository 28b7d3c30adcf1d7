"""How the connector's watch over the pool goes on, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from kvpool.blocks.layout import Layout, Namespace
from kvpool.client import Pool
from kvpool.engines.vllm import pool_health as module
from kvpool.engines.vllm.pool_health import PoolHealth
from kvpool.engines.vllm.settings import VllmSettings
from kvpool.errors import LayoutMismatch, Unavailable
from tests.support.process_cluster import wait_until

SETTINGS = VllmSettings(conductor="127.0.0.1:1", backoff_s=0.1, max_backoff_s=0.4)
NAMESPACE = Namespace("m", "r", Layout("bfloat16", 1, 1, 8, 16))


@pytest.fixture
def health() -> Iterator[PoolHealth]:
    with Pool(conductor="127.0.0.1:1") as pool:
        watch = PoolHealth(pool, SETTINGS, NAMESPACE)
        yield watch
        watch.close()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited between looks; in truth a moment."""
    asked: list[float] = []
    pause = asyncio.sleep

    async def sleep(seconds: float) -> None:
        asked.append(seconds)
        await pause(0.001)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return asked


def looks(monkeypatch: pytest.MonkeyPatch, outcome: Callable[[], Any]) -> None:
    async def look(_health: PoolHealth, _pool: Any) -> None:
        outcome()

    monkeypatch.setattr(PoolHealth, "_look", look)


def fail(error: Exception) -> Callable[[], Any]:
    def outcome() -> None:
        raise error

    return outcome


def test_a_pool_that_does_not_answer_is_looked_at_ever_less_often(
    health: PoolHealth, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks(monkeypatch, fail(Unavailable("nobody there")))
    health.start(5.0)
    assert not health.is_well
    wait_until(lambda: len(pauses) >= 5, "it is looked at")
    assert pauses[:5] == [0.1, 0.2, 0.4, 0.4, 0.4]
    looks(monkeypatch, lambda: None)
    wait_until(lambda: pauses[-1] == module.LOOK_S, "it is met")
    assert health.is_well


def test_a_start_that_the_pool_refused_can_be_closed(
    health: PoolHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks(monkeypatch, fail(LayoutMismatch("another layout")))
    with pytest.raises(LayoutMismatch):
        health.start(5.0)
    health.close()


def test_a_watcher_that_dies_is_reported_and_the_engine_goes_on_without_the_pool(
    health: PoolHealth, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks(monkeypatch, lambda: None)
    with structlog.testing.capture_logs() as lines:
        health.start(5.0)
        looks(monkeypatch, fail(ValueError("a defect of ours")))
        wait_until(lambda: not health.is_well, "it is noticed")
        told = "the pool is no longer watched: serving without it"
        wait_until(lambda: told in [line["event"] for line in lines], "it is told")

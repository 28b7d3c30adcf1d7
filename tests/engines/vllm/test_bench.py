"""The benchmark's own logic, with engines that only remember.

`kvpool bench vllm` measures real ones.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import vllm_engine, vllm_run
from benchmarks.peers import PeerMissing
from benchmarks.vllm_backends import Backend
from benchmarks.vllm_engine import EngineFailed
from benchmarks.vllm_run import Bench, Order
from kvpool.cli.app import app

SIZES = (128, 256)
MISS_S, SAVED_S, STORE_S, LOCAL_S = 1.0, 1.25, 0.2, 0.1


class FakeEngine:
    """Knows the prompts that it served, and those that a store named in `transfer` has."""

    stores: dict[str, set[tuple[int, ...]]]
    forgets = True

    def __init__(self, model: Path, transfer: dict[str, Any] | None, log: Path, **_: Any) -> None:
        self._store = self.stores.setdefault(transfer["name"], set()) if transfer else set()
        self._stores = not transfer or transfer.get("kv_role") != "kv_consumer"
        self._is_leaky = bool(transfer) and transfer["name"] == "leaky"  # type: ignore[index]
        self._own: set[tuple[int, ...]] = set()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def ready(self) -> None:
        return

    def forget(self) -> None:
        if not self._is_leaky:
            self._own.clear()

    def generate(self, prompt: Sequence[int], *, may_load: bool = True) -> dict[str, Any]:
        key = tuple(prompt)
        whole = len(key) // 128 * 128
        stored = self._store if may_load else set()
        where = "local" if key in self._own else "external" if key in stored else ""
        self._own.add(key)
        if self._stores:
            self._store.add(key)
        found = {name: whole if name == where else 0 for name in ("local", "external")}
        ttft_s = {"": MISS_S, "external": STORE_S, "local": LOCAL_S}[where]
        return {"ttft_s": ttft_s, "output": [key[0]], "loaded_tokens": found["external"], **found}

    def prefill(self, prompts: Sequence[Sequence[int]], *, is_saved: bool = True) -> float:
        for prompt in prompts:
            self.generate(prompt)
        return len(prompts) * (SAVED_S if is_saved else MISS_S)


def fake(
    name: str, is_shared: bool = True, reader_role: str = "kv_both"
) -> Callable[[Path, int], Any]:
    @contextlib.contextmanager
    def open_(directory: Path, store_bytes: int) -> Iterator[Backend]:
        yield Backend({"name": name}, is_shared=is_shared, reader_role=reader_role)

    return open_


@contextlib.contextmanager
def missing(directory: Path, store_bytes: int) -> Iterator[Backend]:
    raise PeerMissing("pip install it")
    yield  # type: ignore[unreachable]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.setattr(FakeEngine, "stores", {}, raising=False)
    monkeypatch.setattr(vllm_run, "BenchEngine", FakeEngine)
    monkeypatch.setattr(vllm_run, "kvpool", fake("kvpool", reader_role="kv_consumer"))
    monkeypatch.setattr(vllm_run, "SETTLE_S", 0.0)
    monkeypatch.setattr(vllm_run, "IDLE_S", 0.0)

    def run(peers: dict[str, Any], repeats: int = 2, saving_tokens: int = 0) -> dict[str, Any]:
        monkeypatch.setattr(vllm_run, "PEERS", peers)
        order = Order(tmp_path, SIZES, repeats, list(peers), saving_tokens)
        return Bench(order, tmp_path, lambda _: None).run()

    return run


def test_each_way_is_measured_for_each_length(bench: Callable[..., dict[str, Any]]) -> None:
    report = bench({"other": fake("other"), "within": fake("within", is_shared=False)})
    assert [row["prompt_tokens"] for row in report["rows"]] == [size + 64 for size in SIZES]
    for row, size in zip(report["rows"], SIZES, strict=True):
        assert row["recompute_ttft_s"] == MISS_S
        assert row["pool_ttft_s"] == STORE_S
        assert row["local_prefix_hit_ttft_s"] == LOCAL_S
        assert row["local_prefix_hit_without_connector_ttft_s"] == LOCAL_S
        assert row["outputs_equal"]
        assert row["tokens_from_pool"] == row["tokens_from_local_cache"] == size
    assert report["rows"][0]["peers"] == {"other": STORE_S, "within": STORE_S}


def test_a_peer_whose_hits_are_not_its_own_or_that_is_missing_gets_a_reason_and_no_figure(
    bench: Callable[..., dict[str, Any]],
) -> None:
    report = bench({"leaky": fake("leaky", is_shared=False), "gone": missing, "fine": fake("fine")})
    assert "'local': 256" in report["not_measured"]["leaky"]
    assert report["not_measured"]["gone"] == "pip install it"
    assert [list(row["peers"]) for row in report["rows"]] == [["fine"], ["fine"]]


def test_a_pool_that_gives_nothing_is_an_error_not_a_row(
    bench: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "prefill", lambda *_, **__: 1.0)  # nothing is stored
    with pytest.raises(EngineFailed, match="tokens the store gave 0"):
        bench({})


def test_a_miss_is_asked_again_and_counted(
    bench: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = FakeEngine.generate
    seen: list[tuple[int, ...]] = []

    def flaky(engine: FakeEngine, prompt: Sequence[int], **asked: bool) -> dict[str, Any]:
        result = generate(engine, prompt, **asked)
        if result["external"] and len(prompt) == 128 + 64 and tuple(prompt) not in seen:
            seen.append(tuple(prompt))
            return result | {"external": 0}
        return result

    monkeypatch.setattr(FakeEngine, "generate", flaky)
    assert [row["pool_misses"] for row in bench({})["rows"]] == [2, 0]


def test_the_cost_of_saving_is_the_ratio_of_the_two_sides(
    bench: Callable[..., dict[str, Any]],
) -> None:
    saving = bench({}, saving_tokens=128)["saving"]
    assert saving["prefill_time_ratio"] == saving["lowest"] == saving["highest"] == SAVED_S


def test_the_reason_of_a_failed_start_is_the_first_error_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    log = tmp_path / "log"
    with (
        vllm_engine.BenchEngine(tmp_path, None, log, cache_gib=1) as engine,
        pytest.raises(EngineFailed, match="it ended"),
    ):
        engine.ready()
    log.write_text("ERROR of the worker:\nValueError: the cause\nRuntimeError: see above\n")
    assert engine._reason() == "ValueError: the cause"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "1000"], "multiples of 128"),
        (["--tokens", "8192"], "multiples of 128 up to"),
        (["--peers", "moncake"], "mooncake"),
    ],
)
def test_lengths_and_peers_that_cannot_be_are_refused(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["bench", "vllm", "--model", str(tmp_path), *arguments])
    assert result.exit_code != 0
    assert said in f"{result.output}{result.exception}"

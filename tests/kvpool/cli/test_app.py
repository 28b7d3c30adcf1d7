"""The command line's frame: lazy commands, exit statuses, one red line for an error, clean JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer

from kvpool.cli import app as cli
from kvpool.cli import commands
from kvpool.cli.context import invocation, overrides
from kvpool.cli.output import format_bytes, format_rate, format_seconds
from kvpool.errors import ConfigError, Unavailable


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("KVPOOL_"):
            monkeypatch.delenv(name)


class Result:
    """The exit status and output of a `kvpool` call."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


Run = Callable[..., Result]
Register = Callable[[Callable[..., None]], None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["kvpool", *args])
        status = 0
        try:
            cli.main()
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        return Result(status, *capsys.readouterr())

    return call


def install(monkeypatch: pytest.MonkeyPatch, name: str, target: str) -> None:
    """Install a package with the command `name`."""
    entry = EntryPoint(name, target, commands.GROUP)
    monkeypatch.setitem(commands.installed(), name, entry)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Add a command `try-it` from a module of its own."""

    def add(function: Callable[..., None]) -> None:
        module = types.ModuleType("kvpool_test_command")
        module.command = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kvpool_test_command", module)
        install(monkeypatch, "try-it", "kvpool_test_command:command")

    return add


# ---------------------------------------------------------------- commands


def test_help_lists_every_command_without_importing_one(run: Run) -> None:
    result = run("--help")
    assert result.status == 0
    for name in commands.COMMANDS:
        assert f" {name} " in result.out
    assert "not installed" not in result.out


def test_every_command_is_listed_and_brought_by_the_package_that_its_extra_installs() -> None:
    found = commands.installed()
    assert set(found) == set(commands.COMMANDS)
    for name, command in commands.COMMANDS.items():
        is_ours = found[name].value.startswith("kvpool.")
        assert is_ours == (command.extra == ""), name


def test_a_command_that_is_not_installed_names_its_extra(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(commands.installed(), "node")
    monkeypatch.delitem(commands.installed(), "plan")
    assert "not installed: extra server" in " ".join(run("--help").out.split())
    result = run("node", "--dram", "4GiB")
    assert result.status == 1
    assert result.err == "error: `kvpool node` is not installed (pip install 'kvpool[server]')\n"
    assert "pip install 'kvpool[planner]'" in run("plan").err


def test_a_command_of_another_package_is_listed_as_well(run: Run, register: Register) -> None:
    def command() -> None:
        typer.echo("done")

    register(command)
    assert "try-it" in run("--help").out
    assert run("try-it").out == "done\n"


def test_an_unknown_command_names_the_nearest(run: Run) -> None:
    result = run("lokup")
    assert result.status == 2
    assert "did you mean 'lookup'?" in result.err


def test_help_loads_neither_torch_nor_a_command() -> None:
    code = (
        "import sys\nsys.argv = ['kvpool', '--help']\nfrom kvpool.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'nixl', 'transformers', 'fastapi', 'grpc', 'conductor', 'tiers', 'workers'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)),"
        " [m for m in sys.modules if m.startswith(('kvpool.cli.data', 'kvpool.cli.ops'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded: [] []"


def test_a_function_becomes_a_command_with_its_options_and_the_global_ones(
    run: Run, register: Register
) -> None:
    def command(ctx: typer.Context, name: str, port: int | None = None) -> None:
        flags = overrides(port=("node.wire_port", port))
        loaded = invocation(ctx).load(flags)
        typer.echo(f"{name} {loaded.settings.node.wire_port} {loaded.provenance['node.wire_port']}")

    register(command)
    assert run("try-it", "a").out == "a 7810 default\n"
    result = run("--set", "node.wire_port=5", "try-it", "b")
    assert result.out == "b 5 --set node.wire_port\n"
    result = run("--set", "node.wire_port=5", "try-it", "--port", "6", "c")
    assert result.out == "c 6 --port\n"


def test_a_missing_module_matters_only_to_its_command(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "bench", "kvpool.cli.not_there:x")
    assert run("--help").status == 0
    result = run("bench")
    assert result.status == 1
    assert result.err == (
        "error: `kvpool bench` needs the Python module kvpool.cli.not_there, which is not installed"
        " (pip install 'kvpool[server]')\n"
    )


def test_a_module_that_a_running_command_misses_names_the_extra(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tiers.server", None)
    result = run("node")
    assert result.status == 1
    assert "tiers.server, which is not installed (pip install 'kvpool[server]')" in result.err


# ---------------------------------------------------------------- errors


def test_an_error_is_one_line_and_status_1(run: Run, register: Register) -> None:
    def command() -> None:
        raise Unavailable("no conductor at 127.0.0.1:7800\n(refused)", hint="start one: kvpool up")

    register(command)
    result = run("try-it")
    assert result.status == 1
    assert result.out == ""
    assert result.err == (
        "error: no conductor at 127.0.0.1:7800 (refused) (start one: kvpool up)\n"
    )


def test_debug_shows_the_traceback(run: Run, register: Register) -> None:
    def command() -> None:
        raise Unavailable("gone")

    register(command)
    with pytest.raises(Unavailable, match="gone"):
        run("--debug", "try-it")


def test_a_configuration_error_is_status_2(run: Run, register: Register) -> None:
    def command() -> None:
        raise ConfigError("bad")

    register(command)
    assert run("try-it").status == 2
    result = run("--set", "node.dram_byte=1", "config", "show")
    assert result.status == 2
    assert "did you mean node.dram_bytes?" in result.err
    assert run("--log-level", "loud", "config", "show").status == 2


@pytest.mark.parametrize("args", [("nope",), ("config", "show", "--nope"), ("config", "check")])
def test_wrong_usage_is_status_2(run: Run, args: tuple[str, ...]) -> None:
    result = run(*args)
    assert result.status == 2
    assert "Usage: kvpool" in result.err
    assert result.out == ""


def test_an_interrupted_command_is_status_130(run: Run, register: Register) -> None:
    def command() -> None:
        raise KeyboardInterrupt

    register(command)
    assert run("try-it").status == 130


def test_version_and_module_form() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvpool", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"kvpool {cli.installed_version()}\n"
    assert cli.installed_version()[0].isdigit()


# ---------------------------------------------------------------- config


def test_config_show_prints_one_json_document(run: Run) -> None:
    result = run(
        "--set", "node.dram_bytes=4GiB", "--set", "worker.salt=s3cret", "config", "show", "--json"
    )
    report = json.loads(result.out)
    assert report["settings"]["node"]["dram_bytes"] == 4 << 30
    assert report["sources"]["node.dram_bytes"] == "--set node.dram_bytes"
    assert report["settings"]["worker"]["salt"] == "***"
    assert "s3cret" not in result.out + result.err


def test_config_show_is_readable(run: Run) -> None:
    lines = run("config", "show").out.splitlines()
    (line,) = (line for line in lines if line.startswith("node.dram_bytes"))
    assert line.split() == ["node.dram_bytes", "2147483648", "(2.00", "GiB)", "default"]


def test_config_check_judges_the_file_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVPOOL_NODE__DRAM_BYTES", "nonsense")
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("node: {dram_bytes: 4GiB}\n")
    bad.write_text("node: {dram_bytes: 4 apples}\n")
    assert run("config", "check", str(good)).out == f"{good}: ok, 1 settings\n"
    report = json.loads(run("config", "check", "--json", str(good)).out)
    assert report == {"file": str(good), "ok": True, "settings": ["node.dram_bytes"]}
    result = run("config", "check", str(bad))
    assert result.status == 2
    assert "4 apples" in result.err
    assert str(bad) in result.err


# ---------------------------------------------------------------- output


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1023.6 * 1024, "1.00 MiB"),
        (10 * 2**20, "10.0 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_bytes_are_short(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 µs"),
        (41e-6, "41.0 µs"),
        (0.9996e-3, "1.00 ms"),
        (0.0032, "3.20 ms"),
        (1.5, "1.50 s"),
        (99.97, "1 min 40 s"),
        (7325, "2 h 02 min"),
    ],
)
def test_seconds_are_short(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_rates_are_decimal_gigabytes() -> None:
    assert format_rate(3e9, 2) == "1.50 GB/s"
    assert format_rate(1, 0) == "-"

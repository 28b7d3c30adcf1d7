"""The two wheels: what is in them, what they need, and that each works in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool.serving.supervisor import Supervisor

ROOT = Path(__file__).parents[2]
SERVER_PACKAGES = {"conductor", "tiers", "workers", "planner", "benchmarks"}


def project(path: str) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / path).read_text())["project"]
    return table


def clean_environment() -> dict[str, str]:
    """This process's variables, without those that would bring in the working tree or settings."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and "KVPOOL" not in k}


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**clean_environment(), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def pip(*arguments: str | Path) -> None:
    done = run(sys.executable, "-m", "pip", *arguments)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- metadata


def test_both_projects_have_one_version_and_ask_for_each_other_in_it() -> None:
    client, server = project("pyproject.toml"), project("packaging/server/pyproject.toml")
    version = kvpool.__version__
    assert client["version"] == server["version"] == version
    assert server["dependencies"] == [f"kvpool=={version}"]
    extras = client["optional-dependencies"]
    for extra in ("server", "planner"):
        assert f"kvpool-server=={version}" in extras[extra]


def test_no_dependency_of_a_user_is_pinned_exactly() -> None:
    client = project("pyproject.toml")
    extras = client["optional-dependencies"]
    for_users = ("server", "nixl", "planner", "demo", "redis", "plot", "vllm")
    asked = [*client["dependencies"], *(text for name in for_users for text in extras[name])]
    assert [text for text in asked if "==" in text and "kvpool-server" not in text] == []


def test_an_editable_installation_reads_the_packages_where_they_are(tmp_path: Path) -> None:
    """A copy in site-packages would go stale at the next edit."""
    names = sorted({"kvpool", *SERVER_PACKAGES})
    code = f"import {', '.join(names)}; print(*({'.__path__[0], '.join(names)}.__path__[0],))"
    done = run(sys.executable, "-P", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    site_packages = Path(sysconfig.get_path("purelib"))
    assert [path for path in done.stdout.split() if Path(path).is_relative_to(site_packages)] == []


# ---------------------------------------------------------------- wheels


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with both wheels, built as `make wheels` does."""
    directory = tmp_path_factory.mktemp("dist")
    pip(
        *("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", directory),
        *(ROOT, ROOT / "packaging/server"),
    )
    return directory


@pytest.fixture(scope="module")
def client(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with kvpool alone, from its wheel."""
    home = tmp_path_factory.mktemp("client") / "venv"
    venv.create(home, symlinks=True)
    install(home, wheels, "kvpool")
    return home / "bin/python"


@pytest.fixture(scope="module")
def planner(client: Path, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with both wheels and no server's dependencies."""
    home = tmp_path_factory.mktemp("planner") / "venv"
    shutil.copytree(client.parents[1], home, symlinks=True)
    install(home, wheels, "kvpool[planner]")
    return home / "bin/python"


def install(home: Path, wheels: Path, requirement: str) -> None:
    name, bracket, extras = requirement.partition("[")
    (wheel,) = wheels.glob(f"{name}-*.whl")
    pip(
        *("--python", home / "bin/python", "install", "--quiet", "--no-compile"),
        *("-c", ROOT / "constraints.txt", "--find-links", wheels),
        f"{wheel}{bracket}{extras}",
    )


@pytest.mark.slow
def test_the_wheels_hold_the_packages_and_nothing_else(wheels: Path) -> None:
    for name, packages in (("kvpool", {"kvpool"}), ("kvpool_server", SERVER_PACKAGES)):
        (wheel,) = wheels.glob(f"{name}-*.whl")
        files = set(zipfile.ZipFile(wheel).namelist())
        about = f"{name}-{kvpool.__version__}.dist-info"
        assert {file.partition("/")[0] for file in files} == {*packages, about}
        assert f"{about}/licenses/LICENSE" in files
        strays = (".pyc", "/tests/", "/test_")
        assert [file for file in files if any(stray in file for stray in strays)] == []
        tracked = run("git", "ls-files", *packages).stdout.split()
        assert {file for file in tracked if not file.endswith(".md")} <= files


@pytest.mark.slow
def test_the_client_alone_puts_and_gets_and_names_the_extra_of_a_server(
    client: Path, tmp_path: Path
) -> None:
    overview = run(client, "-m", "kvpool", "--help", cwd=tmp_path)
    assert overview.returncode == 0, overview.stderr
    assert "Run a pool node. (not installed: extra server)" in overview.stdout
    refused = run(client, "-m", "kvpool", "node", cwd=tmp_path)
    assert refused.returncode == 1
    assert refused.stderr == (
        "error: `kvpool node` is not installed (pip install 'kvpool[server]')\n"
    )
    (tmp_path / "data").write_bytes(os.urandom(300_001))
    with Supervisor(tmp_path / "logs") as supervisor:
        free = ("--wire-port", "0", "--http-port", "0", "--grpc-port", "0")
        conductor = supervisor.start("conductor", ["conductor", *free])["wire"]
        supervisor.start("node", ["node", *free, "--conductor", conductor, "--dram", "64MiB"])
        to = ("--conductor", conductor)
        put = run(client, "-m", "kvpool", "put", "data", *to, cwd=tmp_path)
        assert put.returncode == 0, put.stderr
        assert "5 stored" in put.stdout
        assert "by shm" in put.stdout
        key = put.stdout.split()[1]
        get = run(client, "-m", "kvpool", "get", key, "copy", *to, cwd=tmp_path)
        assert get.returncode == 0, get.stderr
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "data").read_bytes()


@pytest.mark.slow
def test_with_the_planner_all_commands_are_listed_and_only_servers_lack_something(
    planner: Path, tmp_path: Path
) -> None:
    overview = run(planner, "-m", "kvpool", "--help", cwd=tmp_path)
    assert overview.returncode == 0, overview.stderr
    assert "not installed" not in overview.stdout
    trace = ("trace", "generate", "--requests", "50", "--out", "t.jsonl")
    for command in (
        trace,
        ("plan", "size", "llama-3-8b"),
        ("replay", "t.jsonl"),
        ("simulate", "t.jsonl"),
    ):
        done = run(planner, "-m", "kvpool", *command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    refused = run(planner, "-m", "kvpool", "node", cwd=tmp_path)
    assert refused.returncode == 1
    assert "pip install 'kvpool[server]'" in refused.stderr

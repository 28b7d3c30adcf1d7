"""What is generated, or written down twice, agrees with its source."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def test_the_protobuf_modules_are_those_of_the_proto_file(tmp_path: Path) -> None:
    """As `make proto` writes them."""
    pytest.importorskip("grpc_tools")
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-P", "-m", "grpc_tools.protoc", "-I.", *out]
    subprocess.run([*command, "kvpool/proto/kvpool.proto"], cwd=ROOT, check=True, timeout=60)
    written = {file.relative_to(tmp_path): file.read_bytes() for file in tmp_path.rglob("*pb2*")}
    assert len(written) == 3
    assert {file: (ROOT / file).read_bytes() for file in written} == written


def test_pre_commit_runs_the_versions_that_the_checks_run() -> None:
    versions = dict(
        re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    found = {hook["repo"].rpartition("/")[2]: hook.get("rev", "") for hook in hooks}
    assert found["ruff-pre-commit"] == f"v{versions['ruff']}"
    assert found["codespell"] == f"v{versions['codespell']}"

"""The supervisor starts processes in any current folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.serving.supervisor import Supervisor


@pytest.mark.parametrize("command", ["node", "worker"])
def test_modules_in_the_current_folder_do_not_hide_those_of_kvpool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "tiers").mkdir()
    for name in ("tiers/__init__.py", "workers.py", "kvpool.py"):
        (tmp_path / name).write_text("raise RuntimeError('the wrong module')\n")
    monkeypatch.chdir(tmp_path)
    with Supervisor(tmp_path / "logs") as supervisor:
        member = supervisor.launch("member", [command, "--help"])
        assert member.process.wait(60) == 0, member.log_tail()


def test_pythonpath_still_overrides_what_is_installed(tmp_path: Path) -> None:
    (tmp_path / "kvpool").mkdir()
    (tmp_path / "kvpool/__init__.py").touch()
    (tmp_path / "kvpool/__main__.py").write_text('print(\'{"wire": "here"}\', flush=True)\n')
    with Supervisor(tmp_path / "logs", {"PYTHONPATH": str(tmp_path)}) as supervisor:
        assert supervisor.start("member", []) == {"wire": "here"}

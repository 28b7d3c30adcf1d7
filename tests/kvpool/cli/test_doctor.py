"""`kvpool doctor`: its conclusions from a made-up machine, given as a tree of files."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from kvpool.cli import app as cli
from kvpool.cli.ops import doctor_checks
from kvpool.cli.ops.doctor_checks import Check, Probe
from kvpool.config.settings import NodeConfig, Settings

GIB = 1 << 30


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


# ---------------------------------------------------------------- NIXL


def test_a_probe_that_lives_reports_plugins() -> None:
    probe = doctor_checks.run_probe(
        'print(\'noise\\nprobe:{"nixl_plugins": ["UCX", "POSIX"], "gpus": []}\')'
    )
    assert probe == Probe(("UCX", "POSIX"))
    assert doctor_checks.check_nixl(probe).status == "ok"


def test_a_crash_at_exit_is_seen_although_the_report_was_made() -> None:
    code = (
        'import os, signal\nprint(\'probe:{"nixl_plugins": ["UCX"]}\', flush=True)\n'
        "os.kill(os.getpid(), signal.SIGSEGV)"
    )
    probe = doctor_checks.run_probe(code)
    assert probe.failure == "killed by SIGSEGV at exit"
    assert doctor_checks.check_nixl(probe).status == "fail"


@pytest.mark.parametrize(
    ("code", "timeout_s", "part"),
    [
        ("import signal\nsignal.pause()", 0.5, "within 0.5 s"),
        ("raise ImportError('no nixl')", 30, "no nixl"),
        ("import os; os.abort()", 30, "SIGABRT while loading"),
        ("import sys; sys.exit(3)", 30, "exit status 3"),
    ],
)
def test_a_probe_that_fails_says_why(code: str, timeout_s: float, part: str) -> None:
    check = doctor_checks.check_nixl(doctor_checks.run_probe(code, timeout_s))
    assert check.status == "fail"
    assert part in check.detail
    assert check.action


def test_nixl_without_ucx_fails() -> None:
    assert doctor_checks.check_nixl(Probe(("POSIX",))).status == "fail"


def test_without_nixl_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setattr(doctor_checks, "run_probe", lambda: pytest.fail("there is nothing to load"))
    found = {check.name: check for check in doctor_checks.run_checks(Settings())}
    assert found["nixl"].status == "warn"
    assert "pip install 'kvpool[nixl]'" in found["nixl"].action


def test_the_real_nixl_is_found_here() -> None:
    probe = doctor_checks.run_probe()
    assert probe.failure == ""
    assert "UCX" in probe.nixl_plugins


@pytest.mark.parametrize(
    ("installed", "status"),
    [
        ((), "ok"),
        (("ibverbs",), "fail"),
        (("ibverbs", "nl-route-3"), "ok"),
        (("nl-route-3",), "ok"),
    ],
)
def test_libibverbs_without_libnl_route_is_the_known_trap(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], status: str
) -> None:
    monkeypatch.setattr(
        "ctypes.util.find_library", lambda name: name if name in installed else None
    )
    check = doctor_checks.check_native_libraries()
    assert check.status == status
    assert ("139" in check.detail) == (status == "fail")


# ---------------------------------------------------------------- kernel


def test_rdma_devices_are_listed(tmp_path: Path) -> None:
    assert doctor_checks.check_rdma(tmp_path).status == "warn"
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert doctor_checks.check_rdma(tmp_path) == Check("rdma", "ok", "mlx5_0")


def test_memlock_matters_where_there_is_rdma(tmp_path: Path) -> None:
    node = NodeConfig(dram_bytes=2 * GIB)
    assert doctor_checks.check_memlock(tmp_path, node, 8 << 20).status == "ok"
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert doctor_checks.check_memlock(tmp_path, node, 8 << 20).status == "fail"
    assert doctor_checks.check_memlock(tmp_path, node, 2 * GIB).status == "ok"
    assert doctor_checks.check_memlock(tmp_path, node, -1).status == "ok"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("always within_size advise [never] deny force", "warn"),
        ("always within_size [advise] never deny force", "ok"),
        ("[always] within_size advise never deny force", "ok"),
        ("always within_size advise never [deny] force", "warn"),
        ("", "warn"),
    ],
)
def test_huge_pages_of_shared_memory(tmp_path: Path, text: str, status: str) -> None:
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/shmem_enabled", text)
    assert doctor_checks.check_hugepages(tmp_path).status == status


def test_reserved_huge_pages_must_be_enough(tmp_path: Path) -> None:
    node = NodeConfig(dram_bytes=2 * GIB, hugepages="2m")
    short = doctor_checks.check_hugepages(tmp_path, node)
    assert short.status == "fail"
    assert "vm.nr_hugepages=1024" in short.action
    write(tmp_path, "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "1024")
    assert doctor_checks.check_hugepages(tmp_path, node).status == "ok"


def test_numa_nodes_that_are_asked_for_must_exist(tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / f"sys/devices/system/node/node{number}").mkdir(parents=True)
    assert (
        doctor_checks.check_numa(tmp_path, NodeConfig(advanced={"numa_nodes": (0, 1)})).status
        == "ok"
    )
    assert "[0, 1]" in doctor_checks.check_numa(tmp_path, NodeConfig()).action
    missing = doctor_checks.check_numa(tmp_path, NodeConfig(advanced={"numa_nodes": (0, 2)}))
    assert (missing.status, missing.action) == ("fail", "correct node.advanced.numa_nodes")


@pytest.mark.parametrize(("scope", "status"), [("0", "ok"), ("1", "warn"), ("3", "warn")])
def test_ptrace_scope(tmp_path: Path, scope: str, status: str) -> None:
    assert doctor_checks.check_ptrace(tmp_path).status == "ok"
    write(tmp_path, "proc/sys/kernel/yama/ptrace_scope", scope)
    assert doctor_checks.check_ptrace(tmp_path).status == status


@pytest.mark.parametrize(
    ("available", "status"), [(GIB, "fail"), (int(2.2 * GIB), "warn"), (8 * GIB, "ok")]
)
def test_the_arena_must_fit_into_memory(tmp_path: Path, available: int, status: str) -> None:
    assert (
        doctor_checks.check_memory(tmp_path, NodeConfig(dram_bytes=2 * GIB), available).status
        == status
    )


def test_the_smallest_limit_of_nested_groups_counts(tmp_path: Path) -> None:
    assert doctor_checks.cgroup_limit(tmp_path) is None
    write(tmp_path, "proc/self/cgroup", "0::/pod/container")
    write(tmp_path, "sys/fs/cgroup/pod/container/memory.max", "max")
    assert doctor_checks.cgroup_limit(tmp_path) is None
    write(tmp_path, "sys/fs/cgroup/pod/memory.max", str(GIB))
    assert doctor_checks.cgroup_limit(tmp_path) == GIB
    assert (
        doctor_checks.check_memory(tmp_path, NodeConfig(dram_bytes=2 * GIB), 64 * GIB).status
        == "fail"
    )


def test_limits_of_the_first_version_of_groups(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "5:cpu:/x\n4:memory:/x")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**63 - 4096))
    write(tmp_path, "sys/fs/cgroup/memory/x/memory.limit_in_bytes", str(3 * GIB))
    assert doctor_checks.cgroup_limit(tmp_path) == 3 * GIB


# ---------------------------------------------------------------- ports and disk


def settings_with(port: int, host: str = "127.0.0.1") -> Settings:
    node = NodeConfig(host=host, wire_port=port, http_port=0, grpc_port=0)
    return Settings(node=node)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        by_name = {check.name: check for check in doctor_checks.check_ports(settings_with(port))}
        assert by_name["ports node"].status == "warn"
        assert f"taken: {port}" in by_name["ports node"].detail
    by_name = {check.name: check for check in doctor_checks.check_ports(settings_with(port))}
    assert by_name["ports node"].status == "ok"


def test_an_address_of_another_machine_fails() -> None:
    by_name = {c.name: c for c in doctor_checks.check_ports(settings_with(7810, host="192.0.2.1"))}
    assert by_name["ports node"].status == "fail"
    assert "192.0.2.1:7810" in by_name["ports node"].detail


def test_nvme_directory(tmp_path: Path) -> None:
    assert doctor_checks.check_nvme(NodeConfig()).detail.startswith("not used")
    used = NodeConfig(nvme_directories=(tmp_path / "to/be/made",), nvme_bytes=GIB)
    assert doctor_checks.check_nvme(used).status in ("ok", "warn")  # warn: no O_DIRECT, as on tmpfs
    assert list(tmp_path.iterdir()) == []
    huge = NodeConfig(nvme_directories=(tmp_path,), nvme_bytes=1024 << 40)
    assert doctor_checks.check_nvme(huge).status == "warn"
    (tmp_path / "file").write_text("")
    wrong = NodeConfig(nvme_directories=(Path("/proc/nothing/here"),), nvme_bytes=GIB)
    assert doctor_checks.check_nvme(wrong).status == "fail"

    mixed = NodeConfig(nvme_directories=(tmp_path, Path("/proc/nothing/here")), nvme_bytes=GIB)
    found = doctor_checks.check_nvme(mixed)
    assert found.status == "fail"
    assert str(tmp_path) in found.detail
    assert "/proc/nothing/here" in found.detail


def test_shared_memory_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    assert doctor_checks.check_shared_memory(tmp_path / "absent").status == "warn"


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_the_exit_status_tells_whether_anything_failed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    status: doctor_checks.Status,
    code: int,
) -> None:
    from kvpool.cli.ops import doctor

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "run_checks", lambda settings: [Check("x", status, "found", "do")])

    def call(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["kvpool", "doctor", *args])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0)

    assert call("--json") == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0)
    assert report["checks"] == [{"name": "x", "status": status, "detail": "found", "action": "do"}]
    assert call() == code
    text = capsys.readouterr().out
    assert "x: do" in text

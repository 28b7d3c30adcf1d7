"""The checks of `kvpool doctor`.

Each reads one fact about the machine and says what to do about it.

They change nothing on the machine. They read the kernel's files below `root`, so that tests can
pass a made-up machine. They load native libraries in another process only, because those may crash.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import errno
import importlib.util
import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil

from kvpool.cli.output import format_bytes
from kvpool.config.settings import MIB, NodeConfig, Settings

Status = Literal["ok", "warn", "fail"]
PROBE_TIMEOUT_S = 90.0  # a cold import of torch from a slow disk takes tens of seconds
NEEDED_PLUGIN = "UCX"


@dataclass(slots=True, frozen=True)
class Check:
    """One finding. `action` says what to do about it; it is empty if nothing is needed."""

    name: str
    status: Status
    detail: str
    action: str = ""


@dataclass(slots=True, frozen=True)
class Probe:
    """What a new process found when it loaded torch and NIXL.

    `failure` is empty if it ended cleanly.
    """

    nixl_plugins: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    failure: str = ""


_PROBE = """
import json
report = {"nixl_plugins": [], "gpus": []}
import torch
if torch.cuda.is_available():
    report["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
from kvpool.transports.nixl_agent import load_nixl, prepare_environment
prepare_environment(True)
nixl = load_nixl()
agent = nixl.nixl_agent("doctor", nixl.nixl_agent_config(backends=["UCX"]))
report["nixl_plugins"] = list(agent.get_plugin_list())
print("\\nprobe:" + json.dumps(report), flush=True)
"""


def run_probe(code: str = _PROBE, timeout_s: float = PROBE_TIMEOUT_S) -> Probe:
    """Load torch and NIXL in another process, start an agent, and check how the process ends."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probe(failure=f"loading NIXL did not end within {timeout_s:g} s")
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("probe:"):
            found = json.loads(line.removeprefix("probe:"))
    failure = ""
    if done.returncode < 0:
        when = "at exit" if found else "while loading NIXL"
        failure = f"killed by {signal.Signals(-done.returncode).name} {when}"
    elif done.returncode > 0:
        lines = done.stderr.strip().splitlines()
        failure = lines[-1] if lines else f"exit status {done.returncode}"
    return Probe(tuple(found.get("nixl_plugins", ())), tuple(found.get("gpus", ())), failure)


def check_versions() -> Check:
    """Versions of Python and of the main packages."""
    found = [f"python {platform.python_version()}"]
    for package in ("kvpool", "kvpool-server", "torch", "nixl"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return Check("versions", "ok", ", ".join(found))


def check_nixl(probe: Probe | None) -> Check:
    """Whether NIXL loads, has the plugin that kvpool needs, and lets its process end cleanly.

    Args:
        probe: None if NIXL is not installed.
    """
    if probe is None:
        detail = "not installed: clients reach only the node of this host, over shared memory"
        return Check("nixl", "warn", detail, "pip install 'kvpool[nixl]' to reach other hosts")
    plugins = f"plugins: {', '.join(sorted(probe.nixl_plugins)) or 'none'}"
    if probe.failure:
        detail = f"{probe.failure}; {plugins}"
        advice = "the pool works with transport shm on one host; see the check `nixl libraries`"
        return Check("nixl", "fail", detail, advice)
    if NEEDED_PLUGIN not in probe.nixl_plugins:
        return Check("nixl", "fail", plugins, f"install nixl with its {NEEDED_PLUGIN} plugin")
    return Check("nixl", "ok", plugins)


def check_native_libraries() -> Check:
    """With libibverbs, UCX crashes at exit unless the system's libnl-route is installed, too."""
    name = "nixl libraries"
    if ctypes.util.find_library("ibverbs") is None:
        return Check(name, "ok", "no libibverbs, so UCX does not use RDMA")
    if ctypes.util.find_library("nl-route-3") is None:
        return Check(
            name,
            "fail",
            "libibverbs without libnl-route-3: processes that load UCX die at exit (status 139)",
            "install libnl-route-3-200 (Debian) or libnl3 (Fedora); or set UCX_MODULES=^ib to do "
            "without RDMA",
        )
    return Check(name, "ok", "libibverbs and libnl-route-3, which kvpool loads first")


def check_gpu(probe: Probe | None) -> Check:
    """The GPUs that torch sees. None is fine."""
    if probe is None:
        return Check("gpu", "ok", "not checked: NIXL and torch are not installed")
    return Check("gpu", "ok", ", ".join(probe.gpus) or "none; engines run on the CPU")


def rdma_devices(root: Path) -> list[str]:
    """Names of this host's RDMA devices."""
    directory = root / "sys/class/infiniband"
    return sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []


def check_rdma(root: Path) -> Check:
    """Whether the host has RDMA devices. Without one, traffic between hosts goes over TCP."""
    devices = rdma_devices(root)
    if devices:
        return Check("rdma", "ok", ", ".join(devices))
    return Check(
        "rdma",
        "warn",
        "no device: shared memory within a host, TCP between hosts",
        "fine on one machine; for a cluster, install the NIC's driver and rdma-core",
    )


def check_memlock(root: Path, node: NodeConfig, limit: int | None = None) -> Check:
    """Whether the limit on locked memory allows the arena, which RDMA registration locks.

    Args:
        limit: bytes that may be locked, -1 for no limit; None reads it from the kernel.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if limit in (-1, resource.RLIM_INFINITY):
        return Check("memlock", "ok", "unlimited")
    detail = f"{format_bytes(limit)}; node.dram_bytes is {format_bytes(node.dram_bytes)}"
    if limit >= node.dram_bytes:
        return Check("memlock", "ok", detail)
    if not rdma_devices(root):
        return Check("memlock", "ok", f"{detail} (it matters only with RDMA)")
    return Check("memlock", "fail", detail, "ulimit -l unlimited, or LimitMEMLOCK=infinity")


def check_hugepages(root: Path, node: NodeConfig | None = None) -> Check:
    """Whether huge pages are available, which double the speed within a host.

    They are transparent, or reserved ones if `node.hugepages` asks for them.
    """
    if node is not None and node.hugepages in ("2m", "1g"):
        return _check_reserved(root, node)
    base = root / "sys/kernel/mm/transparent_hugepage"
    shared, private = _chosen(base / "shmem_enabled"), _chosen(base / "enabled")
    static = _read(root / "proc/sys/vm/nr_hugepages") or "0"
    detail = f"transparent: shared {shared}, private {private}; static: {static}"
    if shared in ("always", "within_size", "advise", "force"):
        return Check("huge pages", "ok", detail)
    return Check(
        "huge pages",
        "warn",
        f"{detail}: copies within this host run at about half speed",
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (as root)",
    )


def _check_reserved(root: Path, node: NodeConfig) -> Check:
    size = 2 * MIB if node.hugepages == "2m" else 1024 * MIB
    free = _read(root / f"sys/kernel/mm/hugepages/hugepages-{size >> 10}kB/free_hugepages") or "0"
    wanted = -(-node.dram_bytes // size)
    detail = (
        f"{free} reserved pages of {format_bytes(size)} are free; node.dram_bytes needs {wanted}"
    )
    if int(free) >= wanted:
        return Check("huge pages", "ok", detail)
    action = (
        f"sysctl vm.nr_hugepages={wanted}"
        if node.hugepages == "2m"
        else f"boot with hugepagesz=1G hugepages={wanted}"
    )
    return Check("huge pages", "fail", detail, f"{action}, or node.hugepages=auto")


def check_numa(root: Path, node: NodeConfig) -> Check:
    """Whether the NUMA nodes in `node.advanced.numa_nodes` exist."""
    present = [
        path.name.removeprefix("node")
        for path in sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    ]
    detail = f"NUMA nodes: {', '.join(present) or 'none'}"
    missing = [str(number) for number in node.advanced.numa_nodes if str(number) not in present]
    if missing:
        return Check(
            "numa",
            "fail",
            f"{detail}; no node {', '.join(missing)}",
            "correct node.advanced.numa_nodes",
        )
    if len(present) > 1 and not node.advanced.numa_nodes:
        action = f"node.advanced.numa_nodes=[{', '.join(present)}] spreads the arenas over them"
        return Check("numa", "ok", f"{detail}; arenas may lie on any of them", action)
    return Check("numa", "ok", detail)


def check_memory(root: Path, node: NodeConfig, available: int | None = None) -> Check:
    """Whether the arena fits into free memory and into the container's limit.

    Args:
        available: free bytes of the machine; None reads them from the kernel.
    """
    free = psutil.virtual_memory().available if available is None else available
    detail = f"{format_bytes(free)} available"
    limit = cgroup_limit(root)
    if limit is not None:
        detail += f", container limit {format_bytes(limit)}"
        free = min(free, limit)
    detail += f"; node.dram_bytes is {format_bytes(node.dram_bytes)}"
    if node.dram_bytes > free:
        return Check("memory", "fail", detail, "lower node.dram_bytes")
    if node.dram_bytes > 0.8 * free:
        return Check("memory", "warn", detail, "leave memory for engines, or lower node.dram_bytes")
    return Check("memory", "ok", detail)


def cgroup_limit(root: Path) -> int | None:
    """Bytes that this process's control group may use; None if there is no limit."""
    limits: list[int] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # A limit holds for all groups below it.
        group = base / path.lstrip("/")
        for level in (group, *group.parents):
            if not level.is_relative_to(base):
                break
            text = _read(level / name)
            if text is not None and text.isdecimal() and int(text) < 1 << 60:
                limits.append(int(text))
    return min(limits, default=None)


def check_shared_memory(directory: Path = Path("/dev/shm")) -> Check:
    """Whether /dev/shm is large enough for UCX and engines. Containers often have only 64 MiB.

    The arena does not use it.
    """
    try:
        total, _, free = shutil.disk_usage(directory)
    except OSError as error:
        return Check(
            "shared memory", "warn", f"{directory}: {error.strerror}", "mount a tmpfs there"
        )
    detail = f"{directory}: {format_bytes(free)} free of {format_bytes(total)}"
    if free < 256 * MIB:
        return Check("shared memory", "warn", detail, "docker run --shm-size=1g, or --ipc=host")
    return Check("shared memory", "ok", detail)


def check_ports(settings: Settings) -> Iterator[Check]:
    """Whether the addresses of each server can be bound now."""
    for role, section in (
        ("conductor", settings.conductor),
        ("node", settings.node),
        ("worker", settings.worker),
    ):
        ports = [value for key, value in section if key.endswith("_port") and value]
        taken, wrong = [], ""
        for port in ports:
            problem = _bind_problem(section.host, port)
            if problem == errno.EADDRINUSE:
                taken.append(str(port))
            elif problem:
                wrong = f"cannot bind {section.host}:{port}: {os.strerror(problem)}"
        name = f"ports {role}"
        listed = f"{section.host}: {', '.join(map(str, ports)) or 'any free port'}"
        if wrong:
            yield Check(name, "fail", wrong, f"set {role}.host to an address of this machine")
        elif taken:
            advice = (
                f"fine if a {role} is running; otherwise set other ports, e.g. {role}.wire_port"
            )
            yield Check(name, "warn", f"{listed}; taken: {', '.join(taken)}", advice)
        else:
            yield Check(name, "ok", f"{listed}; all free")


def check_ptrace(root: Path) -> Check:
    """Whether Yama lets UCX copy between processes with process_vm_readv."""
    scope = _read(root / "proc/sys/kernel/yama/ptrace_scope")
    if scope in (None, "0"):
        return Check("ptrace scope", "ok", "processes of one user may copy from each other")
    return Check(
        "ptrace scope",
        "warn",
        f"{scope}: UCX cannot copy directly between processes and uses a slower transport",
        "sysctl kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE; transport shm does not need it",
    )


def check_nvme(node: NodeConfig) -> Check:
    """Whether the NVMe directories can be written with O_DIRECT, and have enough free space."""
    paths = node.nvme_directories
    if not paths:
        return Check("nvme", "ok", "not used (node.nvme_directories is not set)")
    devices = [_check_device(path, node.nvme_bytes // len(paths)) for path in paths]
    worst = max(devices, key=lambda device: ("ok", "warn", "fail").index(device.status))
    return replace(worst, detail=" | ".join(device.detail for device in devices))


def _check_device(directory: Path, configured_bytes: int) -> Check:
    # The node makes the directory. Until then, check its nearest parent.
    existing = next(p for p in (directory.absolute(), *directory.absolute().parents) if p.is_dir())
    try:
        o_direct = _takes_o_direct(existing)
    except OSError as error:
        detail = f"{directory} cannot be written: {error.strerror}"
        return Check("nvme", "fail", detail, "set node.nvme_directories")
    free = shutil.disk_usage(existing).free
    detail = f"{directory}: {format_bytes(free)} free, {format_bytes(configured_bytes)} configured"
    if free < configured_bytes:
        return Check("nvme", "warn", detail, "lower node.nvme_bytes (existing pool files count)")
    if not o_direct:
        advice = (
            "use a directory on ext4 or XFS: without O_DIRECT, reads run at less than half speed"
        )
        return Check("nvme", "warn", f"{detail}; no O_DIRECT", advice)
    return Check("nvme", "ok", f"{detail}; O_DIRECT")


def run_checks(settings: Settings, root: Path = Path("/")) -> list[Check]:
    """All checks, in display order. This takes seconds, because it loads NIXL."""
    probe = run_probe() if importlib.util.find_spec("nixl") is not None else None
    return [
        check_versions(),
        check_nixl(probe),
        check_native_libraries(),
        check_gpu(probe),
        check_rdma(root),
        check_memlock(root, settings.node),
        check_hugepages(root, settings.node),
        check_numa(root, settings.node),
        check_memory(root, settings.node),
        check_shared_memory(),
        check_ptrace(root),
        check_nvme(settings.node),
        *check_ports(settings),
    ]


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _chosen(path: Path) -> str:
    """The bracketed word of a kernel setting: "always [madvise] never" gives "madvise"."""
    text = _read(path) or ""
    return text.partition("[")[2].partition("]")[0] or "absent"


def _bind_problem(host: str, port: int) -> int:
    """0 if the address can be bound, else the errno."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror:
            return errno.EADDRNOTAVAIL
        except OSError as error:
            return error.errno or errno.EIO
    return 0


def _takes_o_direct(directory: Path) -> bool:
    """Whether files there can be opened with O_DIRECT. Raises OSError if no file can be made."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".kvpool-doctor-") as file:
        try:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
        except OSError:
            return False
    return True

"""Writers and readers at random on a pool far too small, one of them killed every second.

Not one wrong byte, no leak, no call past its deadline. It lasts 15 seconds, 60 in full, or KVPOOL_STORM_S.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvpool import Pool
from tests.chaos.keyed import NAMESPACE, SIZE, contents, prompt, wrong_blocks
from tests.chaos.storm_worker import PROMPT_BLOCKS, PROMPTS, Report
from tests.support.process_cluster import Cluster, wait_until
from tests.support.sizes import random_seed, scaled

STORM_S = scaled(15, 60, "KVPOOL_STORM_S")
KILL_EVERY_S = 1.0
OVERRUN_S = 3.0  # what a call may take beyond its time-out: two cores are shared by ten processes
# The prompts are 15 MiB; 4 of DRAM and 5 of NVMe hold about a third of the blocks each. Ten slots a slab.
SMALL = (
    *("node.dram_bytes=4080KiB", "node.advanced.slab_bytes=240KiB", "node.nvme_bytes=5040KiB"),
    *(
        "node.advanced.lease_s=2",
        "node.advanced.reservation_s=3",
        "node.advanced.grace_s=0.5",
        "node.advanced.quarantine_s=1",
    ),
)
ROLES = ("writer", "reader")


@dataclass
class Running:
    """One process of the storm."""

    role: str
    transport: str
    process: subprocess.Popen[bytes]
    report: Path

    def read_report(self) -> Report:
        lines = self.report.read_bytes().splitlines(keepends=True) if self.report.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        return msgspec.json.decode(whole[-1], type=Report) if whole else Report()


class Storm:
    """Eight processes, replaced as they are killed."""

    def __init__(self, address: str, directory: Path, rng: random.Random) -> None:
        self._address = address
        self._directory = directory
        self._rng = rng
        self.all: list[Running] = []
        self.running: list[Running] = []
        for role in ROLES:
            for transport in ("shm", "shm", "shm", "nixl"):
                self.start(role, transport)

    def start(self, role: str, transport: str) -> None:
        number = len(self.all)
        report = self._directory / f"{number}-{role}-{transport}.jsonl"
        arguments = (role, transport, self._address, str(self._rng.getrandbits(32)), str(report))
        with report.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.storm_worker", *arguments], stderr=log
            )
        self.all.append(Running(role, transport, process, report))
        self.running.append(self.all[-1])

    def kill_one(self) -> None:
        victim = self.running.pop(self._rng.randrange(len(self.running)))
        victim.process.kill()
        victim.process.wait()
        self.start(victim.role, victim.transport)

    def check_alive(self) -> None:
        for worker in self.running:
            status = worker.process.poll()
            log = worker.report.with_suffix(".log").read_text()
            assert status is None, f"a {worker.role} ended by itself with {status}\n{log}"

    def stop(self) -> list[int]:
        """End them in good order, those that have just begun after their first call."""
        wait_until(lambda: all(worker.read_report().calls for worker in self.running), "calls", 240)
        for worker in self.running:
            worker.process.terminate()
        return [worker.process.wait(120) for worker in self.running]

    def close(self) -> None:
        for worker in self.running:
            worker.process.kill()
            worker.process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    with running.supervisor:
        running.start_node("n0", *SMALL, f"node.nvme_directories={tmp_path / 'nvme'}")
        yield running


def tier(cluster: Cluster, name: str = "dram") -> dict[str, Any]:
    usage: dict[str, Any]
    [usage] = [t for t in cluster.node_stats("n0")["tiers"] if t["tier"] == name]
    return usage


@pytest.mark.slow
def test_a_storm_with_kills_reads_no_wrong_byte_leaks_nothing_and_keeps_deadlines(
    cluster: Cluster, tmp_path: Path
) -> None:
    seed = random_seed()
    print(f"storm of {STORM_S:g} s, seed {seed}")
    (tmp_path / "reports").mkdir()
    storm = Storm(cluster.nodes["n0"]["wire"], tmp_path / "reports", random.Random(seed))
    kills = 0
    try:
        started = time.monotonic()
        while time.monotonic() < started + STORM_S:
            time.sleep(KILL_EVERY_S)  # the pace of the storm; nothing waits for it
            cluster.supervisor.check()
            storm.check_alive()
            storm.kill_one()
            kills += 1
        assert storm.stop() == [0] * 8
    finally:
        storm.close()
    reports = {worker.report.name: worker.read_report() for worker in storm.all}

    wrong = {name: report.wrong for name, report in reports.items() if report.wrong}
    assert wrong == {}
    unexpected = {name: report.unexpected for name, report in reports.items() if report.unexpected}
    assert unexpected == {}
    slowest = max(reports.values(), key=lambda report: report.worst_overrun_s)
    assert slowest.worst_overrun_s < OVERRUN_S, slowest.worst_call
    counters = cluster.node_stats("n0")["counters"]
    assert counters.get("corrupt_blocks", 0) == counters.get("disk_errors", 0) == 0
    log = cluster.member("n0").log_path.read_text()
    assert "Traceback" not in log

    wait_until(lambda: cluster.is_settled("n0"), "no lease, reservation or quarantine is left", 30)
    _every_slot_can_be_had(cluster)

    # It was a storm: every kind of process worked, and the pool was too small throughout.
    checked: Counter[str] = Counter()
    for worker in storm.all:
        report = reports[worker.report.name]
        checked[f"{worker.role} {worker.transport}"] += (
            report.blocks_checked + report.blocks_written
        )
    outcomes: Counter[str] = Counter()
    for report in reports.values():
        outcomes.update(report.outcomes)
    print(f"{kills} kills; blocks {dict(checked)}; calls {dict(sorted(outcomes.items()))}")
    print(f"longest beyond its time-out: {slowest.worst_overrun_s:.2f} s ({slowest.worst_call})")
    assert len(checked) == 4
    assert min(checked.values()) > 0
    assert counters["evicted:dram"] > 100
    assert counters["promoted"] > 20


def _every_slot_can_be_had(cluster: Cluster) -> None:
    """What the node counts as free or dispensable it can give: no slot leaked, and all bytes are right."""
    with Pool(node=cluster.nodes["n0"]["wire"], host_label="here", timeout_s=20) as pool:
        for number in range(PROMPTS):
            hashes = prompt(number, PROMPT_BLOCKS)
            out = np.zeros((PROMPT_BLOCKS, SIZE), np.uint8)
            got = pool.get(NAMESPACE, hashes, out)
            assert wrong_blocks(hashes[: got.found], out[: got.found]) == []
        slots = tier(cluster)["capacity_bytes"] // SIZE
        hashes = prompt(PROMPTS, slots)
        assert pool.put(NAMESPACE, hashes, contents(hashes)).stored == slots

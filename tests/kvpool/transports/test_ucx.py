"""Which transports UCX has: asked of UCX itself, told apart, and refused where RDMA is required."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvpool.client.node.rates import MIN_BYTES, TransferRate
from kvpool.errors import ConfigError
from kvpool.transports.ucx import RdmaRequired, fabric, is_rdma, require_rdma

TCP = ("self/memory", "tcp/eth0", "posix/memory", "cma/memory")
RDMA = (*TCP, "rc_mlx5/mlx5_0:1", "dc_mlx5/mlx5_0:1", "ud_verbs/mlx5_0:1")
ASK = """
from kvpool.transports.nixl_agent import NixlAgent
print(*NixlAgent("asking").ucx)
"""


def asked(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,  # making and giving back a context leaves the process in order
    )
    return done.stdout.split()


def test_ucx_says_what_it_has_under_the_environment_that_nixl_has() -> None:
    assert "tcp/lo" in asked()
    assert asked(UCX_TLS="tcp", UCX_NET_DEVICES="lo") == ["tcp/lo"]


@pytest.mark.parametrize(
    "name", ["rc_mlx5/m:1", "rc_verbs/m:1", "dc_mlx5/m:1", "ud_mlx5/m:1", "srd/e:1"]
)
def test_rdma_is_told_apart_from_the_rest(name: str) -> None:
    assert is_rdma(name)
    assert not any(map(is_rdma, (*TCP, "cuda_ipc/cuda", "rdmacm/x", "sysv/memory")))


def test_bytes_go_by_the_best_that_both_sides_have() -> None:
    assert fabric(RDMA, RDMA, is_same_host=False) == "rdma"
    assert fabric(RDMA, TCP, is_same_host=False) == fabric(TCP, RDMA, is_same_host=False) == "tcp"
    assert fabric(RDMA, (), is_same_host=False) == "rdma"  # an older peer tells nothing
    assert fabric(TCP, TCP, is_same_host=True) == "host"
    assert fabric(("tcp/eth0",), TCP, is_same_host=True) == "tcp"
    assert fabric((), (), is_same_host=False) == ""


def test_a_process_that_requires_rdma_learns_what_there_is_and_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_rdma(RDMA, "node")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with pytest.raises(RdmaRequired, match=r"node\.require_rdma.*tcp/eth0.*UCX_NET_DEVICES=lo"):
        require_rdma(TCP, "node")
    assert issubclass(RdmaRequired, ConfigError)


def test_a_rate_follows_the_last_operations_and_leaves_small_ones_out() -> None:
    rate = TransferRate()
    rate.record(100, 1.0)
    assert (rate.total_bytes, rate.bytes_per_s) == (100, 0.0)
    for _ in range(200):
        rate.record(MIN_BYTES, 1.0)
    for _ in range(200):
        rate.record(MIN_BYTES, 0.5)
    assert rate.bytes_per_s == pytest.approx(2 * MIN_BYTES, rel=0.01)
    assert rate.total_bytes == 100 + 400 * MIN_BYTES

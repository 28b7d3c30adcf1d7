"""A process that used NIXL ends with its own exit status, with and without libibverbs installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, numpy as np
from kvpool.transports.nixl_agent import NixlAgent
memory = np.zeros(1 << 20, np.uint8)
agent = NixlAgent("exit-test")
agent.register(int(memory.ctypes.data), memory.nbytes)
assert len(agent.metadata()) > 100
agent.progress()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 7])
def test_the_exit_status_is_the_programs_own(status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(status)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr

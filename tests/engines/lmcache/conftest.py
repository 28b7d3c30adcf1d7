"""A pool of real processes for LMCache's real classes.

LMCache runs on the CPU, without stubs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("lmcache")

from tests.support.process_cluster import Cluster


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One conductor and one node, shared by all tests that break nothing."""
    running = Cluster(tmp_path_factory.mktemp("lmcache"))
    with running.supervisor:
        running.start_conductor()
        running.start_node("n0", "node.dram_bytes=128MiB")
        running.wait_joined(nodes=1)
        yield running

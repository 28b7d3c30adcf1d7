"""The hbm tier of a real node, on cpu: written and read over NIXL, copied down for others, never lost by it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from kvpool import Pool, hash_chain
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, TransferFailed
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster, wait_until

SIZE = LAYOUT.part_bytes
BLOCKS = 20
SETTINGS = (
    "node.advanced.slab_bytes=128KiB",
    "node.dram_bytes=4MiB",
    "node.hbm_bytes=1MiB",
    "node.advanced.hbm_device=cpu",
)


def chain(seed: int, blocks: int = BLOCKS) -> list[bytes]:
    tokens = np.random.default_rng(seed).integers(0, 50_000, blocks * LAYOUT.block_tokens)
    return hash_chain(NAMESPACE, tokens)


def content(seed: int, blocks: int = BLOCKS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (blocks, SIZE), dtype=np.uint8)


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    with running.supervisor:
        running.start_node(
            "a",
            *SETTINGS,
            f"node.nvme_directories={tmp_path / 'nvme'}",
            "node.nvme_bytes=32MiB",
        )
        yield running


def client(cluster: Cluster, **options: str) -> Pool:
    return Pool(node=cluster.nodes["a"]["wire"], host_label="here", **options)  # type: ignore[arg-type]


def blocks_in(cluster: Cluster, tier: str) -> int:
    return sum(t["blocks"] for t in cluster.node_stats("a")["tiers"] if t["tier"] == tier)


def counters(cluster: Cluster) -> dict[str, float]:
    found: dict[str, float] = cluster.node_stats("a")["counters"]
    return found


def test_hbm_is_written_and_read_over_nixl_and_copied_down_for_others(cluster: Cluster) -> None:
    hashes, data = chain(1), content(1)
    with client(cluster) as writer:
        put = writer.put(NAMESPACE, hashes, data, tier=Tier.HBM)
        assert (put.stored, put.bytes_moved) == (BLOCKS, {"nixl": BLOCKS * SIZE})
    assert (blocks_in(cluster, "hbm"), blocks_in(cluster, "dram")) == (BLOCKS, 0)
    out = np.zeros_like(data)
    with client(cluster) as reader:  # another client: the node has its bytes, not its memory
        got = reader.get(NAMESPACE, hashes, out, tier=Tier.HBM)
        assert (got.found, got.verified, got.miss_reason) == (BLOCKS, BLOCKS, "")
        assert got.tiers == (Tier.HBM,) * BLOCKS
        assert got.bytes_moved == {"nixl": BLOCKS * SIZE}
        assert (out == data).all()
        assert blocks_in(cluster, "dram") == 0  # nothing had to be copied for it
    out[:] = 0
    with client(cluster) as other:
        got = other.get(NAMESPACE, hashes, out)
        assert (got.found, got.tiers) == (BLOCKS, (Tier.DRAM,) * BLOCKS)
        assert got.bytes_moved == {"shm": BLOCKS * SIZE}
        assert (out == data).all()
        found = other.lookup(NAMESPACE, hashes)
        assert (found.found, found.segments[0].tier) == (BLOCKS, Tier.HBM)
    assert counters(cluster)["demoted:dram"] == BLOCKS
    assert cluster.node_stats("a")["leases"] == 0


def test_a_run_over_both_tiers_is_written_and_read_in_one_call(cluster: Cluster) -> None:
    hashes, data = chain(2, 60), content(2, 60)  # 1.4 MiB into 1 MiB
    out = np.zeros_like(data)
    with client(cluster) as pool:
        assert pool.put(NAMESPACE, hashes, data, tier=Tier.HBM).stored == 60
        in_hbm = blocks_in(cluster, "hbm")
        assert 0 < in_hbm < 60
        got = pool.get(NAMESPACE, hashes, out, tier=Tier.HBM)
    assert got.tiers[:in_hbm] == (Tier.HBM,) * in_hbm
    assert got.found == 60
    assert (out == data).all()


def test_under_pressure_blocks_sink_and_all_are_found_and_right(cluster: Cluster) -> None:
    """Four times what hbm holds, and more than dram: down to nvme, nothing lost, all bytes right."""
    count = 10
    with client(cluster) as pool:
        for seed in range(count):
            pool.put(NAMESPACE, chain(seed), content(seed), tier=Tier.HBM)
            # As fast as blocks get down, and no faster: else dram would lose some, as without hbm.
            wait_until(partial(_is_safe, cluster, (seed + 1) * BLOCKS), "written through")
        assert blocks_in(cluster, "hbm") <= (1 << 20) // SIZE
        for seed in range(count):
            for tier in (Tier.DRAM, Tier.HBM):
                out = np.zeros_like(content(seed))
                got = pool.get(NAMESPACE, chain(seed), out, tier=tier)
                assert (got.found, got.miss_reason) == (BLOCKS, "")
                assert (out == content(seed)).all()
    seen = counters(cluster)
    assert seen["evicted:hbm"] > 0
    assert seen["demoted:nvme"] > 0
    assert seen.get("lost", 0) == seen.get("corrupt_blocks", 0) == 0


def _is_safe(cluster: Cluster, blocks: int) -> bool:
    """Of so many blocks, all that are not in hbm are on nvme."""
    return blocks_in(cluster, "nvme") >= blocks - blocks_in(cluster, "hbm")


def test_prefetch_brings_blocks_into_hbm_from_dram_and_nvme(cluster: Cluster) -> None:
    hashes, data = chain(3), content(3)
    with client(cluster) as pool:
        pool.put(NAMESPACE, hashes, data)
        assert pool.prefetch(NAMESPACE, hashes, tier=Tier.HBM).accepted == BLOCKS
        wait_until(lambda: blocks_in(cluster, "hbm") == BLOCKS, "brought up")
        assert pool.prefetch(NAMESPACE, hashes, tier=Tier.HBM).resident == BLOCKS
        out = np.zeros_like(data)
        got = pool.get(NAMESPACE, hashes, out, tier=Tier.HBM)
        assert (got.tiers, got.bytes_moved) == ((Tier.HBM,) * BLOCKS, {"nixl": out.nbytes})
        assert (out == data).all()
        wait_until(lambda: blocks_in(cluster, "nvme") == BLOCKS, "written through")
    cluster.kill("a")
    cluster.supervisor.members.remove(cluster.member("a"))
    cluster.start_node(
        "a",
        *SETTINGS,
        f"node.nvme_directories={cluster.directory / 'nvme'}",
        "node.nvme_bytes=32MiB",
    )
    with client(cluster) as pool:
        assert pool.prefetch(NAMESPACE, hashes, tier=Tier.HBM).accepted == BLOCKS
        wait_until(lambda: blocks_in(cluster, "hbm") == BLOCKS, "brought up from nvme")
        assert blocks_in(cluster, "dram") == 0  # it did not pass through there
        out[:] = 0
        assert pool.get(NAMESPACE, hashes, out, tier=Tier.HBM).found == BLOCKS
        assert (out == data).all()


def test_a_client_without_nixl_has_dram_whatever_it_asks_for(cluster: Cluster) -> None:
    hashes, data = chain(4), content(4)
    with client(cluster, transport="shm") as pool:
        put = pool.put(NAMESPACE, hashes, data, tier=Tier.HBM)
        assert put.bytes_moved == {"shm": data.nbytes}
        assert (blocks_in(cluster, "hbm"), blocks_in(cluster, "dram")) == (0, BLOCKS)
        with pytest.raises(InvalidArgument, match="nvme"):
            pool.put(NAMESPACE, hashes, data, tier=Tier.NVME)


async def test_shared_memory_refuses_places_in_hbm(cluster: Cluster) -> None:
    from kvpool import AsyncPool
    from kvpool.transports import Pieces

    async with AsyncPool(node=cluster.nodes["a"]["wire"], host_label="here") as pool:
        hashes, data = chain(5, 1), content(5, 1)
        await pool.put(NAMESPACE, hashes, data, tier=Tier.HBM)
        [info] = await pool.nodes()
        link = pool.directory.link_to(info.descriptor)
        lease = await link.pin(NAMESPACE, hashes, ttl_s=5, timeout_s=5, tier=Tier.HBM)
        out = np.zeros(SIZE, np.uint8)
        pieces = Pieces(np.array([out.ctypes.data]), lease.places, np.array([SIZE]), out)
        with pytest.raises(TransferFailed, match="in HBM, which cannot be mapped"):
            pool.transports.get("shm").read(info.descriptor, pieces, 5)
        link.release(lease)


def test_inline_reads_come_from_hbm_and_stats_say_what_it_is(cluster: Cluster) -> None:
    hashes, data = chain(6, 1), content(6, 1)
    with client(cluster) as pool:
        pool.put(NAMESPACE, hashes, data, tier=Tier.HBM)
    url = f"http://{cluster.nodes['a']['http']}/v1/blocks/{NAMESPACE.namespace_id.hex()}"
    reply = httpx.get(f"{url}/{hashes[0].hex()}")
    assert (reply.headers["X-Kvpool-Tier"], reply.content) == ("hbm", data.tobytes())
    [hbm] = [t for t in cluster.node_stats("a")["tiers"] if t["tier"] == "hbm"]
    assert hbm["note"] == "hbm on cpu: for trying out"


@pytest.mark.skipif(not _has_cuda(), reason="needs a CUDA device")
def test_hbm_of_a_gpu_is_written_and_read_over_nixl(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    hashes, data = chain(7), content(7)
    out = np.zeros_like(data)
    with cluster.supervisor:
        cluster.start_node("a", *SETTINGS[:-1], "node.advanced.hbm_device=cuda:0")
        with client(cluster) as pool:
            put = pool.put(NAMESPACE, hashes, data, tier=Tier.HBM)
            assert put.bytes_moved == {"nixl": data.nbytes}
            [info] = pool.nodes()
            [hbm] = [a for a in info.descriptor.arenas if a.tier == Tier.HBM]
            assert (hbm.kind, hbm.device_id) == ("vram", 0)
            got = pool.get(NAMESPACE, hashes, out, tier=Tier.HBM)
            assert (got.tiers, got.bytes_moved) == ((Tier.HBM,) * BLOCKS, {"nixl": data.nbytes})
            assert (out == data).all()
            out[:] = 0
            got = pool.get(NAMESPACE, hashes, out)
            assert (got.tiers, got.bytes_moved) == ((Tier.DRAM,) * BLOCKS, {"shm": data.nbytes})
            assert (out == data).all()


def test_a_device_that_is_not_there_ends_the_start_with_a_clear_error(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.supervisor:
        member = cluster.launch_node("a", "node.hbm_bytes=2MiB", "node.advanced.hbm_device=cuda:99")
        assert member.process.wait(60) == 2
    logged = "".join(path.read_text() for path in (tmp_path / "logs").iterdir() if path.is_file())
    assert "cuda:99" in logged
    assert "is not there" in logged
    assert "Traceback" not in logged

"""The KV stores behind vLLM that `kvpool bench vllm` measures: the pool, and the peers that are installed.

Each runs as its users would run it on one host, over loopback or shared memory, with its own
defaults.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import PeerMissing, mooncake_master
from kvpool.serving.supervisor import Supervisor

HOST = "bench"
SLAB = "64MiB"


@dataclass(slots=True, frozen=True)
class Backend:
    """A store, as vLLM is configured for it.

    Args:
        transfer: vLLM's `KVTransferConfig`.
        reader_role: `kv_role` of the process that reads. If it stored too, it would find what it
            computed itself.
        is_shared: another process finds what one has stored. If not, hits are measured in the
            process that stored, after it has dropped its own prefix cache.
    """

    transfer: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    is_shared: bool = True
    reader_role: str = "kv_both"


@contextlib.contextmanager
def kvpool(directory: Path, store_bytes: int) -> Iterator[Backend]:
    """A conductor and a node on this host."""
    with Supervisor(directory / "kvpool") as supervisor:
        ports = ("--wire-port", "0", "--http-port", "0", "--grpc-port", "0")
        conductor = supervisor.start("conductor", ["conductor", *ports])
        node = ["--set", f"node.advanced.slab_bytes={SLAB}", "node", *ports, "--host-label", HOST]
        supervisor.start(
            "node", [*node, "--dram", str(store_bytes), "--conductor", conductor["wire"]]
        )
        yield Backend(
            {
                "kv_connector": "KVPoolConnector",
                "kv_connector_module_path": "kvpool.engines.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"conductor": conductor["wire"], "host_label": HOST},
            },
            reader_role="kv_consumer",
        )


@contextlib.contextmanager
def mooncake_store(directory: Path, store_bytes: int) -> Iterator[Backend]:
    """vLLM's MooncakeStoreConnector over TCP, with a master and a segment in each vLLM process."""
    with mooncake_master(directory) as port:
        config = directory / "mooncake.json"
        config.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": f"127.0.0.1:{port}",
                    "protocol": "tcp",
                    "device_name": "",
                    "global_segment_size": store_bytes,
                    "local_buffer_size": 512 << 20,
                }
            )
        )
        transfer = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
        transfer["kv_load_failure_policy"] = "recompute"
        yield Backend(transfer, {"MOONCAKE_CONFIG_PATH": str(config)})


@contextlib.contextmanager
def offloading(directory: Path, store_bytes: int) -> Iterator[Backend]:
    """vLLM's own offloading to host memory."""
    extra = {"cpu_bytes_to_use": store_bytes}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    yield Backend(transfer | {"kv_connector_extra_config": extra}, is_shared=False)


@contextlib.contextmanager
def lmcache(directory: Path, store_bytes: int) -> Iterator[Backend]:
    """LMCache in vLLM's process, with its store in host memory."""
    if importlib.util.find_spec("lmcache") is None:
        raise PeerMissing("pip install lmcache")
    env = {
        "PYTHONHASHSEED": "0",  # LMCache's keys depend on it
        "LMCACHE_CHUNK_SIZE": "128",
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(store_bytes / (1 << 30)),
    }
    transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    yield Backend(transfer, env, is_shared=False)


Open = Callable[[Path, int], AbstractContextManager[Backend]]
PEERS: dict[str, Open] = {
    "mooncake": mooncake_store,
    "offloading": offloading,
    "lmcache": lmcache,
}

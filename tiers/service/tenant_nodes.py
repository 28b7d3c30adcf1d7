"""The nodes of isolated tenants: a process for each beside this node, with arenas of its own.

A client that reaches a process's memory over NIXL or by file descriptor reaches no other process's
memory, whatever the transport checks. This module starts the processes, restarts them, and stops
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

import structlog

from kvpool.config.loader import NodeConfig, as_environment
from kvpool.errors import KvpoolError

log = structlog.get_logger(__name__)

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 8.0
RESTART_S = 1.0


class TenantNodeFailed(KvpoolError):
    """The node of an isolated tenant did not start."""

    code = "tenant_node_failed"


def tenant_node_config(config: NodeConfig, node_id: str, tenant: str) -> NodeConfig:
    """Settings of the node of one isolated tenant: DRAM alone, on any free ports."""
    number = hashlib.sha256(tenant.encode()).hexdigest()[:8]  # paths and ids show no tenant
    advanced = config.advanced
    runtime = advanced.runtime_dir / number if advanced.runtime_dir is not None else None
    advanced_changes: dict[str, Any] = {
        "slab_bytes": min(advanced.slab_bytes, advanced.isolated_dram_bytes),
        "isolated_dram_bytes": 0,
        "runtime_dir": runtime,
    }
    changes: dict[str, Any] = {
        "tenant": tenant,
        "node_id": f"{node_id}-{number}",
        "dram_bytes": advanced.isolated_dram_bytes,
        "wire_port": 0,
        "http_port": 0,
        "grpc_port": 0,
        "data_dir": None,
        "nvme_directories": (),
        "nvme_bytes": 0,
        "hbm_bytes": 0,
        "quotas": {},
        "advanced": {**dict(advanced), **advanced_changes},
    }
    return NodeConfig(**{**dict(config), **changes})


class TenantNodes:
    """Runs a node for each isolated tenant.

    Args:
        config, node_id: of the node that starts them.
    """

    def __init__(self, config: NodeConfig, node_id: str, tenants: Iterable[str]) -> None:
        self._configs = [tenant_node_config(config, node_id, tenant) for tenant in sorted(tenants)]
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._drain_s = config.advanced.drain_s if config.drain_on_stop else 0.0
        self._is_stopping = False

    async def start(self) -> list[asyncio.Task[None]]:
        """Start all nodes.

        Returns:
            A task for each node, which restarts it when it ends.

        Raises:
            TenantNodeFailed: one was not ready in time; all were stopped again.
        """
        try:
            await asyncio.gather(*(self._start(config) for config in self._configs))
        except BaseException:
            await self.stop()
            raise
        return [
            asyncio.create_task(self._keep(config), name=f"tenant node {config.node_id}")
            for config in self._configs
        ]

    async def stop(self) -> None:
        """Stop all nodes and wait for their end."""
        self._is_stopping = True
        alive = [p for p in self._processes.values() if p.returncode is None]
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        ends = [asyncio.ensure_future(process.wait()) for process in alive]
        if ends:
            await asyncio.wait(ends, timeout=STOP_TIMEOUT_S + self._drain_s)
        for process in alive:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _start(self, config: NodeConfig) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVPOOL_NODE__")}
        env |= {**as_environment("node", config), "KVPOOL_PARENT_PID": str(os.getpid())}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "kvpool", "node"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=env,
            start_new_session=True,  # Ctrl-C reaches only this process
        )
        self._processes[str(config.node_id)] = process
        assert process.stdout is not None
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line:
            raise TenantNodeFailed(
                f"the node {config.node_id} of an isolated tenant is not ready",
                hint="its log is above; see node.advanced.isolated_dram_bytes",
            )
        log.info("tenant node ready", node=config.node_id, wire=json.loads(line)["wire"])

    async def _keep(self, config: NodeConfig) -> None:
        while True:
            code = await self._processes[str(config.node_id)].wait()
            if self._is_stopping:
                await asyncio.Event().wait()  # until cancelled
            log.error("tenant node ended, restarting it", node=config.node_id, status=code)
            await asyncio.sleep(RESTART_S)
            try:
                await self._start(config)
            except TenantNodeFailed as error:
                log.error("tenant node did not start", error=str(error))

"""`kvpool node`: run a pool node in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli.context import invocation, overrides
from kvpool.serving.process import run_process


def node(
    ctx: typer.Context,
    host: Annotated[str | None, typer.Option(help="Address to bind.")] = None,
    host_label: Annotated[str | None, typer.Option(help="Name of this machine.")] = None,
    conductor: Annotated[str | None, typer.Option(help="Conductor's wire address.")] = None,
    wire_port: Annotated[int | None, typer.Option(help="Wire port; 0 picks a free one.")] = None,
    http_port: Annotated[int | None, typer.Option(help="HTTP port; 0 picks a free one.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; 0 picks a free one.")] = None,
    dram: Annotated[str | None, typer.Option(help="DRAM to lend, e.g. 4GiB.")] = None,
    hbm: Annotated[
        str | None, typer.Option(help="Device memory to lend, e.g. 16GiB (see node.advanced).")
    ] = None,
    nvme_directory: Annotated[
        list[Path] | None, typer.Option(help="Directory of the NVMe tier; once for each device.")
    ] = None,
    nvme: Annotated[str | None, typer.Option(help="NVMe space to lend, e.g. 100GiB.")] = None,
) -> None:
    """Run a pool node in the foreground; prints one JSON line when ready."""
    from tiers.server import run_node

    settings = invocation(ctx).start(
        "node",
        overrides(
            host=("node.host", host),
            host_label=("node.host_label", host_label),
            conductor=("node.conductor", conductor),
            wire_port=("node.wire_port", wire_port),
            http_port=("node.http_port", http_port),
            grpc_port=("node.grpc_port", grpc_port),
            dram=("node.dram_bytes", dram),
            hbm=("node.hbm_bytes", hbm),
            nvme=("node.nvme_bytes", nvme),
            nvme_directory=("node.nvme_directories", nvme_directory or None),
        ),
    )
    run_process(lambda ready, stop: run_node(settings.node, ready, stop))

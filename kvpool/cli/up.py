"""Commands that run servers: each in the foreground, or all of a small pool at once."""

from __future__ import annotations

import signal
import tempfile
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.cli.context import invocation, overrides
from kvpool.cli.output import error_console
from kvpool.config import Override
from kvpool.errors import KvpoolError
from kvpool.fleet import Fleet
from kvpool.process import run_process

READY_TIMEOUT_S = 60.0
MODEL_TIMEOUT_S = 300.0  # the first start may convert the model


def conductor(
    ctx: typer.Context,
    host: Annotated[str | None, typer.Option(help="Address to bind.")] = None,
    wire_port: Annotated[int | None, typer.Option(help="Wire port; 0 picks a free one.")] = None,
    http_port: Annotated[int | None, typer.Option(help="HTTP port; 0 picks a free one.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; 0 picks a free one.")] = None,
    model: Annotated[Path | None, typer.Option(help="Directory with the tokenizer.")] = None,
) -> None:
    """Run the conductor in the foreground; prints one JSON line when ready."""
    from conductor.server import run_conductor

    settings = invocation(ctx).start(
        "conductor",
        overrides(
            host=("conductor.host", host),
            wire_port=("conductor.wire_port", wire_port),
            http_port=("conductor.http_port", http_port),
            grpc_port=("conductor.grpc_port", grpc_port),
            model=("conductor.model_path", model),
        ),
    )
    run_process(lambda ready, stop: run_conductor(settings.conductor, ready, stop))


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
        str | None, typer.Option(help="Device memory to lend, e.g. 16GiB (see node.hbm_device).")
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
        )
        + _nvme_overrides(nvme_directory or []),
    )
    run_process(lambda ready, stop: run_node(settings.node, ready, stop))


def up(
    ctx: typer.Context,
    nodes: Annotated[int, typer.Option(min=1, max=16, help="Pool nodes.")] = 1,
    prefill: Annotated[int, typer.Option(min=0, max=16, help="Prefill workers.")] = 0,
    decode: Annotated[int, typer.Option(min=0, max=16, help="Decode workers.")] = 0,
    model: Annotated[
        str | None, typer.Option(help="Model for the workers, e.g. smollm2-135m.")
    ] = None,
    free_ports: Annotated[
        bool, typer.Option("--free-ports", help="Pick free ports instead of the configured ones.")
    ] = False,
    log_dir: Annotated[Path | None, typer.Option(help="Where logs go; default: temporary.")] = None,
) -> None:
    """Run conductor, nodes and, if asked, workers on this machine until Ctrl-C. Needs nothing else."""
    options = invocation(ctx)
    settings = options.load().settings
    if (prefill or decode) and model is None and settings.worker.model is None:
        raise KvpoolError("workers need a model", hint="add --model smollm2-135m to try it out")
    model = model or settings.worker.model
    model_path = None
    if model is not None:
        from workers.model_files import default_cache_dir, prepare_model

        model_path = prepare_model(model, default_cache_dir())
    out = error_console()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    log_dir = log_dir or Path(tempfile.mkdtemp(prefix="kvpool-logs-"))
    shared = _passed_on(options)
    with Fleet(log_dir) as fleet:
        ports = _free_ports if free_ports else _ports_after
        config = settings.conductor
        facts = fleet.start(
            "conductor",
            [*shared, "conductor"]
            + _port_flags(ports(config.wire_port, config.http_port, config.grpc_port, 0))
            + (["--model", str(model_path)] if model_path else []),
            READY_TIMEOUT_S,
        )
        address = facts["wire"]
        out.print(f"conductor  wire {address}  http {facts['http']}  grpc {facts['grpc']}")
        for i in range(nodes):
            own = settings.node
            flags = _port_flags(ports(own.wire_port, own.http_port, own.grpc_port, i))
            command = [*shared, "node", "--conductor", address, *flags]
            if nodes > 1:
                for path in own.nvme_paths:
                    command += ["--nvme-directory", str(path / f"node-{i}")]
            node_facts = fleet.start(f"node-{i}", command, READY_TIMEOUT_S)
            out.print(
                f"node       wire {node_facts['wire']}  transports {node_facts['transports']}"
            )
        waiting = []
        roles = ["prefill"] * prefill + ["decode"] * decode
        for i, role in enumerate(roles):
            own_worker = settings.worker
            flags = _port_flags(ports(own_worker.wire_port, own_worker.http_port, None, i))
            command = [*shared, "worker", "--role", role, "--conductor", address, *flags]
            command += ["--model", str(model_path), "--model-name", str(model)]
            waiting.append(fleet.launch(f"{role}-{i}", command))
        for member in waiting:
            worker_facts = fleet.wait_ready(member, MODEL_TIMEOUT_S)
            out.print(f"{worker_facts['role']:<10} wire {worker_facts['wire']}")
        out.print(f"logs in {log_dir}; Ctrl-C stops everything")
        while not stop.wait(0.5):
            fleet.check()
        out.print("stopping")


def _passed_on(options: Any) -> list[str]:
    """Global options as the children get them."""
    flags: list[str] = []
    if options.config_path is not None:
        flags += ["--config", str(options.config_path)]
    for text in options.sets:
        flags += ["--set", text]
    if options.log_level is not None:
        flags += ["--log-level", options.log_level]
    return flags


def _ports_after(wire: int, http: int, grpc: int | None, number: int) -> list[str]:
    """Configured ports, moved by ten for each further process; 0 stays 0."""
    given = [wire, http] + ([grpc] if grpc is not None else [])
    return [str(port + 10 * number if port else 0) for port in given]


def _nvme_overrides(directories: list[Path]) -> list[Override]:
    """One key or the other, and the one that the environment or a file may have set is unset."""
    if not directories:
        return []
    one = str(directories[0]) if len(directories) == 1 else "none"
    several = ",".join(map(str, directories)) if len(directories) > 1 else "none"
    flag = "--nvme-directory"
    return [
        Override("node.nvme_directory", one, flag),
        Override("node.nvme_directories", several, flag),
    ]


def _port_flags(ports: list[str]) -> list[str]:
    names = ("--wire-port", "--http-port", "--grpc-port")
    return [text for pair in zip(names, ports, strict=False) for text in pair]


def _free_ports(_wire: int, _http: int, grpc: int | None, _number: int) -> list[str]:
    return ["0", "0"] + (["0"] if grpc is not None else [])

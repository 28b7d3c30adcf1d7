"""`kvpool up`: all processes of a small pool on this machine."""

from __future__ import annotations

import signal
import tempfile
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.cli.context import invocation
from kvpool.cli.output import error_console
from kvpool.errors import KvpoolError
from kvpool.serving.supervisor import Supervisor

READY_TIMEOUT_S = 60.0
MODEL_TIMEOUT_S = 300.0  # the first start may convert the model


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
    log_dir: Annotated[
        Path | None, typer.Option(help="Directory for logs; default: a temporary one.")
    ] = None,
) -> None:
    """Run a conductor, pool nodes and optionally workers on this machine until Ctrl-C."""
    options = invocation(ctx)
    settings = options.load().settings
    if (prefill or decode) and model is None and settings.worker.model is None:
        raise KvpoolError("workers need a model", hint="add --model smollm2-135m to try it out")
    model = model or settings.worker.model
    model_path = None
    if model is not None:
        from workers.engine.model_files import default_cache_dir, prepare_model

        model_path = prepare_model(model, default_cache_dir())
    out = error_console()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    log_dir = log_dir or Path(tempfile.mkdtemp(prefix="kvpool-logs-"))
    shared = _passed_on(options)
    with Supervisor(log_dir) as supervisor:
        ports = _free_ports if free_ports else _ports_after
        config = settings.conductor
        facts = supervisor.start(
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
                for path in own.nvme_directories:
                    command += ["--nvme-directory", str(path / f"node-{i}")]
            node_facts = supervisor.start(f"node-{i}", command, READY_TIMEOUT_S)
            transports = ", ".join(node_facts["transports"])
            out.print(f"node       wire {node_facts['wire']}  transports {transports}")
        waiting = []
        roles = ["prefill"] * prefill + ["decode"] * decode
        for i, role in enumerate(roles):
            own_worker = settings.worker
            place = nodes - 1 + i  # further nodes take the ports before
            flags = _port_flags(ports(own_worker.wire_port, own_worker.http_port, None, place))
            command = [*shared, "worker", "--role", role, "--conductor", address, *flags]
            command += ["--model", str(model_path), "--model-name", str(model)]
            waiting.append(supervisor.launch(f"{role}-{i}", command))
        for member in waiting:
            worker_facts = supervisor.wait_ready(member, MODEL_TIMEOUT_S)
            out.print(f"{worker_facts['role']:<10} wire {worker_facts['wire']}")
        out.print(f"Logs are in {log_dir}. Ctrl-C stops all processes.")
        while not stop.wait(0.5):
            supervisor.check()
        out.print("Stopping all processes.")


def _passed_on(options: Any) -> list[str]:
    """The global options, as arguments for the children."""
    flags: list[str] = []
    if options.config_path is not None:
        flags += ["--config", str(options.config_path)]
    for text in options.sets:
        flags += ["--set", text]
    if options.log_level is not None:
        flags += ["--log-level", options.log_level]
    return flags


def _ports_after(wire: int, http: int, grpc: int | None, number: int) -> list[str]:
    """The configured ports, plus 10 for each further process; 0 stays 0."""
    given = [wire, http] + ([grpc] if grpc is not None else [])
    return [str(port + 10 * number if port else 0) for port in given]


def _port_flags(ports: list[str]) -> list[str]:
    names = ("--wire-port", "--http-port", "--grpc-port")
    return [text for pair in zip(names, ports, strict=False) for text in pair]


def _free_ports(_wire: int, _http: int, grpc: int | None, _number: int) -> list[str]:
    return ["0", "0"] + (["0"] if grpc is not None else [])

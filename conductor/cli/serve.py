"""`kvpool conductor`: run the conductor in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli.context import invocation, overrides
from kvpool.serving.process import run_process


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

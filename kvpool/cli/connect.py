"""The client of a command: its option `--conductor`, and the configured settings."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli.context import invocation, overrides
from kvpool.client import Pool
from kvpool.wire.credentials import credentials_of

Conductor = Annotated[
    str | None,
    typer.Option("--conductor", help="Wire address of the conductor; default: client.conductor."),
]


def open_pool(ctx: typer.Context, conductor: str | None) -> Pool:
    """A client of the configured pool; `conductor` overrides the configured address."""
    given = overrides(conductor=("client.conductor", conductor))
    settings = invocation(ctx).load(given).settings.client
    return Pool(
        conductor=settings.conductor,
        host_label=settings.host_label,
        transport=settings.transport,
        timeout_s=settings.timeout_s,
        verify_checksums=settings.verify_checksums,
        credentials=credentials_of(settings),
        require_rdma=settings.require_rdma,
    )

"""`kvpool worker`: run one, or measure how fast it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.cli.context import invocation, overrides
from kvpool.cli.output import console, error_console, format_seconds
from kvpool.client import AsyncPool
from kvpool.config.profile_file import ProfileFile, write_profile_file
from kvpool.config.settings import Settings
from kvpool.errors import NotFound
from kvpool.serving.process import run_process
from kvpool.wire import WireClient
from kvpool.wire.credentials import credentials_of

app = typer.Typer(invoke_without_command=True)


@app.callback()
def worker(
    ctx: typer.Context,
    role: Annotated[str | None, typer.Option(help="prefill, decode or both.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model directory, or smollm2-135m to try it out.")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="Name of the model in requests.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind.")] = None,
    host_label: Annotated[str | None, typer.Option(help="Name of this machine.")] = None,
    conductor: Annotated[str | None, typer.Option(help="Conductor's wire address.")] = None,
    wire_port: Annotated[int | None, typer.Option(help="Wire port; 0 picks a free one.")] = None,
    http_port: Annotated[int | None, typer.Option(help="HTTP port; 0 picks a free one.")] = None,
) -> None:
    """Run a worker in the foreground. Prints one JSON line when it is ready."""
    if ctx.invoked_subcommand is not None:
        return
    from workers.server import run_worker

    settings = invocation(ctx).start(
        "worker",
        overrides(
            role=("worker.role", role),
            model=("worker.model", model),
            model_name=("worker.model_name", model_name),
            host=("worker.host", host),
            host_label=("worker.host_label", host_label),
            conductor=("worker.conductor", conductor),
            wire_port=("worker.wire_port", wire_port),
            http_port=("worker.http_port", http_port),
        ),
    )
    run_process(
        lambda ready, stop: run_worker(
            settings.worker, settings.client, settings.fake_engine, ready, stop
        )
    )


@app.command()
def profile(
    ctx: typer.Context,
    out: Annotated[Path, typer.Argument(help="File to write: .json is JSON, else YAML.")],
    model: Annotated[
        str | None, typer.Option(help="Load this model and measure it in this process.")
    ] = None,
    running: Annotated[
        str | None,
        typer.Option(
            "--running", help="Measure this running worker instead: its id or the start of it."
        ),
    ] = None,
    conductor: Annotated[
        str | None, typer.Option(help="Conductor's wire address, to find a running worker.")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, separated by commas.")
    ] = "128,512,1024,2048",
    batches: Annotated[
        str, typer.Option(help="Numbers of sequences that decode at once, separated by commas.")
    ] = "1,2,4",
) -> None:
    """Measure prefill and decode, and write the profile that `conductor.profile` reads."""
    from workers.service.profile_fit import fit_profile
    from workers.service.profiling import MeasurementGrid, parse_numbers

    given = overrides(model=("worker.model", model), conductor=("client.conductor", conductor))
    settings = invocation(ctx).load(given).settings
    grid = MeasurementGrid(parse_numbers(lengths), parse_numbers(batches))
    if running is not None:
        name, measured = asyncio.run(_running(settings, running, grid))
    else:
        name, measured = _loaded(settings, grid)
    fitted = fit_profile(measured.prefill, measured.decode, name, settings.worker.device)
    write_profile_file(out, fitted)
    _print(fitted)
    console().print(f"written to {out}; use it: kvpool --set conductor.profile={out} conductor")


def _loaded(settings: Settings, grid: Any) -> tuple[str, Any]:
    from workers.server import load_engine
    from workers.service.profiling import measure_engine

    engine = load_engine(settings.worker, settings.fake_engine)
    return engine.model_name, measure_engine(engine, grid, _say)


async def _running(settings: Settings, worker_id: str, grid: Any) -> tuple[str, Any]:
    from workers.service.profiling import measure_worker

    client = settings.client
    credentials = credentials_of(client)
    async with AsyncPool(
        conductor=client.conductor, host_label=client.host_label, credentials=credentials
    ) as pool:
        workers = [info.descriptor for info in (await pool.stats()).workers]
    found = [one for one in workers if one.worker_id.startswith(worker_id)]
    if len(found) != 1:
        raise NotFound(
            f"{len(found)} workers have an id that begins with {worker_id!r}",
            hint="kvpool stats lists the workers",
        )
    wire = WireClient(found[0].address, "profile", credentials=credentials)
    try:
        return found[0].model, await measure_worker(wire, found[0], grid, _say)
    finally:
        await wire.close()


def _say(text: str) -> None:
    error_console().print(f"measured {text}", markup=False)


def _print(profile: ProfileFile) -> None:
    prefill, tpot = profile.prefill, profile.tpot
    assert prefill is not None
    assert tpot is not None
    out = console()
    for tokens in (1024, 4096):
        seconds = prefill.base_s + tokens * (prefill.token_s + prefill.attention_s * tokens / 2)
        out.print(f"prefill of {tokens} tokens  {format_seconds(seconds)}")
    for batch in (1, 8):
        seconds = tpot.base_s + batch * (tpot.sequence_s + 1024 * tpot.context_s)
        out.print(f"decode step, {batch} x 1024 tokens  {format_seconds(seconds)}")

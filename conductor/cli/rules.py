"""`kvpool rules`: check, show, apply, roll back and explain the routing rules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.cli.context import invocation, overrides
from kvpool.cli.output import console, print_json, print_table
from kvpool.client import Pool
from kvpool.errors import ConfigError
from kvpool.wire import messages as m
from kvpool.wire.credentials import credentials_of
from kvpool.wire.json_view import named

app = typer.Typer(help="Check, change or explain the routing rules.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="YAML file with routing rules.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Conductor = Annotated[
    str | None, typer.Option("--conductor", help="Conductor's wire address; default: configured.")
]


@app.command()
def check(file: File, as_json: AsJson = False) -> None:
    """Check a file without a conductor; exit status 2 if it has an error."""
    from conductor.routing.rules import parse_rules

    rules = [rule.name for rule in parse_rules(_text(file), f"file {file}").rules]
    if as_json:
        print_json({"file": file, "ok": True, "rules": rules})
    else:
        console().print(f"{file}: ok, {len(rules)} rules", markup=False)


@app.command()
def show(ctx: typer.Context, conductor: Conductor = None, as_json: AsJson = False) -> None:
    """Show the rules in force."""
    _report(_call(ctx, conductor, m.RulesChange()), as_json)


@app.command()
def apply(
    ctx: typer.Context, file: File, conductor: Conductor = None, as_json: AsJson = False
) -> None:
    """Put a file's rules in force. Running requests go on as they are."""
    text = _text(file)
    from conductor.routing.rules import parse_rules

    parse_rules(text, f"file {file}")  # reports mistakes with the file's name
    _report(_call(ctx, conductor, m.RulesChange("replace", text)), as_json)


@app.command()
def rollback(ctx: typer.Context, conductor: Conductor = None, as_json: AsJson = False) -> None:
    """Serve everything aggregated from now on: each decode worker prefills for itself."""
    _report(_call(ctx, conductor, m.RulesChange("rollback")), as_json)


@app.command()
def resume(ctx: typer.Context, conductor: Conductor = None, as_json: AsJson = False) -> None:
    """End a rollback."""
    _report(_call(ctx, conductor, m.RulesChange("resume")), as_json)


@app.command()
def explain(
    ctx: typer.Context,
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Length of the prompt.")],
    found_tokens: Annotated[int, typer.Option(min=0, help="Of these, in the pool.")] = 0,
    output_tokens: Annotated[int, typer.Option(min=0, help="Expected.")] = 128,
    model: Annotated[str, typer.Option(help="Model asked for.")] = "",
    tenant: Annotated[str, typer.Option(help="Tenant.")] = "",
    endpoint: Annotated[str, typer.Option(help="Route.")] = "/v1/chat/completions",
    key: Annotated[str, typer.Option(help="The request's key, for canaries.")] = "",
    file: Annotated[
        Path | None, typer.Option(help="A rules file and an idle pool, instead of a conductor.")
    ] = None,
    conductor: Conductor = None,
    as_json: AsJson = False,
) -> None:
    """Show what the rules choose for such a request, threshold by threshold."""
    request = m.RulesExplain(
        model, tenant, endpoint, key, prompt_tokens, found_tokens, output_tokens
    )
    verdict = _by_file(file, request) if file else _call(ctx, conductor, request)
    if as_json:
        print_json(named(verdict))
        return
    print_table(
        ("threshold", "value", "limit", "holds"),
        (
            (c.what, f"{c.value:g}", f"{c.threshold:g}", str(c.holds).lower())
            for c in verdict.checks
        ),
    )
    mode = {"": "the scheduler decides by cost", "local": "local (aggregated) prefill"}
    console().print(
        f"{mode.get(verdict.mode, verdict.mode)}: {verdict.reason}"
        + (f", by rule {verdict.rule}" if verdict.rule else ""),
        markup=False,
    )


def _by_file(file: Path, request: m.RulesExplain) -> m.RulesExplanation:
    from conductor.routing.rules_file import RulesFile
    from conductor.routing.service import RulesService
    from conductor.scheduling.inputs import SchedulingInputs

    rules = RulesFile()
    rules.replace(_text(file), f"file {file}")
    return RulesService(rules).explain(request, SchedulingInputs({}, {}))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None


def _call(ctx: typer.Context, conductor: str | None, request: m.Message) -> Any:
    given = overrides(conductor=("client.conductor", conductor))
    settings = invocation(ctx).load(given).settings.client
    with Pool(
        conductor=settings.conductor,
        timeout_s=settings.timeout_s,
        credentials=credentials_of(settings),
    ) as pool:
        return pool.ask_conductor(request)


def _report(reply: m.RulesReply, as_json: bool) -> None:
    if as_json:
        print_json(named(reply))
        return
    out = console()
    out.print(reply.text.rstrip() or "(empty: every request by cost)", markup=False)
    if reply.is_rolled_back:
        out.print("rolled back: every request is served aggregated until `kvpool rules resume`")
    if reply.error:
        out.print(f"the rules file's present content is not in force: {reply.error}", markup=False)

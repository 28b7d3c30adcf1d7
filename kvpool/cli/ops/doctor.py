"""`kvpool doctor`: what this machine offers, what is missing, and what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli.context import invocation
from kvpool.cli.ops.doctor_checks import Check, run_checks
from kvpool.cli.output import console, print_json, print_table


def doctor(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Check what this machine offers to the configuration in force.

    Exit status 1 if something fails; what is only slow or taken is a warning.
    """
    found = run_checks(invocation(ctx).load().settings)
    failed = [check for check in found if check.status == "fail"]
    if as_json:
        print_json({"ok": not failed, "checks": found})
    else:
        _print(found)
    if failed:
        raise typer.Exit(1)


def _print(found: list[Check]) -> None:
    print_table(
        ("check", "status", "found"),
        ((check.name, check.status, check.detail) for check in found),
        styles={"ok": "green", "warn": "yellow", "fail": "red"},
    )
    todo = [check for check in found if check.action]
    if todo:
        console().print("\nwhat to do", style="bold")
    for check in todo:
        console().print(f"  {check.name}: {check.action}", markup=False)

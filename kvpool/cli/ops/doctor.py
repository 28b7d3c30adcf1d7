"""`kvpool doctor`: check this machine, and print what is missing and what to do about it."""

from __future__ import annotations

import typer

from kvpool.cli.context import invocation
from kvpool.cli.ops.doctor_checks import Check, run_checks
from kvpool.cli.output import AsJson, console, print_json, print_table


def doctor(
    ctx: typer.Context,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine fits the configuration.

    The exit status is 1 if a check fails. A slow path or a port in use is a warning.
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

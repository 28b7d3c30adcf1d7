"""`kvpool token`: make API tokens. A token is shown once; files keep its hash."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli.output import AsJson, console, error_console, print_json
from kvpool.errors import ConfigError
from kvpool.security.tokens import TOKEN_BYTES, TOKEN_PREFIX, read_tokens, token_line
from kvpool.wire.principal import Scope

app = typer.Typer(help="Make API tokens.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make API tokens."""


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Name of its holder, shown in messages.")],
    tenant: Annotated[
        str,
        typer.Option(
            "--tenant", help="Tenant of its holder; '*' for the scopes admin, internal and metrics."
        ),
    ],
    scopes: Annotated[
        list[Scope],
        typer.Option("--scope", help="What the token allows; repeatable.", show_choices=True),
    ],
    isolated: Annotated[
        bool, typer.Option("--isolated", help="Keep the tenant's blocks in separate memory.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option("--file", help="Append the line to this tokens file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a new token, and the line for the servers' tokens file (the setting tokens_path)."""
    token = TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    line = token_line(token, name, tenant, scopes, is_isolated=isolated)
    if file is not None:
        _append(file, line)
    if as_json:
        print_json({"token": token, "line": line})
        return
    console().print(token, markup=False, highlight=False, soft_wrap=True)
    if file is None:
        error_console().print("line for the tokens file:", markup=False)
        error_console().print(line, markup=False, highlight=False, soft_wrap=True)
    else:
        error_console().print(f"{file} holds its hash; the token is not shown again", markup=False)


def _append(file: Path, line: str) -> None:
    """Add a line to a file that only its owner can read. On an error the file is unchanged.

    Raises:
        ConfigError: the file with the line would not be a tokens file, or cannot be written.
    """
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    if before and not before.endswith("\n"):
        before += "\n"
    fresh = file.with_name(f".{file.name}.new")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write(f"{before}{line}\n")
        read_tokens(fresh)
        fresh.replace(file)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
    finally:
        fresh.unlink(missing_ok=True)

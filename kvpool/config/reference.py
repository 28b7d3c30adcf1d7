"""Write docs/settings.md: python -m kvpool.config.reference > docs/settings.md"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from kvpool.config.engine_server import EngineServer
from kvpool.config.loader import as_text
from kvpool.config.settings import CallerConfig, Section, ServerConfig, Settings

_HEAD = """\
# Settings

<!-- Generated: python -m kvpool.config.reference > docs/settings.md -->

Settings come from four sources. Later ones win: defaults, a YAML file, the environment, flags.

| source | `node.dram_bytes` | `node.advanced.lease_s` |
| --- | --- | --- |
| file | `node: {dram_bytes: 4GiB}` | `node: {advanced: {lease_s: 10}}` |
| environment | `KVPOOL_NODE__DRAM_BYTES=4GiB` | `KVPOOL_NODE__ADVANCED__LEASE_S=10` |
| flag | `--set node.dram_bytes=4GiB` | `--set node.advanced.lease_s=10` |

The file is that of `--config`, that of `KVPOOL_CONFIG`, or `kvpool.yaml` in the current folder.
`kvpool config show` lists the effective settings with the source of each.
`kvpool config check FILE` checks a file. An unknown key is an error.

Sizes are bytes, or a number with a unit: `64MiB` is binary, `64MB` decimal. Names that end in `_s`
are seconds. In the environment and in flags, a list is written `a,b`, a table `a=1,b=2`, and no value
`none`.

Most installations change no advanced setting.
"""


def markdown() -> str:
    """The whole page."""
    parts = [
        _HEAD,
        "## Shared by the servers\n\n`conductor`, `node` and `worker` each have these settings, "
        "as in `node.host`. `client` has `token`, `tls_ca`, `tls_cert` and `tls_key`.\n",
        _table(ServerConfig, ()),
    ]
    for name, section in Settings():
        kind = type(section)
        parts += [f"## `{name}`\n\n{_sentence(kind)}\n", _table(kind, _shared(kind))]
        if "advanced" in kind.model_fields:
            kind = type(section.advanced)
            parts += [f"### `{name}.advanced`\n\n{_sentence(kind)}\n", _table(kind, ())]
        if name == "conductor":
            parts += [
                f"### An entry of `conductor.engines`\n\n{_sentence(EngineServer)}\n",
                _table(EngineServer, ()),
            ]
    return "\n".join(parts)


def _shared(section: type[Section]) -> tuple[str, ...]:
    """Names that other sections have as well, so that the page describes them once."""
    base = ServerConfig if issubclass(section, ServerConfig) else CallerConfig
    return tuple(base.model_fields) if issubclass(section, base) else ()


def _sentence(kind: type[BaseModel]) -> str:
    return (kind.__doc__ or "").strip()


def _table(kind: type[BaseModel], without: tuple[str, ...]) -> str:
    rows = "\n".join(f"| {' | '.join(row)} |" for row in _rows(kind, without))
    return f"| setting | default | values | |\n| --- | --- | --- | --- |\n{rows}\n"


def _rows(kind: type[BaseModel], without: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    schemas = kind.model_json_schema()["properties"]
    for name, field in kind.model_fields.items():
        if name in without or name == "advanced":
            continue
        if field.default_factory is not None:
            default = "this machine's name"
        elif field.is_required():
            default = "required"
        else:
            value = field.get_default()
            text = _size(value) if name.endswith("_bytes") else as_text(value)
            default = f"`{text}`" if text else ""
        yield f"`{name}`", default, _values(name, schemas[name]), field.description or ""


def _values(name: str, schema: dict[str, Any]) -> str:
    """The values that a setting may have: its choices or its bounds."""
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if schema.get("type") == "boolean":
        return "`true`, `false`"
    if schema.get("type") not in ("integer", "number"):
        return ""
    show = _size if name.endswith("_bytes") and name != "bytes_per_token" else _number
    least, most = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        low = f"above {show(schema['exclusiveMinimum'])}"
    else:
        low = "" if least is None else show(least)
    return f"{low} to {show(most)}" if most is not None else low and f"{low} or more"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _size(value: int) -> str:
    """A size in the largest binary unit that leaves it whole."""
    units = ["", "KiB", "MiB", "GiB", "TiB"]
    while value and value % 1024 == 0 and len(units) > 1:
        value //= 1024
        units = units[1:]
    return f"{value}{units[0]}"


if __name__ == "__main__":
    print(markdown(), end="")

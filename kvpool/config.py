"""Where settings come from: defaults < YAML file < environment < flags, and which of them won.

    environment   KVPOOL_NODE__DRAM_BYTES=4GiB   (two underscores between section and key)
    flag          --set node.dram_bytes=4GiB

The settings themselves, with units and bounds, are in `kvpool.settings`; its names are re-exported here.
An unknown key is an error, never ignored. Environment variables without the two underscores are left
alone, because Kubernetes injects some of its own (KVPOOL_CONDUCTOR_PORT=tcp://...), except where one is
plainly a setting with an underscore too few.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError

from kvpool.errors import ConfigError
from kvpool.settings import (
    ClientConfig,
    ConductorConfig,
    LogConfig,
    NodeConfig,
    Settings,
    WorkerConfig,
    parse_bytes,
    shown,
    split_address,
)

__all__ = [
    "ClientConfig",
    "ConductorConfig",
    "LoadedSettings",
    "LogConfig",
    "NodeConfig",
    "Override",
    "Settings",
    "WorkerConfig",
    "load_settings",
    "parse_bytes",
    "parse_override",
    "shown",
    "split_address",
]

ENV_PREFIX = "KVPOOL_"
ENV_CONFIG = "KVPOOL_CONFIG"
DEFAULT_FILE = "kvpool.yaml"
MAX_FILE_BYTES = 1 << 20
DEFAULT_SOURCE = "default"


class Override(NamedTuple):
    """A value from the command line: dotted key, value, and the flag to name in messages."""

    key: str
    value: object
    source: str


@dataclass(slots=True, frozen=True)
class LoadedSettings:
    """Settings in force, and for every dotted key where its value came from.

    A source is "default", "file PATH", "environment NAME" or a flag as the user typed it.
    """

    settings: Settings
    provenance: dict[str, str]


def parse_override(text: str) -> Override:
    """An `Override` from the argument of `--set`, e.g. "node.dram_bytes=4GiB".

    Raises:
        ConfigError: there is no "=" in it, or no key before it.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: not KEY=VALUE", hint="e.g. --set node.dram_bytes=4GiB")
    return Override(key.strip(), value, f"--set {key.strip()}")


def load_settings(
    config_path: Path | None,
    env: Mapping[str, str],
    overrides: Iterable[Override] = (),
    *,
    directory: Path | None = None,
) -> LoadedSettings:
    """Find, merge and check all settings.

    Args:
        config_path: YAML file; None: `KVPOOL_CONFIG`, else `kvpool.yaml` in `directory` if there.
        env: the environment, usually `os.environ`.
        overrides: values from flags; of two for one key the last wins.
        directory: where to look for `kvpool.yaml`; None: the current directory.

    Raises:
        ConfigError: a file cannot be read, a key is unknown, or a value is not acceptable. The text
            names the key, where it came from, and the nearest known key.
    """
    values: list[Override] = []
    path = config_path or (Path(env[ENV_CONFIG]) if env.get(ENV_CONFIG) else None)
    if path is None:
        found = (directory or Path.cwd()) / DEFAULT_FILE
        path = found if found.is_file() else None
    if path is not None:
        values += _from_file(path)
    values += _from_environment(env)
    values += overrides

    tree: dict[str, dict[str, object]] = {name: {} for name in Settings.model_fields}
    provenance = dict.fromkeys(_KNOWN, DEFAULT_SOURCE)
    for key, value, source in values:
        if key not in _KNOWN:
            raise _unknown(key, source)
        section, _, name = key.partition(".")
        tree[section][name] = value
        provenance[key] = source
    try:
        return LoadedSettings(Settings.model_validate(tree), provenance)
    except ValidationError as error:
        raise ConfigError(_describe(error, provenance)) from None


def _section_keys() -> tuple[str, ...]:
    keys: list[str] = []
    for section, field in Settings.model_fields.items():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            keys += [f"{section}.{name}" for name in model.model_fields]
    return tuple(keys)


_KNOWN = _section_keys()
_ENV_NAMES = {ENV_PREFIX + key.upper().replace(".", "__"): key for key in _KNOWN}


class _StrictLoader(yaml.SafeLoader):
    """YAML where a key given twice is an error, instead of silently meaning the second."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _from_file(path: Path) -> list[Override]:
    source = f"file {path}"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes", hint="wrong file?")
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise ConfigError(
            f"cannot read {source}: {error.strerror}", hint="see --config and KVPOOL_CONFIG"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return []
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: sections are expected at the top, not {_kind(data)}")
    found: list[Override] = []
    for section, content in data.items():
        if section not in Settings.model_fields:
            raise _unknown(str(section), source)
        if content is None:
            continue
        if not isinstance(content, dict):
            raise ConfigError(f"{source}: {section} is a section, not {_kind(content)}")
        found += [Override(f"{section}.{name}", value, source) for name, value in content.items()]
    return found


def _from_environment(env: Mapping[str, str]) -> list[Override]:
    one_underscore = {name.replace("__", "_"): name for name in _ENV_NAMES}
    found: list[Override] = []
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX) or name == ENV_CONFIG:
            continue
        if name in one_underscore:
            raise ConfigError(
                f"environment {name} is not a setting", hint=f"did you mean {one_underscore[name]}?"
            )
        if "__" in name:
            key = name.removeprefix(ENV_PREFIX).replace("__", ".").lower()
            found.append(Override(key, env[name], f"environment {name}"))
    return found


def _unknown(key: str, source: str) -> ConfigError:
    near = difflib.get_close_matches(key, [*_KNOWN, *Settings.model_fields], n=1, cutoff=0.5)
    if not near:
        # The right key in the wrong section, or without one.
        name = key.rpartition(".")[2]
        near = [known for known in _KNOWN if known.partition(".")[2] == name]
    hint = f"did you mean {near[0]}?" if near else f"sections: {', '.join(Settings.model_fields)}"
    return ConfigError(f"unknown setting {key} (from {source})", hint=hint)


def _describe(error: ValidationError, provenance: Mapping[str, str]) -> str:
    problems = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"][:2])
        reason = item["msg"].removeprefix("Value error, ")
        if key in provenance:
            # The input is left out where it may be a secret.
            given = "" if key == "worker.salt" else f", got {reprlib.repr(item['input'])}"
            problems.append(f"{key}: {reason}{given} (from {provenance[key]})")
        else:
            changed = {
                known: source
                for known, source in provenance.items()
                if known.startswith(f"{key}.") and source != DEFAULT_SOURCE
            }
            origin = ", ".join(f"{known} from {source}" for known, source in changed.items())
            problems.append(f"{key}: {reason} ({origin or 'defaults'})")
    return "; ".join(problems)


def _kind(value: object) -> str:
    if isinstance(value, (list, str)):
        return "a list" if isinstance(value, list) else "a text"
    return repr(value)

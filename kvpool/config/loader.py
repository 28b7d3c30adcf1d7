"""Where settings come from: defaults < YAML file < environment < flags, and which of them won.

    environment   KVPOOL_NODE__DRAM_BYTES=4GiB   (two underscores between section and key)
    flag          --set node.dram_bytes=4GiB

The settings themselves, with units and bounds, are in `kvpool.config.settings`; its names are re-exported here.
The readers are those of pydantic-settings, called one by one to learn which of them won.

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

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from kvpool.config.settings import (
    ClientConfig,
    ConductorConfig,
    FakeEngineConfig,
    LogConfig,
    NodeConfig,
    Settings,
    WorkerConfig,
    parse_bytes,
    shown,
    split_address,
)
from kvpool.config.strict_yaml import read_yaml
from kvpool.errors import ConfigError

__all__ = [
    "ClientConfig",
    "ConductorConfig",
    "FakeEngineConfig",
    "LoadedSettings",
    "LogConfig",
    "NodeConfig",
    "Override",
    "Settings",
    "WorkerConfig",
    "as_environment",
    "load_settings",
    "parse_bytes",
    "parse_override",
    "shown",
    "split_address",
]

ENV_PREFIX = "KVPOOL_"
ENV_CONFIG = "KVPOOL_CONFIG"
DEFAULT_FILE = "kvpool.yaml"
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


def as_environment(section: str, config: BaseModel) -> dict[str, str]:
    """Variables from which `load_settings` makes `config` again, secrets in the clear: for a child process."""
    return {f"{ENV_PREFIX}{section}__{name}".upper(): _as_text(value) for name, value in config}


def _as_text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return ",".join(f"{key}={_as_text(item)}" for key, item in value.items())
    return str(value)


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
    path = config_path or (Path(env[ENV_CONFIG]) if env.get(ENV_CONFIG) else None)
    if path is None:
        found = (directory or Path.cwd()) / DEFAULT_FILE
        path = found if found.is_file() else None
    # The later wins. Each with the origin of every key, which the library does not tell.
    layers: list[tuple[PydanticBaseSettingsSource, dict[str, str]]] = []
    if path is not None:
        file = _StrictYamlSource(_Schema, path)
        keys = (f"{section}.{name}" for section, content in file().items() for name in content)
        layers.append((file, dict.fromkeys(keys, f"file {path}")))
    names = _variables(env)
    variables = _nested({name: env[name] for name in names.values()}, ENV_PREFIX, "__")
    layers.append((variables, {key: f"environment {name}" for key, name in names.items()}))
    given = {override.key: override for override in overrides}
    flags = _nested({key: override.value for key, override in given.items()}, "", ".")
    layers.append((flags, {key: override.source for key, override in given.items()}))

    tree: dict[str, dict[str, object]] = {name: {} for name in Settings.model_fields}
    provenance = dict.fromkeys(_KNOWN, DEFAULT_SOURCE)
    for source, origins in layers:
        for key, origin in origins.items():
            if key not in _KNOWN:
                raise _unknown(key, origin)
        provenance |= origins
        for section, content in source().items():
            tree[section] |= content
    try:
        return LoadedSettings(Settings.model_validate(tree), provenance)
    except ValidationError as error:
        raise ConfigError(_describe(error, provenance)) from None


_KNOWN = tuple(f"{section}.{name}" for section, content in Settings() for name, _ in content)
_SECRETS = frozenset(
    f"{section}.{name}"
    for section, content in Settings()
    for name, value in content
    if isinstance(value, SecretStr)
) | {"conductor.engines"}  # which hold keys of servers


class _Schema(BaseSettings, Settings):
    """`Settings` as sources want to see them; never built, since that would read `os.environ`."""

    # Lists are written "a,b", not as JSON, and the settings parse them.
    model_config = SettingsConfigDict(enable_decoding=False)


def _nested(values: Mapping[str, Any], prefix: str, delimiter: str) -> EnvSettingsSource:
    """The library's reader of the environment, reading `values` in its stead."""
    source = EnvSettingsSource(_Schema, env_prefix=prefix, env_nested_delimiter=delimiter)
    source.env_vars = {name.lower(): value for name, value in values.items()}
    return source


class _StrictYamlSource(YamlConfigSettingsSource):
    """A YAML file that must exist, be of bounded size, and hold nothing but known sections."""

    def _read_files(self, files: Any, deep_merge: bool = False) -> dict[str, Any]:
        return self._read_file(files)  # the library's own passes over a file that is not there

    def _read_file(self, file_path: Any) -> dict[str, Any]:
        source = f"file {file_path}"
        data = read_yaml(file_path, hint="see --config and KVPOOL_CONFIG")
        if not isinstance(data, dict | None):
            raise ConfigError(f"{source}: sections are expected at the top, not {_kind(data)}")
        for section, content in (data or {}).items():
            if section not in Settings.model_fields:
                raise _unknown(str(section), source)
            if not isinstance(content, dict | None):
                raise ConfigError(f"{source}: {section} is a section, not {_kind(content)}")
        return {section: content or {} for section, content in (data or {}).items()}


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that are settings: dotted key to name."""
    for name in (ENV_PREFIX + key.upper().replace(".", "__") for key in _KNOWN):
        if (short := name.replace("__", "_")) in env:
            raise ConfigError(f"environment {short} is not a setting", hint=f"did you mean {name}?")
    names = sorted(name for name in env if name.startswith(ENV_PREFIX) and "__" in name)
    return {name.removeprefix(ENV_PREFIX).replace("__", ".").lower(): name for name in names}


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
        within = ".".join(str(part) for part in item["loc"][2:])  # of a list or a mapping
        reason = (f"{within}: " if within else "") + item["msg"].removeprefix("Value error, ")
        if key in provenance:
            # The input is left out where it may be a secret.
            given = "" if key in _SECRETS else f", got {reprlib.repr(item['input'])}"
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
    names: dict[type, str] = {list: "a list", str: "a text"}
    return names.get(type(value), reprlib.repr(value))

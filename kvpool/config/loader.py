"""Read settings from defaults < YAML file < environment < flags, and record which one won.

    file          node: {dram_bytes: 4GiB, advanced: {lease_s: 10}}
    environment   KVPOOL_NODE__DRAM_BYTES=4GiB   KVPOOL_NODE__ADVANCED__LEASE_S=10   (__ is a dot)
    flag          --set node.dram_bytes=4GiB     --set node.advanced.lease_s=10

`kvpool.config.settings` declares the settings; its names are re-exported here. The readers of
pydantic-settings are called one by one, to learn which of them won.

An unknown key is an error. An environment variable without two underscores is ignored, because
Kubernetes injects some of its own (KVPOOL_CONDUCTOR_PORT=tcp://...), unless it is a setting with
underscores missing.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import SecretStr, ValidationError
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
    Section,
    Settings,
    WorkerConfig,
    each_setting,
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
    """A value from the command line: dotted key, value, and the flag as messages name it."""

    key: str
    value: object
    source: str


@dataclass(slots=True, frozen=True)
class LoadedSettings:
    """The effective settings, and the source of each by dotted key.

    A source is "default", "file PATH", "environment NAME" or a flag as the user typed it.
    """

    settings: Settings
    provenance: dict[str, str]


def as_environment(section: str, config: Section) -> dict[str, str]:
    """Environment variables from which `load_settings` makes `config` again, for a child process.

    Secrets are in plain text.
    """
    settings = each_setting(config, section)
    return {_variable(setting.key): as_text(setting.value) for setting in settings}


def _variable(key: str) -> str:
    return ENV_PREFIX + key.upper().replace(".", "__")


def as_text(value: object) -> str:
    """A value as the environment and flags write it."""
    if value is None:
        return "none"
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return ",".join(f"{key}={as_text(item)}" for key, item in value.items())
    return str(value)


def parse_override(text: str) -> Override:
    """Read the argument of `--set`, e.g. "node.dram_bytes=4GiB".

    Raises:
        ConfigError: it has no "=", or no key before it.
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
        config_path: YAML file; None: `KVPOOL_CONFIG`, else `kvpool.yaml` in `directory` if it
            exists.
        env: the environment, usually `os.environ`.
        overrides: values from flags; if two have the same key, the last wins.
        directory: where to look for `kvpool.yaml`; None: the current directory.

    Raises:
        ConfigError: a file cannot be read, a key is unknown, or a value is invalid. The message
            names the key, its source, and the nearest known key.
    """
    path = config_path or (Path(env[ENV_CONFIG]) if env.get(ENV_CONFIG) else None)
    if path is None:
        found = (directory or Path.cwd()) / DEFAULT_FILE
        path = found if found.is_file() else None
    # Later layers win. Each comes with the origin of every key, which the library does not tell.
    layers: list[tuple[PydanticBaseSettingsSource, dict[str, str]]] = []
    if path is not None:
        file = _StrictYamlSource(_Schema, path)
        origin = f"file {path}"
        layers.append((file, {key: origin for key, _ in _leaves(file(), origin)}))
    names = _variables(env)
    variables = _nested({name: env[name] for name in names.values()}, ENV_PREFIX, "__")
    layers.append((variables, {key: f"environment {name}" for key, name in names.items()}))
    given = {override.key: override for override in overrides}
    flags = _nested({key: override.value for key, override in given.items()}, "", ".")
    layers.append((flags, {key: override.source for key, override in given.items()}))

    values: dict[str, object] = {}
    provenance = dict.fromkeys(_KNOWN, DEFAULT_SOURCE)
    for source, origins in layers:
        for key, origin in origins.items():
            if key not in _KNOWN:
                raise _unknown(key, origin)
        provenance |= origins
        values |= _leaves(source(), "")
    try:
        return LoadedSettings(Settings.model_validate(_tree(values)), provenance)
    except ValidationError as error:
        raise ConfigError(_describe(error, provenance)) from None


_KNOWN = tuple(setting.key for setting in each_setting(Settings()))
_SECTIONS = frozenset(key.rpartition(".")[0] for key in _KNOWN)
_SECRETS = frozenset(
    setting.key for setting in each_setting(Settings()) if isinstance(setting.value, SecretStr)
) | {"conductor.engines"}  # which hold keys of servers


def _leaves(content: Mapping[Any, Any], source: str, within: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values in nested mappings.

    Raises:
        ConfigError: a section is not a mapping.
    """
    for name, value in content.items():
        key = f"{within}{name}"
        if key not in _SECTIONS:
            yield key, value
        elif isinstance(value, dict | None):
            yield from _leaves(value or {}, source, f"{key}.")
        else:
            raise ConfigError(f"{source}: {key} is a section, not {_kind(value)}")


def _tree(values: Mapping[str, object]) -> dict[str, Any]:
    """The inverse of `_leaves`."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        content = tree
        for section in sections:
            content = content.setdefault(section, {})
        content[name] = value
    return tree


class _Schema(BaseSettings, Settings):
    """`Settings` as the library's readers want them.

    Never instantiated: that would read `os.environ`.
    """

    # Lists are written "a,b", not as JSON, and the settings parse them.
    model_config = SettingsConfigDict(enable_decoding=False)


def _nested(values: Mapping[str, Any], prefix: str, delimiter: str) -> EnvSettingsSource:
    """The library's reader of the environment, with `values` for the environment."""
    source = EnvSettingsSource(_Schema, env_prefix=prefix, env_nested_delimiter=delimiter)
    source.env_vars = {name.lower(): value for name, value in values.items()}
    return source


class _StrictYamlSource(YamlConfigSettingsSource):
    """A YAML file that must exist, be of bounded size, and have known sections only."""

    def _read_files(self, files: Any, deep_merge: bool = False) -> dict[str, Any]:
        return self._read_file(files)  # the library's own skips a file that does not exist

    def _read_file(self, file_path: Any) -> dict[str, Any]:
        source = f"file {file_path}"
        data = read_yaml(file_path, hint="see --config and KVPOOL_CONFIG")
        if not isinstance(data, dict | None):
            raise ConfigError(f"{source}: sections are expected at the top, not {_kind(data)}")
        for section in data or {}:
            if section not in Settings.model_fields:
                raise _unknown(str(section), source)
        return data or {}


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    """Names of the environment variables that are settings, by dotted key."""
    for name in map(_variable, _KNOWN):
        if (short := name.replace("__", "_")) in env:
            raise ConfigError(f"environment {short} is not a setting", hint=f"did you mean {name}?")
    names = sorted(name for name in env if name.startswith(ENV_PREFIX) and "__" in name)
    return {name.removeprefix(ENV_PREFIX).replace("__", ".").lower(): name for name in names}


def _unknown(key: str, source: str) -> ConfigError:
    if key in _SECTIONS:
        hint = f"{key} is a section: set {key}.KEY"
    else:
        # Compared without "advanced", so that a key is found on the other side of that border, too.
        spelled = {_short(known): known for known in (*_KNOWN, *Settings.model_fields)}
        near = difflib.get_close_matches(_short(key), spelled, n=1, cutoff=0.5)
        if not near:
            # The right key in the wrong section, or without one.
            name = key.rpartition(".")[2]
            near = [short for short in spelled if short.partition(".")[2] == name]
        sections = f"sections: {', '.join(Settings.model_fields)}"
        hint = f"did you mean {spelled[near[0]]}?" if near else sections
    return ConfigError(f"unknown setting {key} (from {source})", hint=hint)


def _short(key: str) -> str:
    return key.replace(".advanced", "")


def _describe(error: ValidationError, provenance: Mapping[str, str]) -> str:
    problems = []
    for item in error.errors(include_url=False):
        location = [str(part) for part in item["loc"]]
        paths = [".".join(location[:length]) for length in range(len(location), 0, -1)]
        key = next((path for path in paths if path in provenance), paths[0] if paths else "")
        within = ".".join(location).removeprefix(key).strip(".")  # of a list or a mapping
        reason = (f"{within}: " if within else "") + item["msg"].removeprefix("Value error, ")
        if key in provenance:
            # A message never quotes a secret.
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

"""Read YAML files that people write: bounded and safe.

A key that is given twice is an error. No schema here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from kvpool.errors import ConfigError

MAX_FILE_BYTES = 1 << 20


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error.

    In plain YAML, the second silently wins.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-07, as Python and JSON write it, as text: it wants a dot. YAML 1.2 reads a
# number.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+\Z"),
    list("-+.0123456789"),
)


def parse_yaml(text: str, source: str) -> Any:
    """The document in `text`; `source` names it in errors.

    Raises:
        ConfigError: it is too long, or not valid YAML.
    """
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{source} exceeds {MAX_FILE_BYTES} bytes", hint="wrong file?")
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: also a bad date
        reason = " ".join(str(error).split())
        raise ConfigError(f"{source} is not valid YAML: {reason}") from None


def read_yaml(path: Path, hint: str = "") -> Any:
    """The document in a file.

    Raises:
        ConfigError: it cannot be read, is too long, or is not valid YAML.
    """
    source = f"file {path}"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{source} exceeds {MAX_FILE_BYTES} bytes", hint="wrong file?")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror}", hint=hint) from None
    except ValueError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from None
    return parse_yaml(text, source)

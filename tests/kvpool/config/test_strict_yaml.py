"""Numbers in YAML files."""

from __future__ import annotations

import pytest

from kvpool.config.strict_yaml import parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-07", 1e-7),
        ("1E5", 1e5),
        ("-2.5e3", -2500.0),
        ("+.5e+1", 5.0),
        ("3.e2", 300.0),
        ("0.25", 0.25),
        ("7", 7),
    ],
)
def test_a_number_is_read_as_json_and_python_write_it(text: str, value: float) -> None:
    found = parse_yaml(f"speed: {text}", "here")["speed"]
    assert type(found) is type(value)
    assert found == value


@pytest.mark.parametrize("text", ["e5", "1e", "1e5s", "0x1e-", "'1e5'", "1.2.3", "node-1e5"])
def test_what_only_resembles_a_number_stays_text(text: str) -> None:
    assert parse_yaml(f"name: {text}", "here") == {"name": text.strip("'")}

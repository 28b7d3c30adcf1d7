"""`docs/field.md` promises tests by name: each exists, and each row has one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split(" | ")]
    for line in (ROOT / "docs" / "field.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| what failed |"))
]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:50])
def test_each_row_names_tests_that_exist(row: list[str]) -> None:
    fault, answer, proofs = row
    assert fault
    assert answer
    named = NAMED.findall(proofs)
    assert named
    assert NAMED.sub("", proofs).strip(", ") == ""
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        defined = {
            node.name
            for node in tree.body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        assert name in defined, f"{path} has no {name}"


def test_the_page_covers_every_kind_of_fault_that_was_gathered() -> None:
    assert len(ROWS) >= 28

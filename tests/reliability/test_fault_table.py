"""The fault table of docs/reliability.md: each row names tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
TEXT = (HERE.parents[1] / "docs" / "reliability.md").read_text(encoding="utf-8")


def rows() -> list[tuple[str, list[tuple[str, str]]]]:
    lines = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| ") and "::" in line]
    return [(cells[0], re.findall(r"`((?:\w+/)?\w+\.py)::(\w+)`", cells[-1])) for cells in lines]


def test_each_row_names_a_test_that_exists() -> None:
    assert len(rows()) >= 24
    for fault, tests in rows():
        assert tests, fault
        for file, name in tests:
            folder = HERE.parent if "/" in file else HERE
            tree = ast.parse((folder / file).read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"

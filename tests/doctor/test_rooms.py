"""The rooms of the doctor: each imports only what lies below it, and no file imports in a circle."""

from __future__ import annotations

import ast
from pathlib import Path

DOCTOR = Path(__file__).resolve().parents[2] / "src" / "preamp" / "doctor"
ORDER = ("ground", "findings", "replay", "lint", "follow", "tell", "command")
"""From the bottom up; the ground are the files beside the rooms, but for the lint, which is one file."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(DOCTOR).with_suffix("").parts).removesuffix(".__init__").replace("__init__", "")


FILES = {name_of(path): path for path in sorted(DOCTOR.rglob("*.py"))}


def room(name: str) -> str:
    first = name.partition(".")[0]
    return first if first == "lint" or (DOCTOR / first).is_dir() else "ground"


def imported(name: str) -> set[str]:
    """The files of the doctor that one of them imports, anywhere; under TYPE_CHECKING too."""
    path = FILES[name]
    package = path.parent.relative_to(DOCTOR).parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(package) + 1:
            base = [*package[: len(package) - node.level + 1], *([node.module] if node.module else [])]
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                found.add(inner if inner in FILES else ".".join(base))
    return {one for one in found if one in FILES and one != name}


def test_rooms_import_downwards_only() -> None:
    assert {room(name) for name in FILES if name} == set(ORDER)
    climbs = {
        f"{name} imports {other}"
        for name in FILES
        if name  # the public names
        for other in imported(name)
        if ORDER.index(room(other)) > ORDER.index(room(name))
    }
    assert not climbs


def test_no_file_imports_in_a_circle() -> None:
    left = {name: imported(name) for name in FILES}
    while left:
        free = [name for name, others in left.items() if not others & left.keys()]
        assert free, f"a circle among {sorted(left)}"
        for name in free:
            del left[name]

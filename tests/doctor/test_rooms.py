"""The rooms of the doctor: each imports only what lies below it, and no file imports in a circle."""

from __future__ import annotations

import ast
from pathlib import Path

from preamp.doctor import findings
from preamp.doctor.findings.check import Check

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


def test_findings_of_a_whole_run_are_those_that_the_report_asks() -> None:
    kinds = findings.kinds_of(Check)
    assert sorted(kind.code for kind in kinds) == findings.codes()
    assert {kind.code for kind in kinds if kind.at_end is not Check.at_end} == set(findings._AT_END)


def test_the_side_of_the_command_imports_no_torch() -> None:
    """But by `preamp.formats`: what is in the rooms `tell` and `command`, save the child, and what they import."""
    left = [name for name in FILES if name.startswith(("tell", "command.run", "command.compare"))]
    left += [f"findings.{code.lower()}" for code in findings._AT_END]
    seen: set[str] = set()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        nodes = ast.parse(FILES[name].read_text(encoding="utf-8")).body
        modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
        assert not [module for module in modules if module.partition(".")[0] == "torch"], name
        unconditional = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level}
        left += [one for one in imported(name) if any(one.endswith(module or one) for module in unconditional)]

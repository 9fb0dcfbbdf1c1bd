"""The rooms of the doctor: each imports only what lies below it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from preamp.doctor import findings
from preamp.doctor.findings.check import Check

DOCTOR = Path(__file__).resolve().parents[2] / "src" / "preamp" / "doctor"
ORDER = ("ground", "shadow", "findings", "replay", "lint", "follow", "tell", "command")
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


def test_findings_of_a_whole_run_are_those_that_the_report_asks() -> None:
    kinds = [type(one) for one in findings.one_of_each(Check)]
    assert sorted(kind.__name__ for kind in kinds) == findings.codes()
    assert {kind.__name__ for kind in kinds if kind.at_end is not Check.at_end} == set(findings.AT_END)


@pytest.mark.slow
def test_the_command_reports_on_a_script_without_torch(tmp_path: Path) -> None:
    """The process that waits for the script and writes the report; what it judges at the end is imported too."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(1, 2)).sum().backward()\noptimizer.step()\n"
    )
    arguments = ["preamp", "doctor", "--out", str(tmp_path), str(script)]
    command = f"import sys, preamp.cli; sys.argv = {arguments}\ntry: preamp.cli.main()\nfinally: print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert "1 steps; ran to its end" in " ".join(ran.stderr.split())
    imported = set(ran.stdout.split())
    assert {f"preamp.doctor.findings.{code.lower()}" for code in findings.AT_END} <= imported
    assert "torch" not in imported

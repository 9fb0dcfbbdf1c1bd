"""A module imports only from floors strictly below its own."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import torch
from tools.house import budgets, circles_of_files, imports, lines_by_room, steps, walked

import preamp
from tests.products import BY_TORCH, cpu_that_multiplies

SOURCE = Path(__file__).resolve().parents[2] / "src" / "preamp"

FLOOR = {
    "_version": 0, "amp": 0, "compiling": 0, "errors": 0, "formats": 0, "tree": 0,
    "rules": 1, "report": 1,
    "policy": 1.5,  # made of rules, so half a floor above them
    "sharding": 1, "frameworks": 1, "machine": 1,
    "kernels": 2,
    "parallel": 2.5, "ledger": 2.7,  # optimizers and sessions share it
    "optim": 3, "autocast": 3, "eps": 3, "modules": 3, "scaling": 3,
    "session": 4,
    "": 4.5,  # preamp/__init__.py shows the floors up to here; the rest is loaded when asked for
    "checkpoint": 5, "lr_finder": 5, "plan": 5, "zoo": 5,
    "doctor": 6,
    "compat": 7, "migrate": 7, "integrations": 7,
    "demo": 8,
    "cli": 8.5,  # the demo is one of its verbs
    "__main__": 9,
}  # fmt: skip


def room(path: Path) -> str:
    """The room a file belongs to: its top-level module or package."""
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported(path: Path) -> set[str]:
    """The rooms of preamp that a file imports, anywhere but under TYPE_CHECKING."""
    found = set()
    inside = len(path.relative_to(SOURCE).parts)  # how many dots reach preamp itself

    class Imports(ast.NodeVisitor):
        def visit_If(self, node: ast.If) -> None:
            if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
                self.generic_visit(node)

        def visit_Import(self, node: ast.Import) -> None:
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "preamp":
                    found.add(parts[1] if len(parts) > 1 else "")

        def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
            parts = (node.module or "").split(".")
            if node.level == 0 and parts[0] == "preamp":
                parts = parts[1:]
            elif node.level != inside:
                return
            if parts and parts[0]:
                found.add(parts[0])
            else:
                rooms = {alias.name for alias in node.names}
                found.update(name if name in FLOOR else "" for name in rooms)

    Imports().visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def test_imports_go_down() -> None:
    climbing = []
    for path in sorted(SOURCE.rglob("*.py")):
        own = room(path)
        assert own in FLOOR, f"{own} is a new room: give it a floor in FLOOR, and in CONTRIBUTING.md"
        climbs = {name for name in imported(path) - {own} if FLOOR[name] >= FLOOR[own]}
        if own == "cli":
            climbs.discard("")  # the command line is a user of the public names
        if climbs:
            climbing.append(f"{path.relative_to(SOURCE)} (floor {FLOOR[own]}) must not import {sorted(climbs)}")
    assert not climbing


def test_no_file_imports_in_a_circle() -> None:
    assert circles_of_files(imports(SOURCE), SOURCE) == []


def test_the_test_sees_imports() -> None:
    assert "session" in imported(SOURCE / "checkpoint" / "_save.py")
    assert "report" in imported(SOURCE / "cli" / "_app.py")
    assert imported(SOURCE / "zoo" / "bert.py") >= {"zoo"}
    assert FLOOR.keys() >= {room(path) for path in SOURCE.rglob("*.py")}


def test_the_table_of_rooms_is_the_house() -> None:
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    told = {}
    for floor, rooms in re.findall(r"^\| (\d)\S* ?[^|]*\| (.*) \|$", text, re.MULTILINE):
        told.update({room: int(floor) for room in re.findall(r"`(\w+)`", rooms) if room not in told})
    assert told == {room: math.floor(floor) for room, floor in FLOOR.items() if room.strip("_") not in ("", "main")}


def test_rooms_keep_their_budgets() -> None:
    lines, most = lines_by_room(SOURCE), budgets()
    named = [each for rooms in most for each in rooms]
    assert {*named, "machine", "amp", "__main__", "_version", ""} == set(lines) and len(named) == len(set(named))
    over = {rooms: sum(sum(lines[each]) for each in rooms) - limit for rooms, limit in most.items()}
    assert {rooms: more for rooms, more in over.items() if more > 0} == {}, "lines over the budgets in CONTRIBUTING.md"


def test_a_step_takes_few_calls() -> None:
    """Of preamp's own functions, at O2: on small networks they are what a session costs. The number may only fall.

    Products count as torch's own: through float32 they are more calls, which a CPU without float16 needs.
    """
    with cpu_that_multiplies(BY_TORCH):
        ours, _ = [walked(run) for _, run in steps()]
    calls = sum(number for file, number in ours.calls.items() if file.startswith(f"{SOURCE}/"))
    assert 0 < calls <= 219, f"{calls} calls of preamp's own functions in a step"


def test_memory_order_costs_a_step_one_call_a_gradient() -> None:
    """Of channels_last weights, whose order was looked at twenty times a step: 2 ms of 15 in a UNet on a GPU."""

    def calls(count: int) -> int:
        params = [
            torch.nn.Parameter(torch.ones(4, 2, 3, 3).to(memory_format=torch.channels_last)) for _ in range(count)
        ]
        optimizer = preamp.optim.AdamW(params, lr=1e-3)
        for _ in range(4):
            for param in params:
                param.grad = torch.ones_like(param)
            walk = walked(optimizer.step)
        return sum(number for file, number in walk.calls.items() if file.startswith(f"{SOURCE}/"))

    few, many = calls(2), calls(52)
    assert 0 < many - few <= 50

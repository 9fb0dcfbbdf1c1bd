"""Figures of the house: files and lines, imports that climb, circles, and how far one step has to walk.

    PYTHONPATH=src python tools/house.py [FOLDER]

`FOLDER`: the source to count, `src/preamp` by default. The step is run from the preamp that Python finds.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEP_ROOMS = ("masters", "ledger", "optim", "session", "fused", "gradients", "multi_tensor", "kernels")


def modules(source: Path) -> dict[str, Path]:
    """Every module below `source` by its dotted name, the package itself as ""."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(source: Path) -> dict[str, set[str]]:
    """What each module imports of the others, anywhere in it, also where only type checkers look."""
    known = modules(source)
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        package = [part for part in package if part]
        own: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                own.update(alias.name.partition(".")[2] for alias in node.names if alias.name.split(".")[0] == "preamp")
            elif isinstance(node, ast.ImportFrom):
                if node.level:
                    begin = package[: len(package) - node.level + 1]
                elif (node.module or "").split(".")[0] == "preamp":
                    begin = []
                else:
                    continue
                rest = (node.module or "").split(".") if node.level else (node.module or "").split(".")[1:]
                base = ".".join([*begin, *(part for part in rest if part)])
                for alias in node.names:
                    below = f"{base}.{alias.name}" if base else alias.name
                    own.add(below if below in known else base)
        found[name] = {other for other in own if other in known and other != name}
    return found


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or by way of others: the strongly connected parts (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(arrows[name]):
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            begin = stack.index(name)
            part = stack[begin:]
            del stack[begin:]
            if len(part) > 1:
                found.append(sorted(part))

    sys.setrecursionlimit(10_000)
    for name in arrows:
        if name not in index:
            visit(name)
    return found


def circles_of_files(arrows: dict[str, set[str]], source: Path) -> list[list[str]]:
    """`circles` without those that only a package's `__init__` closes by showing what lies in it."""
    packages = {name for name, path in modules(source).items() if path.name == "__init__.py"}
    bare = {name: {o for o in own if o not in packages} for name, own in arrows.items() if name not in packages}
    return circles(bare)


def climbs(arrows: dict[str, set[str]], source: Path) -> list[str]:
    """Imports of a room that is not on a floor below, by the floors that the source's own test has."""
    text = (source.parents[1] / "tests" / "house" / "test_floors.py").read_text(encoding="utf-8")
    made = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    (floors,) = (
        ast.literal_eval(node.value)
        for node in made
        if isinstance(node.targets[0], ast.Name) and node.targets[0].id == "FLOOR"
    )
    found = []
    for name, own in arrows.items():
        room = name.partition(".")[0]
        for other in sorted(own):
            below = other.partition(".")[0]
            if room and below not in ("", room) and floors[below] >= floors[room]:
                found.append(f"{name} -> {other}")
    return found


class Walk:
    """Python calls, and the files that they are in."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.functions: set[tuple[str, int]] = set()
        self.changes = 0
        self._last = ""

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        """What `sys.setprofile` calls."""
        if event == "call":
            file = frame.f_code.co_filename
            if file == __file__ or "<" in file:
                return
            self.calls[file] += 1
            self.functions.add((file, frame.f_code.co_firstlineno))
            self.changes += file != self._last
            self._last = file

    def __str__(self) -> str:
        own = sum(f"{Path('src') / 'preamp'}" in file or "/preamp/" in file for file in self.calls)
        return (
            f"{sum(self.calls.values())} calls of {len(self.functions)} functions in {len(self.calls)} files "
            f"({own} of preamp), {self.changes} changes of file"
        )


def walked(run: Callable[[], Any]) -> Walk:
    """One call of a function, looked at."""
    walk = Walk()
    sys.setprofile(walk)
    try:
        run()
    finally:
        sys.setprofile(None)
    return walk


def steps() -> Iterator[tuple[str, Callable[[], Any]]]:
    """A training step of three layers, six parameters: by preamp at O2, and by torch.amp's own loop."""
    import torch

    import preamp

    def model() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))

    x = torch.randn(4, 8)
    ours, theirs = model(), model()
    optimizer = preamp.optim.AdamW(ours.parameters(), lr=1e-3)
    session = preamp.prepare(ours, optimizer, level="O2")

    def with_preamp() -> None:
        with session.autocast():
            loss = ours(x).float().square().mean()
        session.backward(loss)
        session.step()
        session.zero_grad()

    other = torch.optim.AdamW(theirs.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu")

    def with_torch() -> None:
        with torch.autocast("cpu", torch.float16):
            loss = theirs(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(other)
        scaler.update()
        other.zero_grad()

    for name, run in (("preamp at O2, preamp.optim.AdamW", with_preamp), ("torch.amp, fused AdamW", with_torch)):
        for _ in range(8):
            run()
        yield name, run
    session.close()


_BUDGET = re.compile(r"^\| ((?:`\w+` ?)+) \| ([\d,]+) \|", re.MULTILINE)


def budgets() -> dict[tuple[str, ...], int]:
    """The most lines that some rooms have together, as CONTRIBUTING.md has it."""
    rows = _BUDGET.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    return {tuple(re.findall(r"\w+", rooms)): int(most.replace(",", "")) for rooms, most in rows}


def lines_by_room(source: Path) -> dict[str, list[int]]:
    """The lines of each file, by room."""
    found: dict[str, list[int]] = defaultdict(list)
    for name, path in modules(source).items():
        found[name.partition(".")[0]].append(len(path.read_text(encoding="utf-8").splitlines()))
    return found


class Path202:
    """Files of preamp that PA202 (gradients vanish) goes through: reading gradients, and writing the page.

    The judgements of other findings are left out.
    """

    READING, WRITING, JUDGING = ("_compare_gradients", "_read_gradients"), "write", "judge"

    def __init__(self, source: Path) -> None:
        self._root, self.files = f"{source}/", set[str]()
        self._depth = self._judged = 0

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        """What `sys.setprofile` calls."""
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        inside = file.startswith(f"{self._root}doctor/")
        begins = inside and (name in self.READING or (name == self.WRITING and file.endswith("watching.py")))
        change = {"call": 1, "return": -1}.get(event, 0)
        if inside and name == self.JUDGING:
            self._judged += change
        if begins and change == 1 and not self._depth:
            caller = frame
            while caller is not None:
                self._add(caller)
                caller = caller.f_back
        elif change == 1 and self._depth and not self._judged:
            self._add(frame)
        if begins:
            self._depth += change

    def _add(self, frame: Any) -> None:
        if frame.f_code.co_filename.startswith(self._root):
            self.files.add(frame.f_code.co_filename.removeprefix(self._root))


def files_of_pa202() -> set[str]:
    """The files of `doctor` and `report` on the way of a finding from the tensor to the page."""
    import torch

    import preamp

    torch.manual_seed(60)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    walk = Path202(Path(preamp.__file__).parent)
    with preamp.doctor.watch(model) as watching:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = 1e-4 * model(torch.randn(64, 16)).float().square().mean()
        scaled = scaler.scale(loss)
        sys.setprofile(walk)
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        sys.setprofile(None)
    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(walk)
        page = watching.write(folder)
        sys.setprofile(None)
        assert "PA202" in page.read_text(encoding="utf-8")
    return {file for file in walk.files if file.split("/")[0] in ("doctor", "report")}


def main() -> None:
    """Print the figures."""
    source = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "src" / "preamp"
    by_room = lines_by_room(source)
    sizes = [lines for own in by_room.values() for lines in own]
    print(f"{len(sizes)} files, {sum(sizes)} lines, longest {max(sizes)}")
    for room, own in sorted(by_room.items(), key=lambda item: -sum(item[1])):
        print(f"  {room or '(top)':<16} {len(own):>4} files {sum(own):>6} lines")
    for these, most in budgets().items():
        print(f"  budget {sum(sum(by_room[room]) for room in these):>6} of {most:>6}: {' '.join(these)}")
    rooms = [own for room, own in by_room.items() if room in STEP_ROOMS]
    print(f"rooms of the step: {sum(map(len, rooms))} files, {sum(map(sum, rooms))} lines")
    skips = sum(path.read_text(encoding="utf-8").count("# fmt: skip") for path in modules(source).values())
    print(f"# fmt: skip {skips} times")
    arrows = imports(source)
    up = climbs(arrows, source)
    print(f"imports of rooms that are not below: {len(up)}{''.join(chr(10) + '  ' + each for each in up)}")
    found = circles_of_files(arrows, source)
    print(f"circles: {len(found)}{''.join(f'{chr(10)}  {len(each)}: ' + ', '.join(each) for each in found)}")
    os.environ["PREAMP_CPU_MULTIPLIES"] = "bf16,fp16"  # products through float32 are calls that not every CPU needs
    for name, run in steps():
        print(f"one step, {name}: {walked(run)}")
    print(f"PA202 from tensor to page: {len(files_of_pa202())} files of doctor and report")


if __name__ == "__main__":
    main()

"""What the doctor finds in the scripts of this folder beside what others' tools say of them, run and read.

    python -m tests.sick.versus [NAME ...]

writes `benchmarks/results/doctor-versus_<hardware>_<date>_<commit>.json`, from which `./dev docs` makes the table of
docs/doctor.md (a quarter of an hour on two cores). With names, only those scripts are run, and nothing is written.

The doctor has found a disease if code, module and line are those of the script's marker. The others have no codes, and
need to name less: one right line anywhere in their traceback, or the right module, or, of a bad batch, its number.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from preamp.compat.install import environment as with_apex
from preamp.machine import environment
from preamp.report.files import write_text

from .expect import Disease, disease, doctor, scripts

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("doctor", "huggingface", "anomaly")
BATCHES = {"one_bad_input": 5, "one_bad_target": 3}
"""Which batch is bad, where it is a batch."""

_FRAME = re.compile(r"^ {18}(?P<path>\S*) \w+$", re.MULTILINE)
"""How DebugUnderflowOverflow heads what it prints of a module."""
_OWN = {"huggingface": "DebugUnderflowOverflow: inf/nan detected", "anomaly": "returned nan values in its"}
"""What is in the exceptions by which these tools report."""
_FILES = {"huggingface": "debug_utils.py", "anomaly": "anomaly_mode.py"}
GOOD = ("found", "line", "module", "batch")
"""Outcomes that name the place. The rest: elsewhere (it spoke, of another place), broke (the tool failed), nothing."""


def by_doctor(path: Path, folder: Path) -> dict[str, Any]:
    """The doctor's outcome and what it found."""
    report, _ = doctor(path, folder / "out")
    keys = ("severity", "code", "module", "file", "line", "message")
    found = [{key: finding[key] for key in keys} for finding in report["findings"]]
    for finding in found:  # an installed library's file, whose folder is this machine's own affair
        finding["file"] = finding["file"] and finding["file"].rpartition("site-packages/")[2]
    loud = [finding for finding in found if finding["severity"] != "info"]
    if path.parent.name == "healthy":
        outcome = "alarm" if loud else "nothing"
    elif any(disease(path).met_by(finding) for finding in found):
        outcome = "found"
    else:
        outcome = "elsewhere" if loud else "nothing"
    return {"outcome": outcome, "said": found}


def by_other(tool: str, paths: list[Path], folder: Path) -> list[dict[str, Any]]:
    """Another tool's outcome and what it said, script by script."""
    env = {**with_apex(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    launcher = str(Path(__file__).with_name("_others.py"))
    subprocess.run([sys.executable, launcher, tool, str(folder), *map(str, paths)], env=env, cwd=folder, check=True)
    found = []
    for path in paths:
        ended, out, err = ((folder / path.stem).with_suffix(end).read_text() for end in (".json", ".out", ".err"))
        said = _heard(tool, path, json.loads(ended), out, err)
        sick = path.parent.name == "scripts"
        if not sick and said is not None and said["by"] == "python":  # an error that is there with the tool only
            subprocess.run([sys.executable, str(path)], env=env, cwd=folder, check=True, capture_output=True)
            said["by"] = "tool failed"
        found.append({"outcome": _placed(path.stem, disease(path), said) if sick else _of_healthy(said), "said": said})
    return found


def _heard(tool: str, path: Path, ended: dict[str, Any] | None, stdout: str, stderr: str) -> dict[str, Any] | None:
    """What there is to be read of a run, as who spoke, in which words, of which lines, module and batch."""
    if ended is None:
        return None
    said: dict[str, Any] = {"by": tool, "text": ended["text"].splitlines()[0][:200], "lines": ended["lines"]}
    if _OWN[tool] not in ended["text"]:
        said["by"] = "tool failed" if ended["inside"] == _FILES[tool] else "python"
    elif tool == "anomaly":
        # the lines of the forward call; those of the exception only say where backward() was called
        said["lines"] = [int(n) for n in re.findall(rf'File "{re.escape(str(path))}", line (\d+)', stderr)]
    else:
        report = stdout[stdout.index("Detected inf/nan during batch_number=") :]
        last = list(_FRAME.finditer(report))[-1]
        said["module"] = last["path"].removeprefix("module.")
        said["batch"] = int(re.search(r"batch_number=(\d+)", report)[1])
        said["frame"] = report[last.start() :].strip().splitlines()
    return said


def _placed(name: str, wanted: Disease, said: dict[str, Any] | None) -> str:
    if said is None:
        return "nothing"
    if said["by"] == "tool failed":
        return "broke"
    if wanted.line in said["lines"]:
        return "line"
    if wanted.module is not None and said.get("module") == wanted.module:
        return "module"
    return "batch" if name in BATCHES and said.get("batch") == BATCHES[name] else "elsewhere"


def _of_healthy(said: dict[str, Any] | None) -> str:
    if said is None:
        return "nothing"
    return "broke" if said["by"] == "tool failed" else "alarm"


def run(paths: list[Path]) -> list[dict[str, Any]]:
    """Every script three ways."""
    found: dict[str, list[dict[str, Any]]] = {"doctor": []}
    for tool in TOOLS[1:]:
        with tempfile.TemporaryDirectory() as folder:
            found[tool] = by_other(tool, paths, Path(folder))
    for path in paths:
        with tempfile.TemporaryDirectory() as folder:
            found["doctor"].append(by_doctor(path, Path(folder)))
        print(f"{found['doctor'][-1]['outcome']:9} {path.stem}", flush=True)
    groups = (disease(path).codes[0] if path.parent.name == "scripts" else "healthy" for path in paths)
    return [
        {"script": path.stem, "group": group, **{tool: found[tool][i] for tool in TOOLS}}
        for i, (path, group) in enumerate(zip(paths, groups, strict=True))
    ]


def main() -> None:
    """Run, print, write."""
    os.environ["OMP_NUM_THREADS"] = "1"
    names = sys.argv[1:]
    chosen = [p for kind in ("scripts", "healthy") for p in scripts(kind) if not names or p.stem in names]
    about = environment(torch.device("cpu"))  # before the runs, in which a commit may come
    rows = run(chosen)
    for row in rows:
        told = "".join(f"{tool}: {row[tool]['outcome']:10} " for tool in TOOLS)
        print(f"{row['group']:8} {row['script']:28} {told}".rstrip())
        if names:
            print(json.dumps(row, indent=1))
    for tool in TOOLS:
        sick = sum(row[tool]["outcome"] in GOOD for row in rows)
        alarms = sum(row[tool]["outcome"] == "alarm" for row in rows)
        print(f"{tool}: {sick} named in place, {alarms} false alarms")
    if not names:
        print(write(rows, about))


def write(rows: list[dict[str, Any]], about: dict[str, Any]) -> Path:
    """File the results as the others in their folder."""
    content = {
        "schema": "preamp-bench/1",
        "suite": "doctor-versus",
        "environment": {**about, "transformers": importlib.metadata.version("transformers")},
        "rows": rows,
    }
    hardware = about["cpu"].removeprefix("AMD ").replace(",", "").replace(" ", "-").lower()
    commit = str(about["commit"] or "unknown").rstrip("+")
    folder, begins = ROOT / "benchmarks" / "results", f"doctor-versus_{hardware}_{time.strftime('%Y-%m-%d')}_"
    for older in folder.glob(f"{begins}*.json"):
        older.unlink()  # of two from one day nobody could tell the newest
    return write_text(folder / f"{begins}{commit}.json", json.dumps(content, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()

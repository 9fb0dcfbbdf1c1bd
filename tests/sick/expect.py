"""What the scripts of this folder should have found in them, read off their own comments."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .. import forks

HERE = Path(__file__).parent
_MARK = re.compile(r"#\s*sick:\s*(?P<codes>PA\d{3}(?:\|PA\d{3})*)\s+module=(?P<module>\S+)(?P<any>\s+line=any)?")


@dataclass(frozen=True)
class Disease:
    codes: tuple[str, ...]
    module: str | None
    """None: not of a module; anything is right there."""
    line: int | None
    """None: any line."""

    def met_by(self, finding: dict[str, Any]) -> bool:
        return (
            finding["code"] in self.codes
            and (self.module is None or finding["module"] == self.module)
            and (self.line is None or finding["line"] == self.line)
        )


def disease(script: Path) -> Disease:
    for number, line in enumerate(script.read_text().splitlines(), 1):
        if found := _MARK.search(line):
            module = {"-": None, ".": ""}.get(found["module"], found["module"])
            return Disease(tuple(found["codes"].split("|")), module, None if found["any"] else number)
    raise AssertionError(f"{script.name} has no marker")


def scripts(kind: str) -> list[Path]:
    """Those in `scripts`; or the healthy ones: files in `healthy`, and sick ones cured."""
    return sorted((HERE / kind).glob("*.py")) + (_cured() if kind == "healthy" else [])


_INSTEAD = re.compile(r"# healthy:(?: (.*))?")


def healthy_lines(script: str) -> list[str]:
    """The lines of a sick script with each run of comments `# healthy: ...` in place of the line before it."""
    lines: list[str] = []
    replaced = None
    for line in script.splitlines():
        found = _INSTEAD.fullmatch(line.strip())
        if found is None:
            lines.append(line)
            replaced = None
            continue
        replaced = lines.pop() if replaced is None else replaced
        if found[1] is not None:
            lines.append(replaced[: len(replaced) - len(replaced.lstrip())] + found[1])
    return lines


@cache
def _cured() -> list[Path]:
    folder = Path(tempfile.mkdtemp(), "healthy")
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    folder.mkdir()
    made = []
    for script in scripts("scripts"):
        text = script.read_text()
        if "# healthy:" in text:
            made.append(folder / f"{script.stem}_cured.py")
            made[-1].write_text("\n".join(healthy_lines(text)) + "\n")
    return made


COMPARE = ("compare", "--seeds", "2")


def command(wanted: Disease | None) -> tuple[str, ...]:
    """The command of preamp's that finds it."""
    return COMPARE if wanted is not None and wanted.codes == ("PA206",) else ("doctor",)


def doctor(
    script: Path, out: Path, verb: tuple[str, ...] = ("doctor",)
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """The report of one script, run as a user would; it lies in `out`."""
    line = ["-m", "preamp", *verb, "--out", str(out), str(script)]
    ran = forks.run(line, env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=200, cwd=out.parent)
    return json.loads((out / ("compare.json" if verb == COMPARE else "report.json")).read_text()), ran


def main() -> None:
    """Print what is found in every script, or in those named on the command line."""
    import tempfile
    from concurrent.futures import ThreadPoolExecutor

    wanted = sys.argv[1:]
    chosen = [p for kind in ("scripts", "healthy") for p in scripts(kind) if not wanted or p.stem in wanted]

    def one(path: Path) -> tuple[Path, dict[str, Any] | str]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                sick = disease(path) if path.parent.name == "scripts" else None
                return path, doctor(path, Path(folder) / "out", command(sick))[0]
            except Exception as error:
                return path, repr(error)

    missed = 0
    with ThreadPoolExecutor(2) as pool:
        for path, report in pool.map(one, chosen):
            if isinstance(report, str):
                print(f"FAILED {path.stem}: {report}")
                continue
            sick = path.parent.name == "scripts"
            found = report["findings"]
            if sick:
                wants = disease(path)
                good = any(wants.met_by(finding) for finding in found)
            else:
                wants, good = None, not any(f["severity"] != "info" for f in found)
            missed += not good
            print("ok    " if good else "MISSED", path.stem, wants or "", f"[{report.get('ended', '')}]")
            if not good or wanted:
                for f in found:
                    print("        ", f["severity"], f["code"], f["module"], f["line"], f["message"][:110])
    print(f"{missed} of {len(chosen)} missed")


if __name__ == "__main__":
    main()

"""The pages of docs/findings: their scripts, and what the doctor says of the sick one.

Run as a module, it writes what the doctor says now into the pages of the codes on the command line, or into all.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from preamp.doctor.findings import codes

from ..sick.expect import COMPARE, doctor

PAGES = Path(__file__).resolve().parents[2] / "docs" / "findings"
CODES = codes()

BY_COMPARE = frozenset({"PA206"})
"""What only runs beside one another show."""

_SHOWN = re.compile(r"(?<=```text\n).*?(?=```)", re.DOTALL)
_MEASURED = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?=%?[,}.:]*$)")


def text_of(code: str) -> str:
    return (PAGES / f"{code}.md").read_text(encoding="utf-8")


def script(code: str, kind: str) -> str:
    """The block below `<!-- sick -->` or `<!-- cure -->`."""
    (block,) = re.findall(rf"<!-- {kind} -->\n```python\n(.*?)```", text_of(code), re.DOTALL)
    return str(block)


def shown(code: str) -> str:
    """The output that the page shows."""
    (block,) = _SHOWN.findall(text_of(code))
    return str(block)


def run(code: str, kind: str, folder: Path) -> tuple[dict[str, Any], Any]:
    """The report of a page's script, and the run."""
    path = folder / "train.py"
    path.write_text(script(code, kind), encoding="utf-8")
    return doctor(path, folder / kind, COMPARE if code in BY_COMPARE else ("doctor",))


def said(ran: Any) -> str:
    """What the doctor wrote to the terminal of a run: findings and verdict, without where the report is."""
    told = re.split(r"^─+ preamp \w+ ─+$", ran.stderr, flags=re.MULTILINE)[-1].lstrip("\n")
    told = re.split(r"^what a finding means: |^report: ", told, flags=re.MULTILINE)[0]
    return "\n".join(map(str.rstrip, told.rstrip().splitlines())) + "\n"


def alike(page: str, told: str) -> bool:
    """Word by word, as lines break where numbers end; what is measured differs a little between processors."""
    ours, theirs = page.split(), told.split()
    return len(ours) == len(theirs) and all(map(_same, ours, theirs))


def _same(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    numbers = [found[0] for one in (ours, theirs) if (found := _MEASURED.search(one))]
    rest = [_MEASURED.sub("", one) for one in (ours, theirs)]
    if len(numbers) < 2 or rest[0] != rest[1]:
        return False
    if rest[0].strip("%,}.:") and not any("." in one for one in numbers):
        return False  # a line, a code, an exponent
    first, second = map(float, numbers)
    return abs(first - second) <= 0.1 * max(abs(first), abs(second))


def main() -> None:
    """Write the pages."""
    for code in sys.argv[1:] or CODES:
        with tempfile.TemporaryDirectory() as folder:
            _, ran = run(code, "sick", Path(folder))
        told = said(ran)
        text = _SHOWN.sub(lambda _, told=told: told, text_of(code), count=1)
        (PAGES / f"{code}.md").write_text(text, encoding="utf-8")
        print(code)


if __name__ == "__main__":
    main()

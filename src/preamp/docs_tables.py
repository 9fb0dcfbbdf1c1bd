"""Writes the generated parts of the documents anew: tables from the code, figures from committed results.

Generated text stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`. `./dev docs` writes it, and a test fails
when a document is behind. Run as `python -m preamp.docs_tables ROOT`.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .formats import FORMATS
from .policy import LEVELS
from .report import Column, Table
from .rules import TABLE

DOCUMENTS = ("README.md", "docs/levels.md", "docs/rules.md")


def levels(root: Path) -> str:
    """The table of levels."""
    columns = ("level", "alias", "parameters", "compute", "norms", "masters", "loss scale", "what it is")
    rows = []
    for level in LEVELS:
        fields = dict(part.split("=") for part in str(level.policy).split(","))
        told = [fields[name].replace("rules", "by rules") for name in ("params", "compute", "norms", "masters")]
        scale = "dynamic" if fields["scale"] == "dynamic" else "1"
        rows.append((level.name, f"`{level.alias}`", *told, scale, level.summary))
    return Table("", columns, rows).to_markdown()


def formats(root: Path) -> str:
    """The table of number formats."""
    columns = ("format", "bits", "largest", "smallest normal", "smallest subnormal", "epsilon", "zero at or below")
    rows = [
        (f.name, f.bits, f"{f.max:.5g}", f"{f.smallest_normal:.3g}", f"{f.smallest_subnormal:.3g}", f"{f.epsilon:.3g}",
         f"{f.flush_threshold:.3g}")
        for f in FORMATS
    ]  # fmt: skip
    return Table("", columns, rows).to_markdown()


def rules(root: Path) -> str:
    """The table of operator rules."""
    rows = [(row.category, row.family, " ".join(f"`{op}`" for op in row.ops), row.reason) for row in TABLE]
    return Table("", ("runs", "family", "operators", "why"), rows).to_markdown()


def demo(root: Path) -> str:
    """The newest committed results of the demo, one row a network and level, with where they come from."""
    path = newest(root, "demo")
    if path is None:
        return "(no results committed yet: `./dev demo` makes them)"
    results = json.loads(path.read_text(encoding="utf-8"))
    machine = results["environment"]
    columns = (
        Column("network"), Column("level"), Column("time", "ms/step", 1), Column("against O0", "x", 2),
        Column("memory", "MiB", 1), Column("final loss", digits=4), Column("quality"), Column("fp32 seeds"),
        Column("skips", digits=0),
    )  # fmt: skip
    rows = [row for task in results["plan"]["models"] for row in _demo_rows(results, task)]
    seeds = len(results["plan"]["seeds"])
    within, judged = sum(j["within"] for j in results["judgements"]), len(results["judgements"])
    text = (
        f"`./dev demo`, size {results['plan']['size']}, {seeds} seeds a level: **{within} of {judged} 16-bit results "
        f"(mean over seeds) are not below the worst of the {seeds} float32 seeds.** "
        f"{machine.get('gpu', machine['cpu'])}, {machine['threads']} threads, torch {machine['torch']}, Python "
        f"{machine['python']}, preamp at {machine['commit']}; {results['seconds']:.0f} s in all. All samples: "
        f"`{path.relative_to(root).as_posix()}`."
    )
    return f"{Table('', columns, rows).to_markdown()}\n\n{text}"


def _demo_rows(results: dict[str, Any], task: str) -> list[tuple[Any, ...]]:
    runs = [run for run in results["runs"] if run["task"] == task and run["complete"]]
    band = [run["quality"] for run in runs if run["level"] == "O0"]
    metric = next((j["metric"] for j in results["judgements"] if j["task"] == task), "quality")
    reference = statistics.median(run["ms_per_step"] for run in runs if run["level"] == "O0")
    rows = []
    for level in results["plan"]["levels"]:
        own = [run for run in runs if run["level"] == level]
        ms = statistics.median(run["ms_per_step"] for run in own)
        rows.append((
            task, level, ms, reference / ms, max(run["peak_bytes"] for run in own) / 2**20,
            statistics.fmean(run["final_loss"] for run in own),
            f"{metric} {statistics.fmean(run['quality'] for run in own):.4f}", f"{min(band):.4f} to {max(band):.4f}",
            sum(len(run["skipped"]) for run in own),
        ))  # fmt: skip
    return rows


def newest(root: Path, theme: str) -> Path | None:
    """The newest committed result of a theme: files are called `<theme>_<hardware>_<date>_<commit>.json`."""
    found = sorted((root / "benchmarks" / "results").glob(f"{theme}_*.json"), key=lambda p: p.stem.split("_")[-2])
    return found[-1] if found else None


def bench(root: Path) -> str:
    """The newest committed ratios of the suite "regions"."""
    path = newest(root, "regions")
    if path is None:
        return "(no results committed yet: `./dev bench` makes them)"
    results = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        (row["name"], row["what"], c["ratio"]["median"], c["ratio"]["min"], c["ratio"]["max"])
        for row in results["suites"]["regions"]
        for c in row["contenders"]
        if c["name"] == "preamp.autocast"
    ]
    columns = ("work", "what", Column("median", digits=3), Column("smallest", digits=3), Column("largest", digits=3))
    machine = results["environment"]
    text = (
        "Ratios torch.autocast / preamp.autocast of the time of one round; above 1 preamp is faster. "
        f"{machine['cpu']}, torch {machine['torch']}, preamp at {machine['commit']}, {results['rounds']} rounds; "
        f"`{path.relative_to(root).as_posix()}`."
    )
    return f"{Table('', columns, rows).to_markdown()}\n\n{text}"


GENERATORS: dict[str, Callable[[Path], str]] = {
    "bench": bench,
    "demo": demo,
    "formats": formats,
    "levels": levels,
    "rules": rules,
}

_PART = re.compile(r"(<!-- begin: (\w+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)


def renewed(root: Path, text: str) -> str:
    """A document's text with its generated parts made anew."""
    return _PART.sub(lambda part: f"{part[1]}{GENERATORS[part[2]](root).strip()}\n{part[3]}", text)


def main(root: Path) -> None:
    """Renew every document below `root`."""
    for name in DOCUMENTS:
        path = root / name
        before = path.read_text(encoding="utf-8")
        after = renewed(root, before)
        if after != before:
            path.write_text(after, encoding="utf-8")
        print(f"{name}: {'written' if after != before else 'up to date'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))

"""Writes the generated parts of the documents anew: tables from the code, figures from committed results.

Generated text stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`. `./dev docs` writes it, and a test fails
when a document is behind. Run as `python -m tools.docs ROOT`.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path

from preamp.formats import FORMATS
from preamp.policy import LEVELS
from preamp.report import Table
from preamp.rules import TABLE

from .docs_gpu import gpu_lists, gpu_losses, gpu_steps
from .docs_results import (
    any_optimizer,
    apex_door,
    apex_levels,
    bench,
    cpu_levels,
    cpu_levels_native,
    cpu_story,
    demo,
    doctor_overhead,
    doctor_versus,
    frozen,
    option_losses,
    option_times,
    rivals,
    seeds,
    sessions,
    shadowed_step,
    shadowed_step_native,
    step,
)
from .docs_simulation import host_time, simulated_kernels, simulated_steps
from .docs_site import commands, figures, figures_listed

DOCUMENTS = (
    "README.md",
    "docs/coming-from-apex.md",
    "docs/cpu.md",
    "docs/doctor.md",
    "docs/get-started.md",
    "docs/gpu.md",
    "docs/index.md",
    "docs/levels.md",
    "docs/measured.md",
    "docs/optimizers.md",
    "docs/reference/cli.md",
    "docs/rules.md",
    "docs/step.md",
)


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


def which_level(root: Path) -> str:
    """Which level to begin with, the same on every page that says it."""
    rows = (
        ("come from torch.amp, or start afresh", "`O4`; `O1` where there is only float16",
         "products run in 16 bits; weights, checkpoints, averages and evaluation stay float32"),
        ("need memory", "`O5`; `O2` where there is only float16",
         "weights have 16 bits and the optimizer steps float32 masters: save, average and evaluate inside "
         "`session.full_precision()`"),
        ("want preamp to choose", "`auto`",
         "it takes O4, O1 or O0 by the device; `repr(session)` and the log say which and why"),
    )  # fmt: skip
    return Table("", ("you", "take", "what changes"), rows).to_markdown()


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
    """The operator rules, a table for each way to run."""
    parts = []
    for category, rows in itertools.groupby(TABLE, key=lambda row: row.category):
        lines = [(row.family, " ".join(f"`{op}`" for op in row.ops), row.reason) for row in rows]
        parts.append(
            f"### {category.capitalize()}\n\n" + Table("", ("family", "operators", "why"), lines).to_markdown()
        )
    return "\n\n".join(parts)


GENERATORS: dict[str, Callable[[Path], str]] = {
    "apex_door": apex_door,
    "doctor_overhead": doctor_overhead,
    "apex_levels": apex_levels,
    "bench": bench,
    "cli": commands,
    "cpu_levels": cpu_levels,
    "cpu_levels_native": cpu_levels_native,
    "cpu_story": cpu_story,
    "demo": demo,
    "doctor_versus": doctor_versus,
    "shadowed_step": shadowed_step,
    "shadowed_step_native": shadowed_step_native,
    "figures": figures,
    "figures_listed": figures_listed,
    "formats": formats,
    "gpu_lists": gpu_lists,
    "gpu_losses": gpu_losses,
    "gpu_steps": gpu_steps,
    "host_time": host_time,
    "levels": levels,
    "any_optimizer": any_optimizer,
    "option_losses": option_losses,
    "option_times": option_times,
    "frozen": frozen,
    "rivals": rivals,
    "rules": rules,
    "seeds": seeds,
    "sessions": sessions,
    "simulated_kernels": simulated_kernels,
    "simulated_steps": simulated_steps,
    "step": step,
    "which_level": which_level,
}

_PART = re.compile(r"(<!-- begin: (\w+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)


def renewed(root: Path, text: str) -> str:
    """A document's text with its generated parts made anew."""
    return _PART.sub(lambda part: f"{part[1]}{_with_code(GENERATORS[part[2]](root).strip())}\n{part[3]}", text)


def _with_code(markdown: str) -> str:
    """Tables show their cells literally; what stands between backticks here is meant as code."""
    return re.sub(r"\\`(.*?)\\`", lambda code: "`" + code[1].replace("\\", "") + "`", markdown)


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

"""What `preamp doctor` does: the script runs, the report goes to stderr and to files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..compat.install import environment
from ..compat.run import command
from ..doctor._command import examine_script
from ..report import Finding

_COLOURS = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def run_doctor(
    target: str,
    arguments: Sequence[str],
    as_module: bool,
    *,
    out: Path,
    json_file: Path | None,
    every: int,
    steps: int | None,
    replay: bool,
    strict: bool,
) -> int:
    """Run a script under observation; its exit status, or 3 by `strict`. Raises `NothingToRun` without a script."""
    line = command(target, arguments, as_module)
    script = Path.cwd() / "module" if as_module else Path(target)
    status, report, page = examine_script(
        line,
        script,
        [target, *arguments],
        environment(),
        out=out,
        json_file=json_file,
        every=every,
        steps=steps,
        replay=replay,
        strict=strict,
    )
    console = Console(stderr=True)
    console.rule("preamp doctor", style="dim")
    for finding in report.findings:
        _show(finding, console)
    console.print(report.verdict, style="bold", markup=False, highlight=False)
    console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)
    return status


def _show(finding: Finding, console: Console) -> None:
    first, *rest = finding.to_text().splitlines()
    console.print(first, style=_COLOURS[finding.severity], markup=False, highlight=False)
    for text in rest:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print()

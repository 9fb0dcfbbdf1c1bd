"""What `preamp doctor` and `preamp compare` do: the script runs, the report goes to stderr and to files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from rich.console import Console

from ..compat.install import command, environment
from ..doctor.command.run import RUN, Script, compare_script, examine_script
from ..doctor.tell.report import write
from ..errors import PreampError
from ..report import Finding, Report, Table
from ..report.finding import APART

_APART = tuple(f"  {name}:" for name in APART)
_COLOURS = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def run_doctor(
    target: str, arguments: Sequence[str], as_module: bool, *, out: Path, json_file: Path | None, every: int,
    steps: int | None, replay: bool, strict: bool,
) -> int:  # fmt: skip
    """Run a script under observation; its exit status, or 3 by `strict`. Raises `NothingToRun` without a script."""
    console = Console(stderr=True, emoji=False)
    out, json_file = _written_by_this_rank(out), json_file and _written_by_this_rank(json_file)
    _check_writable(out, json_file)
    script = _script(target, arguments, as_module, steps)
    status, report, content = examine_script(script, every=every, replay=replay, strict=strict)
    _show(console, "preamp doctor", report)
    if report.findings:
        console.print(f"what a finding means: preamp explain {report.findings[0].code}", highlight=False)
    return _write(console, status, report, content, out, "report", json_file)


def run_compare(
    target: str, arguments: Sequence[str], as_module: bool, *, out: Path, json_file: Path | None, seeds: int,
    margin: float | None, steps: int | None,
) -> int:  # fmt: skip
    """Run a script in mixed and in full precision; 3 when mixed is worse. Raises as `compare_script` does."""
    out, json_file = _written_by_this_rank(out), json_file and _written_by_this_rank(json_file)
    _check_writable(out, json_file)
    console = Console(stderr=True, emoji=False)
    script = _script(target, arguments, as_module, steps)
    with console.status("") as shown:
        # What is under way moves on a terminal, and is a line each elsewhere.
        progress = shown.update if console.is_terminal else lambda text: _say(console, text, "dim")
        status, report, content = compare_script(script, seeds=seeds, margin=margin, progress=progress)
    _show(console, "preamp compare", report)
    return _write(console, status, report, content, out, "compare", json_file)


def _script(target: str, arguments: Sequence[str], as_module: bool, steps: int | None) -> Script:
    """Raises `NothingToRun` at once when there is no such script."""
    command(target, arguments, as_module)
    return Script(
        lambda name: command(target, [argument.replace(RUN, name) for argument in arguments], as_module),
        Path.cwd() / "module" if as_module else Path(target),
        [target, *arguments],
        environment(),
        steps,
    )


def _written_by_this_rank(path: Path) -> Path:
    """Where a launcher has started this command once for each rank, a path that the others do not write, too."""
    rank = os.environ.get("RANK") if os.environ.get("WORLD_SIZE", "1") != "1" else None
    return path.with_stem(f"{path.stem}-rank{rank}") if rank else path


def _check_writable(out: Path, json_file: Path | None) -> None:
    """Raise `PreampError` where no report can be written: now, and not after hours of training."""
    for folder in (out, *(() if json_file is None else (json_file.parent,))):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise PreampError(f"no report can be written to {folder}: {error.strerror}; choose another --out") from None


def _say(console: Console, text: str, style: str | None = None, wrap: bool = True) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=not wrap)


def _show(console: Console, title: str, report: Report) -> None:
    """The findings, the tables beside them, and the verdict."""
    console.rule(title, style="dim")
    serious = [finding for finding in report.findings if finding.severity != "info"]
    for finding in serious or report.findings:
        _show_finding(console, finding)
    brief = [finding for finding in report.findings if serious and finding.severity == "info"]
    for finding in brief:  # in full only where nothing is wrong, and in the report
        where = f" ({finding.where[0][1]})" if finding.where else ""
        _say(console, finding.to_text().splitlines()[0] + where, _COLOURS["info"], wrap=console.is_terminal)
    if brief:
        console.print()
    for item in report.sections[0].items:
        if isinstance(item, Table):
            _say(console, item.to_text(), wrap=False)
    _say(console, report.verdict, "bold")


def _show_finding(console: Console, finding: Finding) -> None:
    first, *rest = finding.to_text().splitlines()
    for text in (first, *rest):
        style = _COLOURS[finding.severity] if text is first else None
        if console.is_terminal and (
            style or text.startswith(("  where:", "  seen:", *_APART))
        ):  # a fix is pasted as it stands
            text = fill(text, console.width, subsequent_indent=" " * 9, break_on_hyphens=False)
        _say(console, text, style, wrap=False)
    console.print()


def _write(
    console: Console, status: int, report: Report, content: dict[str, Any], out: Path, name: str, json_file: Path | None
) -> int:
    """Write the report and say where; the findings have been shown already, in case the disk is full. Exit status."""
    try:
        page = write(report, content, out, name, json_file)
    except OSError as error:
        _say(console, f"no report: {error.strerror or error} ({error.filename or 'no file'})", "bold red", wrap=False)
        return status or 1
    _say(console, f"report: {page}", wrap=False)
    return status

"""What `preamp doctor` and `preamp compare` do: the script runs, the report goes to stderr and to files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.status import Status

from ..compat.install import environment
from ..compat.run import command
from ..doctor.command.compare import RUN, compare_script
from ..doctor.command.run import examine_script
from ..doctor.tell.comparison import write_comparison
from ..doctor.tell.report import write
from ..errors import PreampError
from ..report import Finding, Table

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
    compare: int = 0,
) -> int:
    """Run a script under observation; its exit status, or 3 by `strict`. Raises `NothingToRun` without a script."""
    console = Console(stderr=True)
    _check_writable(out, json_file)
    status, report, content = examine_script(
        _line(target, arguments, as_module),
        _script(target, as_module),
        [target, *arguments],
        environment(),
        every=every,
        steps=steps,
        replay=replay,
        strict=strict,
        compare=compare,
        progress=lambda text: console.print(text, style="dim", markup=False, highlight=False),
    )
    console.rule("preamp doctor", style="dim")
    for finding in report.findings:
        _show(finding, console)
    console.print(report.verdict, style="bold", markup=False, highlight=False)
    if report.findings:
        console.print(f"what a finding means: preamp explain {report.findings[0].code}", highlight=False)
    return _written(console, status, lambda: write(report, content, out, json_file)[0])


def run_compare(
    target: str,
    arguments: Sequence[str],
    as_module: bool,
    *,
    out: Path,
    json_file: Path | None,
    seeds: int,
    margin: float | None,
    steps: int | None,
) -> int:
    """Run a script in mixed and in full precision; 3 when mixed is worse. Raises as `compare_script` does."""
    _check_writable(out, json_file)
    console = Console(stderr=True)
    with console.status("") as shown:
        status, report, content = compare_script(
            _line(target, arguments, as_module), _script(target, as_module), [target, *arguments], environment(),
            seeds=seeds, margin=margin, steps=steps,
            progress=lambda text: _tell(console, shown, text),
        )  # fmt: skip
    console.rule("preamp compare", style="dim")
    for finding in report.findings:
        _show(finding, console)
    for item in report.sections[0].items:
        if isinstance(item, Table):
            console.print(item.to_text(), markup=False, highlight=False, soft_wrap=True)
    console.print(report.verdict, style="bold", markup=False, highlight=False)
    return _written(console, status, lambda: write_comparison(report, content, out, json_file))


def _written(console: Console, status: int, write_report: Callable[[], Path]) -> int:
    """Write the report and say where; what was found has been shown by now, should the disk be full. Exit status."""
    try:
        page = write_report()
    except OSError as error:
        message = f"the report was not written: {error.strerror or error} ({error.filename or 'no file'})"
        console.print(message, style="bold red", markup=False, highlight=False, soft_wrap=True)
        return status or 1
    console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)
    return status


def _check_writable(out: Path, json_file: Path | None) -> None:
    """Raise `PreampError` where no report can be written: now, and not after hours of training."""
    for folder in (out, *(() if json_file is None else (json_file.parent,))):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise PreampError(f"no report can be written to {folder}: {error.strerror}; choose another --out") from None


def _tell(console: Console, shown: Status, text: str) -> None:
    """What is under way: moving on a terminal, a line each elsewhere."""
    if console.is_terminal:
        shown.update(text)
    else:
        console.print(text, style="dim", markup=False, highlight=False)


def _line(target: str, arguments: Sequence[str], as_module: bool) -> Callable[[str], list[str]]:
    """The command of a run by its name. Raises `NothingToRun` at once when there is no such script."""
    command(target, arguments, as_module)
    return lambda name: command(target, [argument.replace(RUN, name) for argument in arguments], as_module)


def _script(target: str, as_module: bool) -> Path:
    return Path.cwd() / "module" if as_module else Path(target)


def _show(finding: Finding, console: Console) -> None:
    first, *rest = finding.to_text().splitlines()
    console.print(first, style=_COLOURS[finding.severity], markup=False, highlight=False)
    for text in rest:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print()

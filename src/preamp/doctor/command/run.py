"""`preamp doctor`: starts a script as it is in a process of its own, and reports on it whatever becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ...report import Report
from ..records import read_ranks
from ..tell.comparison import Ran, losses_of, with_comparison
from ..tell.report import STRICT, build
from . import watched_environment
from .compare import Comparison, run_pairs


def examine_script(
    line: Callable[[str], Sequence[str]],
    script: Path,
    shown: Sequence[str],
    environment: Mapping[str, str],
    *,
    every: int = 50,
    steps: int | None = None,
    replay: bool = True,
    strict: bool = False,
    compare: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[int, Report, dict[str, Any]]:
    """Run a script to its end under observation; exit status, report, and the content of `report.json`.

    `line`: the command of a run with this name, "mixed-0" for the one that is watched; `script`: the file to whose
    folder paths in the report are relative; `shown`: the command as its user wrote it; `compare`: so many seeds in
    mixed and in full precision afterwards, 0 for none; `progress`: is called with which of these runs is under way.

    The status is the script's own (128 and the number of the signal that ended it), or 3 with `strict` when there is a
    finding of severity error.
    """
    with tempfile.TemporaryDirectory(prefix="preamp-doctor-") as folder:
        base = script.resolve().parent if script.exists() else Path.cwd()
        options = {"folder": folder, "base": str(base), "every": every, "steps": steps, "replay": replay}
        first_step = Path(folder) / "first-step.npz"
        if compare:
            options["first_step"] = str(first_step)
        begun = time.monotonic()
        status, ended_by = _wait(line("mixed-0"), watched_environment(environment, options))
        seconds = time.monotonic() - begun
        ranks = read_ranks(Path(folder))
        limited = any("limit" in rank.facts for rank in ranks)
        ended = _ended(status, limited, ranks[0].facts.get("raised") if ranks else None, ended_by)
        code = status if status >= 0 else 128 - status
        report, content = build(ranks, base, list(shown), code, ended, seconds)
        first = next((rank for rank in ranks if rank.steps), None)
        if compare and first is not None:
            losses, skipped = losses_of(first), sum(step["skipped"] for step in first.steps)
            ran = Ran("mixed-0", False, 0, code, seconds, losses, skipped, first_step=first_step)
            comparison = Comparison(line, environment, Path(folder), base, steps)
            report, content = with_comparison(report, content, run_pairs(comparison, compare, progress, ran))
    if strict and any(finding.severity == "error" for finding in report.findings):
        code = STRICT
    return code, report, content


def _wait(line: Sequence[str], env: Mapping[str, str]) -> tuple[int, str | None]:
    """Run it and wait; what is to end this process is passed on to it. Its status, and the last such signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = subprocess.Popen(list(line), env=dict(env))

    signals: list[str] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        signals.append(signal.Signals(number).name)
        if process.poll() is None and not (number == signal.SIGINT and _in_foreground()):
            process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", None))
    handlers = {number: signal.signal(number, pass_on) for number in numbers if number is not None}
    try:
        status = process.wait()
        return status, signals[-1] if signals else None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether a terminal sends its interrupts to this process, and then to the script as well."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _ended(status: int, limited: bool, raised: Mapping[str, str] | None, ended_by: str | None) -> str:
    if limited:
        return "stopped after the steps asked for"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    if raised is not None and status:
        text = str(raised["text"]).splitlines()[0][:200] if raised["text"] else ""
        return f"ended by {raised['type']}: {text}".rstrip(": ")
    how = "ran to its end" if status == 0 else f"ended with status {status}"
    return how if ended_by is None else f"{how} after {ended_by}"

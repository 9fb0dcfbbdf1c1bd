"""`preamp doctor` and `preamp compare`: run a script in processes of its own, and report whatever becomes of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ...errors import SessionError
from ...report import Report
from ...report.values import format_left
from ..records import Rank, read_ranks
from ..tell.comparison import Ran, build_comparison, losses_of, pairs_of
from ..tell.report import NO_STEP, STRICT, build, policy_seen
from . import HOOK, VARIABLE

Progress = Callable[[str], None]
"""Is called with the run that begins, and the time that is left."""
ONLY_FIRST = 1 << 40
"""From one step that is looked at to the next, where only the first is to be."""
RUN = "{run}"
"""Stands in the script's arguments for the name of the run, such as "full-0": outputs need not overwrite each other."""
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf|-inf"
_PRINTED = re.compile(rf"([A-Za-z][\w/.@-]{{0,40}})(?:\s*[:=]\s*|[ \t]+)({_NUMBER})(?![\w.])(%?)")
_COUNTERS = "epoch|step|steps|iter|iteration|time|seconds|elapsed|lr|eta|it|scale|batch|took|in|at|of|after"
_NO_METRIC = re.compile(rf"(^|[_/.-])({_COUNTERS})s?$", re.I)


def printed_numbers(text: str) -> dict[str, float]:
    """The last number after each name in a text ("val_acc: 0.93", "f1=0.8", "val 0.91"), without counters and times."""
    found: dict[str, float] = {}
    for name, number, percent in _PRINTED.findall(text):
        if not _NO_METRIC.search(name):
            found[name] = float(number) / (100 if percent else 1)
    return found


@dataclass(frozen=True, slots=True)
class Script:
    """A script to run, once or several times."""

    line: Callable[[str], Sequence[str]]
    """The command of a run with this name, such as "mixed-0"."""
    path: Path
    """Paths in the report are relative to its folder."""
    shown: list[str]
    """The command as its user wrote it."""
    environment: Mapping[str, str]
    steps: int | None
    """A run is ended after so many; None: at its own end."""

    @property
    def base(self) -> Path:
        """The folder of the script, or the current one for a module."""
        return self.path.resolve().parent if self.path.exists() else Path.cwd()

    def watched(self, folder: Path, **options: Any) -> dict[str, str]:
        """The environment of a run that is watched and records in `folder`."""
        paths = {"folder": str(folder), "base": str(self.base)}
        before = self.environment.get("PYTHONPATH", "")
        path = os.pathsep.join(part for part in (HOOK, before) if part)
        return {**self.environment, VARIABLE: json.dumps({**paths, "steps": self.steps, **options}), "PYTHONPATH": path}

    def run(self, folder: Path, full: bool, offset: int) -> Ran:
        """One run in mixed or full precision with seeds shifted by `offset`; its output is kept, not shown."""
        name = f"{'full' if full else 'mixed'}-{offset}"
        folder = folder / name
        folder.mkdir()
        looks = not full and offset == 0
        env = self.watched(folder, every=ONLY_FIRST if looks else None, replay=looks, offset=offset, full=full)
        begun = time.monotonic()
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = subprocess.Popen(list(self.line(name)), env=env, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
            try:
                status = process.wait()
            finally:
                if process.poll() is None:
                    process.terminate()  # a launcher ends its workers then, which a kill would leave running
                    process.wait()
        rank = next((one for one in read_ranks(folder) if one.steps), Rank(0))
        stdout, stderr = ((folder / of).read_text(encoding="utf-8", errors="replace") for of in ("stdout", "stderr"))
        status, seconds = _as_a_shell_has_it(status), time.monotonic() - begun
        skipped, metrics = sum(step["skipped"] for step in rank.steps), printed_numbers(stdout)
        ran = Ran(name, full, offset, status, seconds, losses_of(rank), skipped, metrics, stderr[-600:], rank.findings)
        low = rank.facts.get("audit", {}).get("low", ())
        ran.precision = policy_seen(rank) + (f" ({', '.join(low)})" if low else "") if looks else ""
        return ran


def examine_script(script: Script, *, every: int, replay: bool, strict: bool) -> tuple[int, Report, dict[str, Any]]:
    """Run a script to its end under observation; exit status, report, and the content of `report.json`.

    The status is the script's own (128 and the number of the signal that ended it), or 3 with `strict` when there is a
    finding of severity error.
    """
    with tempfile.TemporaryDirectory(prefix="preamp-doctor-") as name:
        folder = Path(name)
        begun = time.monotonic()
        env = script.watched(folder, every=every, replay=replay)
        ended_with, ended_by = _wait(script.line("mixed-0"), env)
        seconds = time.monotonic() - begun
        ranks = read_ranks(folder)
        limited = any("limit" in rank.facts for rank in ranks)
        ended = _ended(ended_with, limited, ranks[0].facts.get("raised") if ranks else None, ended_by)
        status = _as_a_shell_has_it(ended_with)
        report, content = build(ranks, script.base, script.shown, status, ended, seconds)
    if strict and any(finding.severity == "error" for finding in report.findings):
        status = STRICT
    return status, report, content


def compare_script(
    script: Script, *, seeds: int, margin: float | None, progress: Progress
) -> tuple[int, Report, dict[str, Any]]:
    """Run a script in `seeds` pairs; exit status, report, and the content of `compare.json`.

    The status is 0, or 3 when mixed precision is worse: by its loss, or since it fails where full precision does not.
    Where full precision fails too, it is that of the script. Raises `SessionError` when a run makes no step: there is
    nothing to compare.
    """
    with tempfile.TemporaryDirectory(prefix="preamp-compare-") as folder:
        runs = _pairs(script, Path(folder), seeds, progress)
        report, content = build_comparison(runs, margin, script.shown)
    failed = {full: next((ran.status for ran in runs if ran.full is full and ran.status), 0) for full in (False, True)}
    worse = any(finding.code == "PA206" for finding in report.findings) or (failed[False] and not failed[True])
    return STRICT if worse else failed[True], report, content


def _pairs(script: Script, folder: Path, seeds: int, progress: Progress) -> list[Ran]:
    """All runs, pair by pair.

    Ctrl-C ends it and keeps the pairs that are whole. Raises `SessionError` as `compare_script` says.
    """
    runs: list[Ran] = []
    total = 2 * seeds
    for offset in range(seeds):
        for full in (False, True):
            what = f"{'full' if full else 'mixed'} precision, seed offset {offset}"
            progress(f"run {len(runs) + 1} of {total}: {what}{time_left(runs, total)}")
            try:
                ran = script.run(folder, full, offset)
            except KeyboardInterrupt:
                if pairs_of(runs):
                    return runs
                raise
            if not ran.losses:
                ended = f"ended with status {ran.status}" if ran.status else "ran to its end"
                words = f". Its last words: {ran.stderr.strip()}" if ran.stderr.strip() else f". {NO_STEP}"
                raise SessionError(
                    f"run {ran.name} {ended} without a training step, so there is nothing to compare{words}"
                )
            runs.append(ran)
    return runs


def time_left(runs: Sequence[Ran], total: int) -> str:
    """What the runs that are left will take by those that have ended, in words; empty before the first has."""
    if not runs:
        return ""
    # by precision, since one may take several times as long as the other
    seconds = {ran.full: ran.seconds for ran in runs}
    mean = sum(seconds.values()) / len(seconds)
    left = sum(seconds.get(full, mean) * (total // 2 - sum(ran.full is full for ran in runs)) for full in (False, True))
    return f"; {format_left(left)}"


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


def _as_a_shell_has_it(status: int) -> int:
    """128 and the number of the signal that ended a process, else its own status."""
    return status if status >= 0 else 128 - status


def _ended(status: int, limited: bool, raised: Mapping[str, str] | None, ended_by: str | None) -> str:
    if limited:
        return "stopped after the steps asked for"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    if raised is not None and status:
        text = str(raised["text"]).splitlines()[0][:200] if raised["text"] else ""
        return f"ended by {raised['type']}: {text}".rstrip(": .")
    how = "ran to its end" if status == 0 else f"ended with status {status}"
    return how if ended_by is None else f"{how} after {ended_by}"

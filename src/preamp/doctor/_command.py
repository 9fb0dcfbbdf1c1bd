"""`preamp doctor`: starts a script as it is in a process of its own, and reports on it whatever becomes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from ..report import Report
from ._child import VARIABLE
from ._diagnosis import STRICT, build, write
from ._records import read_ranks

HOOK = str(Path(__file__).parent / "_importable")
"""The folder whose `sitecustomize` begins the watching."""
GRACE = 10.0
"""Seconds that a script has to end after it was told to."""


def examine_script(
    line: Sequence[str],
    script: Path,
    shown: Sequence[str],
    environment: Mapping[str, str],
    *,
    out: Path,
    json_file: Path | None = None,
    every: int = 50,
    steps: int | None = None,
    replay: bool = True,
    strict: bool = False,
) -> tuple[int, Report, Path]:
    """Run the command `line` to its end under observation; exit status, report, and the path of its page.

    `script`: the file to whose folder paths in the report are relative; `shown`: the command as its user wrote it. The
    status is the script's own (128 and the number of the signal that ended it), or 3 with `strict` when there is a
    finding of severity error.
    """
    with tempfile.TemporaryDirectory(prefix="preamp-doctor-") as folder:
        base = script.resolve().parent if script.exists() else Path.cwd()
        asked = {"folder": folder, "base": str(base), "every": every, "steps": steps, "replay": replay}
        before = environment.get("PYTHONPATH", "")
        env = {
            **environment,
            VARIABLE: json.dumps(asked),
            "PYTHONPATH": os.pathsep.join(p for p in (HOOK, before) if p),
        }
        begun = time.monotonic()
        status = _wait(line, env)
        seconds = time.monotonic() - begun
        ranks = read_ranks(Path(folder))
        limited = any("limit" in rank.facts for rank in ranks)
        ended = _ended(status, limited, ranks[0].facts.get("raised") if ranks else None)
        code = status if status >= 0 else 128 - status
        report, content = build(ranks, base, list(shown), code, ended, seconds)
        page, _ = write(report, content, out, json_file)
    if strict and any(finding.severity == "error" for finding in report.findings):
        code = STRICT
    return code, report, page


def _wait(line: Sequence[str], env: Mapping[str, str]) -> int:
    """Run it; what is to end this process is passed on to it, and it is waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = subprocess.Popen(list(line), env=dict(env))

    def pass_on(number: int, _: FrameType | None) -> None:
        if process.poll() is None and number != signal.SIGINT:  # the terminal sends that one to both
            process.send_signal(number)

    handlers = {n: signal.signal(n, pass_on) for n in (signal.SIGINT, signal.SIGTERM) if n is not None}
    try:
        return process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _ended(status: int, limited: bool, raised: Mapping[str, str] | None) -> str:
    if limited:
        return "stopped after the steps asked for"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    if raised is not None and status:
        return (
            f"ended by {raised['type']}: {str(raised['text']).splitlines()[0][:200] if raised['text'] else ''}".rstrip(
                ": "
            )
        )
    return "ran to its end" if status == 0 else f"ended with status {status}"

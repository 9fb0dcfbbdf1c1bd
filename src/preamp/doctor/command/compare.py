"""`preamp compare`: the same script as it is and in full precision, a few seeds of each."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import SessionError
from ...report import Report
from ..records import Rank, read_ranks
from ..tell.comparison import Ran, build_comparison, losses_of, pairs_of
from . import watched_environment

RUN = "{run}"
"""Stands in the script's arguments for the name of the run, such as "full-0": outputs need not overwrite each other."""
_PRINTED = re.compile(r"([A-Za-z][\w/.@-]{0,40})\s*[:=]\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf|-inf)(%?)")
_NO_METRIC = re.compile(
    r"(^|[_/.-])(epoch|step|steps|iter|iteration|time|seconds|elapsed|lr|eta|it|scale|batch)s?$", re.I
)


def printed_numbers(text: str) -> dict[str, float]:
    """The last number that stands after each name in a text ("val_acc: 0.93", "f1=0.8"), without counters and times."""
    found: dict[str, float] = {}
    for name, number, percent in _PRINTED.findall(text):
        if not _NO_METRIC.search(name):
            found[name] = float(number) / (100 if percent else 1)
    return found


class Comparison:
    """Runs a script in pairs of mixed and full precision; `line` gives the command of a run of this name."""

    def __init__(
        self,
        line: Callable[[str], Sequence[str]],
        environment: Mapping[str, str],
        folder: Path,
        base: Path,
        steps: int | None,
    ) -> None:
        self._line, self._environment = line, environment
        self._folder, self._base, self._steps = folder, base, steps

    def run(self, full: bool, offset: int) -> Ran:
        """One run, to its end; its output is kept, not shown."""
        name = f"{'full' if full else 'mixed'}-{offset}"
        folder = self._folder / name
        folder.mkdir()
        first_step = folder / "first-step.npz"
        options: dict[str, Any] = {"folder": str(folder), "base": str(self._base), "every": None, "steps": self._steps}
        options |= {"replay": False, "offset": offset, "full": full}
        options["first_step"] = str(first_step) if offset == 0 else None
        env = watched_environment(self._environment, options)
        begun = time.monotonic()
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = subprocess.Popen(
                list(self._line(name)), env=env, stdout=out, stderr=err, stdin=subprocess.DEVNULL
            )
            try:
                status = process.wait()
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        ranks = read_ranks(folder)
        rank = next((one for one in ranks if one.steps), Rank(0))
        texts = [(folder / name).read_text(encoding="utf-8", errors="replace") for name in ("stdout", "stderr")]
        return Ran(
            name,
            full,
            offset,
            status if status >= 0 else 128 - status,
            time.monotonic() - begun,
            losses_of(rank),
            sum(step["skipped"] for step in rank.steps),
            printed_numbers(texts[0]),
            first_step,
            texts[1][-600:],
        )


def compare_script(
    line: Callable[[str], Sequence[str]],
    script: Path,
    shown: Sequence[str],
    environment: Mapping[str, str],
    *,
    seeds: int = 3,
    margin: float | None = None,
    steps: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[int, Report, dict[str, Any]]:
    """Run a script in `seeds` pairs; exit status, report, and the content of `compare.json`.

    `line`: the command of a run with this name; `progress`: is called with the run that begins. The status is 0, or 3
    when mixed precision is worse. Raises `SessionError` when a run makes no step: there is nothing to compare.
    """
    with tempfile.TemporaryDirectory(prefix="preamp-compare-") as folder:
        base = script.resolve().parent if script.exists() else Path.cwd()
        comparison = Comparison(line, environment, Path(folder), base, steps)
        runs = run_pairs(comparison, seeds, progress)
        report, content = build_comparison(runs, margin, list(shown))
    worse = any(finding.code == "PA206" for finding in report.findings)
    return 3 if worse else 0, report, content


def run_pairs(
    comparison: Comparison, seeds: int, progress: Callable[[str], None], first: Ran | None = None
) -> list[Ran]:
    """All runs, pair by pair; `first`: the mixed run of offset 0, if there is one already.

    Ctrl-C ends it and keeps the pairs that are whole. Raises `SessionError` as `compare_script` says.
    """
    runs: list[Ran] = [] if first is None else [first]
    total = 2 * seeds
    for offset in range(seeds):
        for full in (False, True):
            if any((ran.full, ran.offset) == (full, offset) for ran in runs):
                continue
            progress(f"run {len(runs) + 1} of {total}: {'full' if full else 'mixed'} precision, seed offset {offset}")
            try:
                ran = comparison.run(full, offset)
            except KeyboardInterrupt:
                if pairs_of(runs):
                    return runs
                raise
            if not ran.losses:
                ended = f"ended with status {ran.status}" if ran.status else "ran to its end"
                raise SessionError(
                    f"run {ran.name} {ended} without a training step, so there is nothing to compare. Its last words: "
                    f"{ran.stderr.strip() or 'none'}"
                )
            runs.append(ran)
    return runs

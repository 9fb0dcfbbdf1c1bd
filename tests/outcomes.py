"""A pytest plugin for `./dev gpu`: outcomes in a file as soon as they are known, failures printed at once, resuming.

`--outcomes FILE` has a JSON object a line. `--missing FOLDER` leaves out what passed according to such files, of the
same device and torch; what nobody tried comes first, then what failed, then what a crash broke off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

from preamp.report.files import write_text

FILE = "tests.jsonl"
LOST = 75
"""Exit status of a process whose device answers no more."""
DONE = ("passed", "skipped", "xfailed")
EARLIER = pytest.StashKey[dict[str, str]]()
"""By test, its last outcome in earlier runs."""
LONGEST = 6000
"""Characters of a traceback that go into the file: its end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("outcomes")
    group.addoption("--outcomes", help="file for a JSON object an outcome")
    group.addoption("--missing", action="append", default=[], help="folder with outcomes of earlier runs")


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("gpu", "slow"):
        config.addinivalue_line("markers", f"{marker}: see the project's settings, which are not read")
    told = getattr(config, "workerinput", None)  # of pytest-xdist, in a worker; who controls it records
    config.stash[EARLIER] = _read(config.option.missing) if told is None else told["earlier outcomes"]
    if told is None and config.option.outcomes:
        config.pluginmanager.register(_Recorder(config), "outcomes recorder")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers leave out the same tests as each other, also one that takes the place of another later."""
    node.workerinput["earlier outcomes"] = node.config.stash[EARLIER]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    before = config.stash[EARLIER]
    done = [item for item in items if before.get(item.nodeid) in DONE]
    if done:
        config.hook.pytest_deselected(items=done)
    places = {"failed": 1, "begun": 2}
    left = [item for item in items if before.get(item.nodeid) not in DONE]
    items[:] = sorted(left, key=lambda item: places.get(before.get(item.nodeid, ""), 0))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Ends the process when a test has taken the device along, after which every other would fail."""
    failed = item.session.testsfailed
    result = yield
    if item.session.testsfailed > failed and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except Exception as error:
            print(f"\nthe device answers no more after {item.nodeid}: {error}", flush=True)
            os._exit(LOST)
    return result


class _Recorder:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        path = Path(config.option.outcomes)
        earlier = [{"test": test, "outcome": outcome} for test, outcome in config.stash[EARLIER].items()]
        write_text(path, "".join(f"{json.dumps(told)}\n" for told in (_here(), *earlier)))
        self._file: TextIO = path.open("a", encoding="utf-8")

    def _write(self, **what: Any) -> None:
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, outcome="begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            why = {"why": report.longreprtext[-LONGEST:]} if not report.passed else {}
            outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
            self._write(test=report.nodeid, outcome=outcome, seconds=round(report.duration, 3), **why)
        if report.failed:
            self._print(report.nodeid, report.longreprtext)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test=report.nodeid, outcome="failed", why=report.longreprtext[-LONGEST:])
            self._print(report.nodeid, report.longreprtext)

    def _print(self, nodeid: str, text: str) -> None:
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        terminal.section(f"failed: {nodeid}", sep="_", red=True)
        terminal.write_line(text)
        terminal.flush()

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(finished=int(exitstatus))
        self._config.option.tbstyle = "no"  # tracebacks have been printed

    def pytest_unconfigure(self) -> None:
        self._file.close()


def _here() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "torch": torch.__version__}


def _read(folders: list[str]) -> dict[str, str]:
    """The last outcome of every test in the files below `folders`; one that passed anywhere has passed."""
    found: dict[str, str] = {}
    for path in sorted((p for folder in folders for p in Path(folder).rglob(FILE)), key=lambda p: p.stat().st_mtime):
        last: dict[str, str] = {}
        here = False
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                told = json.loads(line)
            except ValueError:
                continue  # the line that a kill cut off
            if "device" in told:
                here = told == _here()
            elif here and "test" in told:
                last[told["test"]] = told["outcome"]
        found |= {test: outcome for test, outcome in last.items() if found.get(test) not in DONE}
    return found

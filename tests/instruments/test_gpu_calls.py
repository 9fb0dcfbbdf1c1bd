"""`./dev gpu` in calls of ten minutes: parts that fit, outcomes that outlive a kill, going on with what is missing."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from preamp.bench._results import complete
from preamp.bench.models import models
from preamp.bench.training import training
from tests.forks import run
from tests.pretend.device import missing

ROOT = Path(__file__).parents[2]

TESTS = """
import os, pytest
def test_first(): pass
def test_wrong(): assert [1, 2] == [1, 3], "so it is"
@pytest.mark.parametrize("x", [1, 2])
def test_skipped(x): pytest.skip("not here")
@pytest.mark.xfail
def test_known(): assert False
def test_crash():
    if os.path.exists("crash"): os._exit(9)
def test_last(): pass
"""


@pytest.fixture(scope="module")
def dev() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("dev", str(ROOT / "dev"))
    spec = importlib.util.spec_from_loader("dev", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = bytecode
    return module


# -- tests


@pytest.fixture
def gpu_tests(tmp_path: Path) -> Callable[..., CompletedProcess[str]]:
    (tmp_path / "test_some.py").write_text(TESTS)

    def tests(out: str, *more: str) -> CompletedProcess[str]:
        settings = ["-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-p", "tests.outcomes"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
        outcomes = str(tmp_path / out / "tests.jsonl")
        given = ["-m", "pytest", *settings, "-q", "-p", "no:timeout", "--outcomes", outcomes, *more, "test_some.py"]
        return run(given, cwd=tmp_path, env=environment)

    return tests


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def last(path: Path) -> dict[str, str]:
    return {each["test"].partition("::")[2]: each["outcome"] for each in told(path) if "test" in each}


def test_outcomes_outlive_a_crash_and_the_rest_is_run_next(
    gpu_tests: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "crash").touch()
    first = gpu_tests("a", "-p", "no:xdist")
    assert first.returncode == 9
    assert "failed: test_some.py::test_wrong" in first.stdout and "so it is" in first.stdout  # at once: it never ended
    outcomes = last(tmp_path / "a" / "tests.jsonl")
    assert outcomes == {
        "test_first": "passed", "test_wrong": "failed", "test_skipped[1]": "skipped", "test_skipped[2]": "skipped",
        "test_known": "xfailed", "test_crash": "begun",
    }  # fmt: skip
    (why,) = [each["why"] for each in told(tmp_path / "a" / "tests.jsonl") if each.get("outcome") == "failed"]
    assert "assert [1, 2] == [1, 3]" in why
    (tmp_path / "crash").unlink()
    second = gpu_tests("b", "-p", "no:xdist", "--missing", str(tmp_path / "a"))
    assert second.returncode == 1 and "1 failed, 2 passed, 4 deselected" in second.stdout
    ran = [each["test"].partition("::")[2] for each in told(tmp_path / "b" / "tests.jsonl") if "seconds" in each]
    assert ran == ["test_last", "test_wrong", "test_crash"]  # what could break off again comes last
    assert told(tmp_path / "b" / "tests.jsonl")[-1] == {"finished": 1}
    assert last(tmp_path / "b" / "tests.jsonl").keys() == outcomes.keys() | {"test_last"}
    assert second.stdout.count("def test_wrong()") == 1  # shown when it failed, and not again at the end


def test_a_test_that_takes_the_device_along_ends_the_process(
    gpu_tests: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text("""
import pytest, torch
@pytest.fixture(autouse=True)
def device(request, monkeypatch):
    if request.node.name == "test_wrong":
        def lost(): raise RuntimeError("an illegal memory access was encountered")
        torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, lost
""")
    done = gpu_tests("a", "-p", "no:xdist")
    assert done.returncode == 75
    assert "answers no more after test_some.py::test_wrong: an illegal memory access" in done.stdout
    assert last(tmp_path / "a" / "tests.jsonl") == {"test_first": "passed", "test_wrong": "failed"}


def write_outcomes(path: Path, device: str, **outcomes: str) -> None:
    lines: list[dict[str, str]] = [{"device": device, "torch": torch.__version__}]
    lines += [{"test": f"test_some.py::{test}", "outcome": outcome} for test, outcome in outcomes.items()]
    path.mkdir()
    (path / "tests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_workers_leave_out_the_same(gpu_tests: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    write_outcomes(tmp_path / "a", "cpu", test_first="passed", test_wrong="failed")
    workers = gpu_tests("a", "-n", "1", "--missing", str(tmp_path / "a"))
    assert "1 failed, 2 passed, 2 skipped, 1 xfailed" in workers.stdout, workers.stdout
    assert list(last(tmp_path / "a" / "tests.jsonl").values()).count("passed") == 3


def test_outcomes_of_another_device_do_not_count(
    gpu_tests: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    write_outcomes(tmp_path / "a", "NVIDIA H100", test_first="passed", test_last="passed")
    again = gpu_tests("b", "-p", "no:xdist", "-k", "first or last", "--missing", str(tmp_path / "a"))
    assert "2 passed" in again.stdout


# -- parts


STEP = 80.0
"""Seconds of the suite `step`, by estimate."""


def test_every_part_fits_and_says_no_less_than_its_suites(dev: ModuleType) -> None:
    assert all(seconds <= 540 for seconds in dev.GPU_PARTS.values())
    for name, seconds in {**training.estimates(), **models.estimates()}.items():
        starts = sum(name in parts for parts in dev.GPU_SUITES.values())
        needed = seconds + dev.GPU_START * starts + (STEP if name in dev.GPU_SUITES["step"] else 0)
        assert dev.GPU_PARTS[name] >= needed, f"{name}: {dev.GPU_PARTS[name]} s, and its suites say {needed} s"


def test_three_calls_do_everything_by_the_estimates(
    dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that take what is estimated, on a clock of their own; every row and the tests are done in the end."""
    clock, done = [0.0], set()
    monkeypatch.setattr(dev, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setenv("OUT", str(tmp_path))
    machine, *rows = training.parts(training.run(torch.device("cpu")))

    def process(self: Any, *command: Any, limit: float) -> int:
        words = [str(word) for word in command]
        started = clock[0]
        if "pytest" in words:
            clock[0] += dev.GPU_START if "tests" in done else dev.GPU_PARTS["tests"]
            done.add("tests")
            (tmp_path / "tests.jsonl").write_text('{"finished": 0}')
        else:
            clock[0] += dev.GPU_START
        if "step" in words:
            clock[0] += 0 if "step" in done else STEP
            done.add("step")
        elif "training" in words:
            budget = float(words[words.index("--budget") + 1])
            groups = [words[index + 1] for index, word in enumerate(words) if word == "--part"]
            begun = clock[0]
            lacking = [row for row in rows if row.group in groups and row.name not in done]
            clock[0] += machine.needs if lacking else 0
            for row in lacking:
                if row.needs <= budget - (clock[0] - begun):
                    clock[0] += row.needs
                    done.add(row.name)
        assert clock[0] - started <= limit, f"killed: {words}"
        return 0

    monkeypatch.setattr(dev.Gpu, "run", process)
    monkeypatch.setattr(dev.Gpu, "_has", lambda *_: False)
    for call in range(3):
        begun = clock[0]
        with pytest.raises(SystemExit):
            dev.gpu(*(["--missing", str(tmp_path)] if call else []))
        assert clock[0] - begun <= dev.GPU_SECONDS, f"call {call + 1}"
    assert done == {"tests", "step", *(row.name for row in rows)}


def test_what_is_no_part_and_no_folder_is_refused(dev: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (("--parts", "lists,nothing"), "no part 'nothing'; the parts are tests (335 s), lists"), (
        ("--missing", "/nowhere"), "--missing /nowhere: no such folder",
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            dev.gpu(*arguments)
        assert message in capsys.readouterr().err


def test_a_limit_kills_and_what_was_printed_is_in_the_log(dev: ModuleType, tmp_path: Path) -> None:
    script = "import time; print('measured'); time.sleep(60); print('never')"
    status = dev.run(sys.executable, "-c", script, check=False, limit=1, log=tmp_path / "log")
    assert status == 124 and (tmp_path / "log").read_text() == "measured\n"


def test_results_of_an_earlier_call_are_not_mixed_in_unasked(
    dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    (tmp_path / "tests.jsonl").touch()
    with pytest.raises(SystemExit):
        dev.gpu("--parts", "tests")
    assert f"go on with --missing {tmp_path}, or move it away" in capsys.readouterr().err


@pytest.fixture
def call(dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A call whose processes end with the statuses in `statuses`, and leave what `after` does; `asked` says of each."""
    (tmp_path / "earlier").mkdir()
    made = dev.Gpu(tmp_path, [tmp_path / "earlier"])
    made.statuses, made.asked, made.after = [], [], lambda: None

    def process(*command: Any, limit: float) -> int:
        made.asked.append([str(word) for word in command])
        made.after()
        return int(made.statuses.pop(0))

    monkeypatch.setattr(made, "run", process)
    return made


@pytest.mark.parametrize(
    ("statuses", "processes"), [([0], 1), ([2], 1), ([124], 1), ([-11, 0], 2), ([1, *[-9] * 8], 6)]
)
def test_a_bench_that_crashed_is_begun_anew(call: Any, statuses: list[int], processes: int) -> None:
    call.statuses = [*statuses]
    assert call.bench("training", "--part", "eager") == statuses[processes - 1]
    assert len(call.asked) == processes
    for asked in call.asked:
        folders = [asked[index + 1] for index, word in enumerate(asked) if word == "--missing"]
        assert folders == [str(call.out / "earlier"), str(call.out)]  # also what this call has measured
        budget = float(asked[asked.index("--budget") + 1])
        assert 500 < budget < call.left


def test_tests_that_ended_are_not_begun_anew(call: Any, dev: ModuleType) -> None:
    call.after = lambda: (call.out / "tests.jsonl").write_text('{"finished": 1}\n')
    call.statuses = [1]
    assert call.tests(335.0) == 1 and len(call.asked) == 1
    call.statuses = [5]  # pytest's word for no tests
    assert call.tests(335.0) == 0
    call.after = lambda: (call.out / "tests.jsonl").write_text('{"test": "a", "outcome": "begun"}\n')
    call.statuses, call.asked = [75, -11, *[75] * 9], []
    assert call.tests(335.0) == 75 and len(call.asked) == dev.GPU_TRIES


def test_what_is_missing_is_named_at_the_end(
    dev: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "training").mkdir()
    rows = [{"name": "whole"}, {"name": "late", "dropped": "no time"}, {"name": "broken", "error": "gone"}]
    content = {"environment": {"gpu": "NVIDIA H100 80GB HBM3", "commit": "abc+"}, "suites": {"training": rows}}
    (tmp_path / "training" / "results.json").write_text(json.dumps(content))
    (tmp_path / "training" / "report.html").touch()
    dev.keep_result("training", tmp_path)
    page, named = sorted(tmp_path.iterdir())
    assert named.name.startswith("training_h100-80gb-hbm3_") and named.name.endswith("_abc.json")
    assert page == named.with_suffix(".html")
    assert "missing in it: late; broken" in capsys.readouterr().out


# -- all of it


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(missing() is not None, reason="no fake CUDA device")
def test_two_calls_on_the_device_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import tests.pretend.plugin\n")  # in every Python that is begun
    out = tmp_path / "out"
    paths = [str(tmp_path), str(ROOT / "src"), str(ROOT)]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "PREAMP_PYTHON": sys.executable, "PREAMP_NO_TRITON": "1",
        "OUT": str(out), "PYTEST_ADDOPTS": "-k test_threads", "OMP_NUM_THREADS": "1",
    }  # fmt: skip

    def call(*arguments: str) -> dict[str, dict[str, Any]]:
        asked = [sys.executable, str(ROOT / "dev"), "gpu", "--size", "tiny", *arguments]
        done = subprocess.run(asked, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        suites = [json.loads(path.read_text())["suites"] for path in out.glob("*_pretended_*.json")]
        return {row["name"]: row for suite in suites for rows in suite.values() for row in rows}

    first = call("--parts", "tests,lists")
    assert set(last(out / "tests.jsonl").values()) == {"passed"}
    assert {"Adam, 8 x 60, 16-bit parameters", "Adam, 8 x 60, clipping", "machine"} <= first.keys()
    second = call("--parts", "tests,lists,parity", "--missing", str(out))
    assert second.keys() - first.keys() == {"parity, BERT-base b32", "parity, UNet"}
    assert all(complete(row) and row["measured on"]["device"] == "pretended" for row in second.values())
    assert all(second[name] == row for name, row in first.items() if name != "machine")
    assert {path.suffix for path in out.iterdir()} == {".json", ".jsonl", ".log", ".html"}
    results, pages = ({path.stem for path in out.glob(f"*.{kind}")} for kind in ("json", "html"))
    assert results == pages and len(results) <= 3

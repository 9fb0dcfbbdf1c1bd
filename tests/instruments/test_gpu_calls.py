"""`./dev gpu` in calls of ten minutes: parts that fit, outcomes that outlive a kill, going on with what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any

import pytest
from benchmarks.__main__ import SUITES
from benchmarks.harness import complete

from tests.forks import run
from tests.house.test_dev import dev_module
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


@pytest.fixture
def dev(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return dev_module(monkeypatch)


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


@pytest.mark.slow
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


# -- parts


def test_parts_are_the_suites(dev: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(dev.GPU_SUITES) == set(SUITES)
    with pytest.raises(SystemExit):
        dev.gpu("lists", "nothing")
    assert "no part 'nothing'; the parts are tests, step, lists" in capsys.readouterr().err


@pytest.fixture
def call(dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A call whose processes end with the statuses in `statuses`, and leave what `after` does; `asked` says of each."""
    made = dev.Gpu(tmp_path, 580)
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
    assert call.bench("steps") == statuses[processes - 1]
    assert len(call.asked) == processes
    for asked in call.asked:
        assert asked[:3] == ["-m", "benchmarks", "steps"] and asked[asked.index("--out") + 1] == str(call.out)
        assert 500 < float(asked[asked.index("--seconds") + 1]) < call.left


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
        "OUT": str(out), "PYTEST_ADDOPTS": "-k test_schedules_cuda", "OMP_NUM_THREADS": "1",
    }  # fmt: skip

    def call(*arguments: str) -> dict[str, dict[str, Any]]:
        asked = [sys.executable, str(ROOT / "dev"), "gpu", "--tiny", *arguments]
        done = subprocess.run(asked, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        suites = json.loads((out / "results.json").read_text())["suites"]
        return {f"{suite}: {row['name']}": row for suite, rows in suites.items() for row in rows}

    first = call("tests", "lists")
    assert set(last(out / "tests.jsonl").values()) == {"passed"}
    assert set(first) == {"lists: Adam, 8 x 60", "lists: Adam, 8 x 60, clipping"}
    second = call("tests", "lists", "step")
    assert len(second.keys() - first.keys()) == 4
    assert all(complete(row) and row["measured on"]["device"] == "pretended" for row in second.values())
    assert all(second[name] == row for name, row in first.items())
    assert {path.name for path in out.iterdir()} == {"results.json", "report.html", "tests.jsonl", "gpu.log"}

"""Results of a bench: written row by row, taken up again by the next run, apart by device."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from preamp.bench import SUITES, Results, Row, environment
from preamp.bench._machine import DeviceLost, check_device
from preamp.bench._results import BEGUN, Missing, complete
from preamp.bench._step_suite import step
from preamp.bench.training import _suite as training_suite
from preamp.bench.training import training
from preamp.cli._bench import run_suites
from tests.forks import run

CPU = torch.device("cpu")
HERE = {"cpu": "a small machine", "torch": "2.13.0", "commit": "abc"}


class Plain:
    def __init__(self, name: str, **more: Any) -> None:
        self._row = {"name": name, "contenders": [{"name": "a"}], **more}

    def to_dict(self) -> dict[str, Any]:
        return self._row


def rows_of(path: Path, suite: str = "step") -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(path.read_text())["suites"][suite]}


def test_each_row_is_in_the_file_as_soon_as_it_is_there(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json", HERE, 7)
    seen = []
    for name in results.missing("step").of(["one", "two"], str):
        seen.append({name: row.get("error") for name, row in rows_of(results.path).items()})
        results.add("step", Plain(name))
    seen.append({name: row.get("error") for name, row in rows_of(results.path).items()})
    assert seen == [{"one": BEGUN}, {"one": None, "two": BEGUN}, {"one": None, "two": None}]
    assert rows_of(results.path)["two"]["measured on"] == {
        "device": "a small machine",
        "torch": "2.13.0",
        "commit": "abc",
    }


def test_what_is_missing_and_in_which_order(tmp_path: Path) -> None:
    first = Results(tmp_path / "a" / "results.json", HERE, 7)
    first.add("step", Plain("whole"))
    first.add("step", Plain("short", **{"cut short": "no time"}))
    first.add("step", Plain("dropped", dropped="no time"))
    first.add("step", Plain("hopeless", contenders=[{"name": "a", "error": "gone"}]))
    first.add("step", Plain("failed", error="gone"))
    first.missing("step").begin("killed")
    first.add("regions", Plain("of another suite"))
    again = Results(tmp_path / "b" / "results.json", {**HERE, "commit": "def"}, 7)
    assert again.take(tmp_path, ["step"]) == ["1 rows were measured at commit abc and are kept"]
    order = [*again.missing("step").of(["failed", "killed", "dropped", "whole", "new", "short", "hopeless"], str)]
    assert order == ["dropped", "new", "short", "hopeless", "failed", "killed"]  # what failed may take others along
    assert set(again.suites) == {"step"}
    assert rows_of(again.path)["whole"]["measured on"]["commit"] == "abc"


def test_a_tree_without_history_can_be_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREAMP_COMMIT", "0123456789")
    assert environment(CPU)["commit"] == "0123456789"


def test_of_two_rows_the_complete_one_stays(tmp_path: Path) -> None:
    for index, row in enumerate([Plain("x", value=1), Plain("x", value=2), Plain("x", error="gone")]):
        Results(tmp_path / str(index) / "results.json", HERE, 7).add("step", row)
        os.utime(tmp_path / str(index) / "results.json", (index, index))
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    results = Results(tmp_path / "results.json", HERE, 7)
    results.take(tmp_path, ["step"])
    assert [row["value"] for row in results.suites["step"]] == [2]


@pytest.mark.parametrize("other", [{"cpu": "a large machine"}, {"torch": "2.11.0"}, {"gpu": "NVIDIA H200"}])
def test_rows_of_another_device_or_torch_are_left_aside(tmp_path: Path, other: dict[str, str]) -> None:
    Results(tmp_path / "results.json", {**HERE, **other}, 7).add("step", Plain("x"))
    results = Results(tmp_path / "new" / "results.json", HERE, 7)
    (told,) = results.take(tmp_path, ["step"])
    assert "1 rows of" in told and next(iter(other.values())) in told
    assert not results.suites and not results.missing("step").done


def test_a_row_of_the_step_suite_that_breaks_off_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def works(*_: Any) -> dict[str, Any]:
        def broken() -> dict[str, Any]:
            raise ValueError("no such optimizer\nat all")

        return {"broken": (broken, 3, 1), "whole": (lambda: {"a": lambda: None, "b": lambda: None}, 3, 1)}

    monkeypatch.setattr("preamp.bench._step_suite._works", works)
    broken, whole = (row.to_dict() for row in step(CPU, 3, lambda what: None))
    assert broken["error"] == "ValueError: no such optimizer" and not complete(broken)
    assert complete(whole) and len(whole["contenders"][1]["seconds"]) == 3


def test_rows_have_their_place_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("preamp.bench._results.time.perf_counter", lambda: clock[0])
    told = []
    for place, _ in Missing(done=frozenset("b")).numbered("abcd", str):
        told.append(place)
        clock[0] += 50
    assert told == ["1 of 3", "2 of 3, about 100 s left", "3 of 3, about 50 s left"]


def test_the_training_suite_measures_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def optimizer(name: str, device: torch.device, rounds: int, found: Any, *, clip: Any = None) -> Row:
        return Row(part="optimizer", name=f"Adam, {name}" + ("" if clip is None else ", clipping"))

    monkeypatch.setattr(training_suite, "optimizer_row", optimizer)

    def names(missing: Missing) -> list[str]:
        return [row.name for row in training(CPU, 1, lambda what: None, parts=["lists"], missing=missing)]

    assert names(Missing()) == ["machine", "Adam, 8 x 60", "Adam, 8 x 60, clipping"]
    assert names(Missing(done=frozenset(["Adam, 8 x 60", "machine"]))) == ["machine", "Adam, 8 x 60, clipping"]
    assert names(Missing(done=frozenset(["Adam, 8 x 60", "Adam, 8 x 60, clipping"]))) == []
    tried = Missing(tried=frozenset(["Adam, 8 x 60"]))
    assert names(tried) == ["machine", "Adam, 8 x 60, clipping", "Adam, 8 x 60"]


def test_a_lost_device_ends_the_suite_after_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Row:
        raise RuntimeError("an illegal memory access was encountered")

    def lost(device: torch.device, after: str) -> None:
        raise DeviceLost(f"{after}; since then nothing")

    monkeypatch.setattr(training_suite, "optimizer_row", broken)
    rows = []
    with pytest.raises(DeviceLost):
        monkeypatch.setattr("preamp.bench.training._parts.check_device", lost)
        for row in training(CPU, 1, lambda what: None, parts=["lists"]):
            rows.append(row.to_dict())
    assert [row["name"] for row in rows] == ["machine", "Adam, 8 x 60"]
    assert "DeviceLost: Adam, 8 x 60: RuntimeError: an illegal memory access" in rows[1]["error"]


def test_a_device_is_asked_whether_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    check_device(CPU, "anything")
    monkeypatch.setattr(torch.cuda, "synchronize", gone)
    with pytest.raises(DeviceLost, match=r"a row failed; since then .*illegal memory access.*begin another one"):
        check_device(torch.device("cuda", 0), "a row failed")


def test_a_run_goes_on_where_another_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def suite(device: torch.device, rounds: int, tell: Any, *, missing: Missing) -> Iterator[Plain]:
        for name in missing.of(["one", "two", "three"], str):
            if name == "two" and not ran:
                raise KeyboardInterrupt
            yield Plain(name)
        ran.append("whole")

    monkeypatch.setitem(SUITES, "regions", suite)
    console = Console(file=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        run_suites(["regions"], 3, "cpu", tmp_path / "a", console)
    assert rows_of(tmp_path / "a" / "results.json", "regions")["two"]["error"] == BEGUN
    ran.append("again")
    _, path = run_suites(["regions"], 3, "cpu", tmp_path / "b", console, earlier=[tmp_path / "a"])
    rows = rows_of(path, "regions")
    assert set(rows) == {"one", "two", "three"} and not any(row.get("error") for row in rows.values())
    tables, path = run_suites(["regions"], 3, "cpu", tmp_path / "c", console, earlier=[tmp_path / "b"])
    assert rows_of(path, "regions") == rows and not tables  # nothing was missing


def test_a_killed_bench_is_taken_up_again(tmp_path: Path) -> None:
    killer = f"""
import os, signal, sys
from preamp.bench.training import _suite
real = _suite.optimizer_row
def optimizer_row(*given, **more):
    if more.get("clip"):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*given, **more)
_suite.optimizer_row = optimizer_row
import runpy
asked = "bench --suite training --part lists --rounds 3 --device cpu --size tiny --out"
sys.argv = ["preamp", *asked.split(), {str(tmp_path / "a")!r}]
runpy.run_module("preamp", run_name="__main__")
"""
    (tmp_path / "killer.py").write_text(killer)
    assert run([str(tmp_path / "killer.py")]).returncode != 0
    left = rows_of(tmp_path / "a" / "results.json", "training")
    assert complete(left["Adam, 8 x 60"]) and left["Adam, 8 x 60, clipping"]["error"] == BEGUN
    asked = "bench --suite training --part lists --rounds 3 --device cpu --size tiny --out"
    again = run(["-m", "preamp", *asked.split(), str(tmp_path / "b"), "--missing", str(tmp_path / "a")])
    assert again.returncode == 0, again.stderr
    rows = rows_of(tmp_path / "b" / "results.json", "training")
    assert all(map(complete, rows.values())) and set(rows) == {"machine", "Adam, 8 x 60", "Adam, 8 x 60, clipping"}
    assert rows["Adam, 8 x 60"]["contenders"] == left["Adam, 8 x 60"]["contenders"]

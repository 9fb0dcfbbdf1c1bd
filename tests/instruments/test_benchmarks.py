"""The harness of the benchmarks: rows as they come, going on, contenders in turns; and contenders that train alike."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks import measures
from benchmarks.__main__ import SUITES, main
from benchmarks.counting import count
from benchmarks.harness import LOST, Results, Row, Setting, run
from benchmarks.measures import losses, trains
from benchmarks.race import Entry, orders, race, spread
from benchmarks.trainers import COMPILED, EAGER, FP32, O2, REFERENCE
from benchmarks.works import Work
from torch import Tensor, nn

from preamp.autocast import REGISTRY
from preamp.errors import PreampError

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
HERE = {"cpu": "a small machine", "torch": "2.13.0", "commit": "abc"}


def setting(told: list[str] | None = None, **more: Any) -> Setting:
    return Setting(device=CPU, rounds=3, tell=(told if told is not None else []).append, **more)


def row(name: str, measure: Callable[[], dict[str, Any]] = dict, seconds: float = 1.0) -> Row:
    return Row(suite="step", name=name, what="", measure=lambda _: {"contenders": [], **measure()}, seconds=seconds)


def rows_of(path: Path, suite: str = "step") -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in json.loads(path.read_text())["suites"][suite]}


# -- rows


def test_what_failed_comes_after_what_is_missing_and_again_measures_all(tmp_path: Path) -> None:
    ran: list[str] = []

    def named(name: str) -> Row:
        return row(name, lambda: {"x": ran.append(name)})

    def broken() -> dict[str, Any]:
        raise ValueError("no such optimizer\nat all")

    told: list[str] = []
    first = Results(tmp_path / "results.json", HERE, 3)
    run([row("failed", broken), named("whole")], first, setting(told))
    assert first.suites["step"]["failed"]["error"] == "ValueError: no such optimizer"
    assert any(line.startswith("failed failed\nTraceback") for line in told)
    results = Results(tmp_path / "results.json", HERE, 3)
    every = [named(name) for name in ("failed", "whole", "new")]
    run(every, results, setting())
    assert ran == ["whole", "new", "failed"]
    run(every, results, setting(told))
    assert ran[3:] == [] and told[-1].endswith("has all of it; --again measures anew")
    run(every, results, setting(), again=True)
    assert sorted(ran[3:]) == ["failed", "new", "whole"]


def test_no_row_begins_that_takes_longer_than_what_is_left(tmp_path: Path) -> None:
    moments = [0.0]

    def takes(seconds: float) -> Callable[[], dict[str, Any]]:
        return lambda: {"x": moments.append(moments[-1] + seconds)}

    rows = [row("a", takes(50), 60), row("b", takes(1), 60), row("c", takes(1), 30)]
    results = Results(tmp_path / "results.json", HERE, 3)
    left = run(rows, results, setting(), seconds=100, now=lambda: moments[-1])
    assert left == [rows[1]] and set(rows_of(results.path)) == {"a", "c"}


@pytest.mark.parametrize("other", [{"cpu": "a large machine"}, {"torch": "2.11.0"}, {"gpu": "NVIDIA H200"}])
def test_a_file_of_another_device_or_torch_is_refused(tmp_path: Path, other: dict[str, str]) -> None:
    run([row("x")], Results(tmp_path / "results.json", {**HERE, **other}, 3), setting())
    with pytest.raises(PreampError, match="write --out FOLDER"):
        Results(tmp_path / "results.json", HERE, 3)


def test_a_device_that_is_lost_ends_the_process_after_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(device: torch.device) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("benchmarks.harness.seconds_now", gone)
    results = Results(tmp_path / "results.json", HERE, 3)
    broken = row("broken", lambda: {"contenders": [{"name": "a", "error": "RuntimeError: illegal"}, {"name": "b"}]})
    with pytest.raises(SystemExit) as ended:
        run([row("whole"), broken, row("next")], results, setting())
    assert ended.value.code == LOST and set(results.suites["step"]) == {"whole", "broken"}
    assert "since then the device fails" in rows_of(results.path)["broken"]["error"]


# -- races


@pytest.mark.parametrize("number", range(1, 12))
def test_each_follows_every_other_equally_often_and_none_itself(number: int) -> None:
    rounds = orders(number)
    assert all(sorted(order) == list(range(number)) for order in rounds)
    within = Counter(pair for order in rounds for pair in pairwise(order))
    if number > 2:
        assert len(within) == number * (number - 1) and len(set(within.values())) == 1
        places = Counter((place, one) for order in rounds for place, one in enumerate(order))
        assert len(set(places.values())) == 1
        endless = [one for order in rounds * 2 for one in order]
        assert all(one != other for one, other in pairwise(endless))


def test_contenders_take_turns_and_ratios_are_of_rounds() -> None:
    ran: list[str] = []
    entries = [Entry(name, lambda _, name=name: lambda: ran.append(name), before=1, number=2) for name in "abcd"]
    found = race(entries, setting())
    assert ran[:8] == list("aabbccdd")  # to warm up
    for index in range(3):
        turns = ran[8 + 12 * index : 20 + 12 * index]
        assert Counter(turns) == dict.fromkeys("abcd", 3) and all(turns[i] == turns[i + 2] for i in range(0, 12, 3))
    ratios = [one / two for one, two in zip(found[0]["seconds"], found[2]["seconds"], strict=True)]
    assert found[2]["ratio"]["median"] == sorted(ratios)[1] and found[0]["ratio"]["median"] == 1


def test_a_contender_that_fails_is_an_error_and_the_others_go_on() -> None:
    calls, closed, told = iter([None] * 4), [], []

    def fails_later(stack: Any) -> Callable[[], Any]:
        stack.callback(closed.append, "later")
        return lambda: next(calls)

    def fails_at_once(stack: Any) -> Callable[[], Any]:
        raise MemoryError("no memory\nfor 3 MiB")

    makers = {"a": lambda _: lambda: None, "later": fails_later, "at once": fails_at_once, "b": lambda _: lambda: None}
    found = race([Entry(name, make) for name, make in makers.items()], setting(told))
    errors = {each["name"]: each.get("error") for each in found}
    assert errors == {"a": None, "later": "StopIteration: ", "at once": "MemoryError: no memory", "b": None}
    assert closed == ["later"] and len(found[3]["seconds"]) == 3 and gc.isenabled()
    assert told[0].startswith("at once failed\nTraceback") and "for 3 MiB" in told[0]
    (_, alone) = race([Entry("broken", fails_at_once), Entry("b", makers["b"])], setting())
    assert alone["ratio"] is None and alone["stats"]["median"] > 0


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"),
    [(1, 1, 1, 0.0), (5, 1, 5, 0.9375), (7, 1, 7, 0.984), (9, 2, 8, 0.961), (15, 4, 12, 0.965), (35, 12, 24, 0.959)],
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(count: int, low: int, high: int, confidence: float) -> None:
    found = spread([*range(count, 0, -1)])
    assert (found["low"], found["high"]) == (low, high)  # of the numbers 1 to n: as in tables of the sign test
    assert found["confidence"] == pytest.approx(confidence, abs=5e-4)
    assert (found["median"], found["min"], found["max"]) == ((count + 1) / 2, 1, count)


# -- counts


def test_what_a_step_moves_and_converts_is_counted() -> None:
    x = torch.ones(10)
    found = count(lambda: (x.half(), x.add_(1), x.view(2, 5), x.sum().item()))
    assert found == {"bytes": (40 + 20) + 80 + (40 + 4), "casts": 1, "calls": 3, "waits": 1}


# -- contenders do the same work


def toy(loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> Work:
    def batch(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 3, 8, 8, generator=generator)
        return x, x.mean((1, 2, 3))[:, None]

    def build() -> nn.Module:
        flat = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 1))
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *flat)

    return Work(
        name="toy", what="", build=build, batch=batch, loss=loss or (lambda out, y: F.mse_loss(out.float(), y)),
        count=8, optimizer="AdamW", lr=1e-2, clip=0.1, images=True,
    )  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "works", lambda tiny: {"toy": toy()})
    monkeypatch.setattr(measures, "TRAINED", 40)


def test_all_contenders_arrive_where_float32_arrives(small: None) -> None:
    contenders = [FP32, *(each for each in EAGER if each not in (FP32, *COMPILED[:-1]))]
    found = {each["name"]: each for each in losses("toy", contenders, setting())["contenders"]}
    assert not {name: each["error"] for name, each in found.items() if each.get("error")}
    full = found["fp32"]["losses"]
    assert full[-1] < 0.5 * full[0] and found["fp32, another seed"]["losses"][0] != full[0]
    for name in found.keys() - {"fp32, another seed", "preamp O3"}:  # which keeps no masters
        assert found[name]["losses"][0] == pytest.approx(full[0], rel=0.02), name
        assert found[name]["loss"] == pytest.approx(found["fp32"]["loss"], rel=0.1, abs=1e-3), name
        assert found[name]["against fp32"] == found[name]["loss"] / found["fp32"]["loss"] - 1


def test_torchs_contenders_run_without_our_rules_and_a_failure_leaves_no_session_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[bool, set[bool]] = {True: set(), False: set()}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        ours = torch.is_autocast_enabled("ipu")  # the marker of a region of ours
        seen[ours].add(REGISTRY.rules is not None)
        if ours and len(target) == 9:
            raise torch.OutOfMemoryError("no memory")
        return F.mse_loss(output.float(), target)

    monkeypatch.setattr(measures, "works", lambda tiny: {"toy": toy(loss)})
    row = measures.steps("toy", [REFERENCE, O2], setting(tiny=True))
    assert not any(each.get("error") for each in row["contenders"]) and seen == {True: {True}, False: {False}}
    assert [trains(each, toy(loss), 9, CPU) for each in (REFERENCE, O2)] == [True, False]
    with pytest.raises(RuntimeError, match="launch failure"):
        trains(O2, toy(lambda *_: exec('raise RuntimeError("launch failure")')), 4, CPU)
    REGISTRY.uninstall()  # refuses when a session is open


# -- the command and its report


def test_the_command_measures_writes_and_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREAMP_COMMIT", "abc")
    main(["regions", "--only", "operator", "--rounds", "3", "--device", "cpu", "--out", str(tmp_path)])
    told = capsys.readouterr().out
    assert "regions: low operator (2 of 3, about " in told and "preamp.autocast" in told
    content = json.loads((tmp_path / "results.json").read_text())
    assert (
        content["schema"] == "preamp-bench/1" and content["rounds"] == 3 and content["environment"]["commit"] == "abc"
    )
    assert [row["name"] for row in content["suites"]["regions"]] == [
        "unruled operator", "low operator", "full operator"
    ]  # fmt: skip
    for each in (each for row in content["suites"]["regions"] for each in row["contenders"]):
        assert len(each["seconds"]) == 3 and each["ratio"].keys() >= {"median", "min", "max", "low", "high"}
    assert "of 3 comparisons" in (tmp_path / "report.html").read_text()
    for asked, said in ((["nothing"], "the suites are regions, sessions, step"), (["steps"], "takes a CUDA device")):
        with pytest.raises(SystemExit):
            main([*asked, "--device", "cpu", "--out", str(tmp_path)])
        assert said in capsys.readouterr().err


def test_every_suite_has_rows_of_their_own_names() -> None:
    assert list(SUITES) == ["regions", "sessions", "step", "lists", "steps", "compiled", "losses", "memory"]
    for name, make in SUITES.items():
        rows = [*make(Setting(device=torch.device("cuda")))]
        assert rows and len({row.name for row in rows}) == len(rows) and {row.suite for row in rows} == {name}
        assert all(0 < row.seconds <= 540 for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_of_it_in_a_tiny_size(tmp_path: Path) -> None:
    main(["--tiny", "--rounds", "2", "--device", "cpu", "--out", str(tmp_path)])
    suites = json.loads((tmp_path / "results.json").read_text())["suites"]
    assert set(suites) == set(SUITES)
    found = [(row, each) for rows in suites.values() for row in rows for each in row.get("contenders", ())]
    assert len(found) > 150 and not [(row["name"], each) for row, each in found if each.get("error")]
    assert all("takes a CUDA device" in row["not measured"] for row in suites["memory"])

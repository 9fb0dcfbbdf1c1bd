"""The suite `training`: rows, ratios and JSON in a tiny size; failures and the clock; goals; sizes of the networks."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import torch.nn.functional as F
from tools.goals import goals, goals_table, main
from torch import Tensor, nn

from preamp.autocast import REGISTRY
from preamp.bench._results import Row, complete
from preamp.bench.training import (
    Clock,
    Contender,
    Work,
    training,
    training_table,
    works,
)
from preamp.bench.training._contenders import O2, REFERENCE
from preamp.bench.training._largest import largest
from preamp.bench.training._measure import Pace, Run, Speeds, quiet, ratio, steps_row
from preamp.bench.training._parts import Part, run_part
from preamp.errors import PolicyError

CPU = torch.device("cpu")
FLOAT32 = Contender(name="fp32")
ONCE = Pace(rounds=2, steps=2, seconds=0.05, warm_up=2)

NUMBER = {"type": ["number", "null"]}
MEASURED = {
    "type": "object",
    "required": ["name", "stats", "seconds", "samples", "ratio", "roofline"],
    "properties": {
        "stats": {
            "type": "object",
            "required": ["median", "min", "max", "rounds", "steps a round"],
            "additionalProperties": {"type": "number", "exclusiveMinimum": 0},
        },
        "seconds": {"type": "array", "items": {"type": "number"}},
        "samples": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "ratio": {"type": "object", "required": ["median", "min", "max"], "additionalProperties": {"type": "number"}},
        "roofline": NUMBER,
    },
}
TRAINED = {"type": "object", "required": ["name", "loss", "against fp32", "skips", "last scale", "losses"]}
CONTENDER = {"steps": MEASURED, "compiled": MEASURED, "parity": TRAINED}
ROW = {"type": "object", "required": ["part", "name", "what", "contenders"]}


class Whole:
    """A run of everything, tiny, with what was told and kept on the way."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.told: list[str] = []
        self.rows = list(training(CPU, 1, self.told.append, size="tiny"))
        self.plain = json.loads(json.dumps([row.to_dict() for row in self.rows], allow_nan=False))


@pytest.fixture(scope="module")
def whole() -> Whole:
    return Whole()


def test_every_part_is_measured(whole: Whole) -> None:
    kinds = [row.part for row in whole.rows]
    assert kinds[:3] == ["machine", "optimizer", "optimizer"]
    assert kinds.count("steps") == 6 and kinds.count("compiled") == 6 and kinds.count("parity") == 2
    assert kinds.count("largest batch") == 1 and kinds[-1] == "parity"
    assert len({row.name for row in whole.rows}) == len(kinds)  # rows are found again by name
    failed = [(row.name, each) for row in whole.rows for each in row.contenders if each.get("error")]
    assert not failed
    for row in whole.rows:
        assert not {"dropped", "error"} & row.about.keys()
        for each in row.contenders:
            assert any(line.startswith(f"{row.name}: {each['name']}: ") for line in whole.told)


def test_json_has_one_form(whole: Whole) -> None:
    for row in whole.plain:
        jsonschema.validate(row, ROW)
        for each in row["contenders"]:
            jsonschema.validate(each, CONTENDER.get(row["part"], {}))


def test_ratios_are_of_rounds(whole: Whole) -> None:
    for row in whole.plain:
        if row["part"] not in ("steps", "compiled"):
            continue
        reference = row["contenders"][0]
        assert reference["name"] == "torch.amp fp16" and reference["ratio"]["median"] == 1
        for each in row["contenders"]:
            ratios = [a / b for a, b in zip(reference["seconds"], each["seconds"], strict=True)]
            assert each["ratio"]["min"] == pytest.approx(min(ratios))
            assert len(each["samples"]) == each["stats"]["rounds"] == 1
            assert each["stats"]["min"] <= each["stats"]["median"] <= each["stats"]["max"]


def test_contenders_are_those_of_the_protocol(whole: Whole) -> None:
    names = {row.name: [each["name"] for each in row.contenders] for row in whole.rows}
    everywhere = ["torch.amp fp16", "torch.amp fp16, foreach", "torch.amp bf16", "fp32", "tf32", "preamp O1",
                  "preamp O2", "preamp O3", "preamp O5, split masters", "masters by hand, fp16"]  # fmt: skip
    for work in ("feed-forward", "BERT-base b4", "BERT-base b32", "BERT-large b16", "UNet", "ResNet-50"):
        assert set(everywhere) <= set(names[work])
        assert ("torch.amp fp16, NCHW" in names[work]) == (work in ("UNet", "ResNet-50"))
        for captured in ("preamp O2, captured", "torch.amp fp16, captured"):
            assert (captured in names[work]) == (work not in ("BERT-large b16", "ResNet-50"))
    for row, found in names.items():
        if not row.endswith(", compiled"):
            continue
        short = row.startswith(("feed-forward", "BERT-base"))
        assert found[0] == "torch.amp fp16"
        assert ("torch.amp fp16, reduce-overhead" in found) == short
        plain = {"torch.amp fp16, compiled", "preamp O2, compiled"} <= set(found)
        assert plain or {"torch.amp fp16, reduce-overhead", "preamp O2, reduce-overhead"} <= set(found)
    for row in ("Adam, 8 x 60", "Adam, 8 x 60, clipping"):
        assert {"torch.amp fp16, captured", "preamp O2, captured", "torch.amp fp16, foreach"} <= set(names[row])


def test_parity_trains_on_the_same_data(whole: Whole) -> None:
    for row in (row for row in whole.plain if row["part"] == "parity"):
        by_name = {each["name"]: each for each in row["contenders"]}
        assert by_name["fp32"]["against fp32"] == 0 and by_name["fp32, another seed"]["against fp32"] != 0
        first = by_name["fp32"]["losses"][0]
        for name, each in by_name.items():
            assert len(each["losses"]) == row["steps"]
            if name != "fp32, another seed":
                assert each["losses"][0] == pytest.approx(first, rel=0.02), name


def test_everything_is_printed(whole: Whole) -> None:
    text = training_table("training", whole.rows, "a small machine").to_text()
    assert "on a small machine" in text
    assert "preamp O2, captured" in text and "failed" not in text and "dropped" not in text
    judged = goals({"training": [{**row, **on("NVIDIA H100 80GB HBM3")} for row in whole.plain]})
    assert {g["goal"] for g in judged} == {
        "G1", "G1b", "G1c", "G2", "G3", "G3b", "G3c", "G4", "G5", "G7", "G8", "G9", "G10", "G11",
    }  # fmt: skip
    assert all(g["met"] is None for g in judged)  # a tiny run says nothing about them
    assert "for the full size" in goals_table(judged).to_text()


# -- failures


def toy(loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss) -> Work:
    def batch(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 8, generator=generator)
        return x, x[:, :1]

    return Work(name="toy", what="", build=lambda: nn.Linear(8, 1), batch=batch, loss=loss, count=4)


def run(
    work: Work, contenders: Sequence[Contender], clock: Clock | None = None, tell: Any = quiet, **options: Any
) -> Row:
    speeds = Speeds(copy=1e9, product=1e9)
    made = Run(device=CPU, pace=ONCE, clock=clock or Clock(60), tell=tell, speeds=speeds)
    return steps_row(made, "steps", work, contenders, **options)


def test_a_contender_that_cannot_begin_is_an_error_of_its_own() -> None:
    row = run(toy(), [REFERENCE, replace(O2, name="broken", level="O9"), O2])
    reference, broken, ours = row.contenders
    assert broken["error"].startswith("PolicyError: ") and "stats" not in broken
    assert reference["ratio"]["median"] == 1 and ours["ratio"]["median"] > 0
    assert "failed: PolicyError" in training_table("training", [row], "").to_text()


def test_a_contender_that_breaks_off_leaves_the_others_and_no_session_open() -> None:
    calls = itertools.count()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if torch.is_autocast_enabled("ipu") and next(calls) == 1:  # the marker of a region of ours
            raise torch.OutOfMemoryError("no memory\nfor 3 MiB")
        return F.mse_loss(output.float(), target)

    told: list[str] = []
    row = run(toy(loss), [FLOAT32, replace(O2, name="ours"), REFERENCE], tell=told.append)
    errors = {each["name"]: each.get("error") for each in row.contenders}
    assert errors == {"fp32": None, "ours": "OutOfMemoryError: no memory", "torch.amp fp16": None}
    (failed,) = told  # where it failed, as soon as it did
    assert failed.startswith("toy: ours failed\nTraceback") and "for 3 MiB" in failed and "in loss" in failed
    REGISTRY.uninstall()  # refuses when a session is open


def test_without_a_reference_there_are_times_and_no_ratios() -> None:
    row = run(toy(), [replace(O2, name="broken", level="O9"), FLOAT32])
    assert row.contenders[1]["ratio"] is None and row.contenders[1]["stats"]["median"] > 0
    assert row.contenders[1]["roofline"] > 0


def test_a_part_that_breaks_off_is_a_row() -> None:
    def make() -> Row:
        raise ValueError("nothing to see")

    row = run_part(Part(kind="steps", name="a", needs=0, make=make), Clock(10), lambda what: None)
    assert row.to_dict()["error"] == "ValueError: nothing to see"
    assert not goals({"training": [{**row.to_dict(), **on("NVIDIA H100")}]})[0]["met"]


def test_torchs_contenders_run_without_our_rules_in_the_dispatcher() -> None:
    seen: dict[bool, set[bool]] = {True: set(), False: set()}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen[torch.is_autocast_enabled("ipu")].add(REGISTRY.rules is not None)
        return F.mse_loss(output.float(), target)

    row = run(toy(loss), [REFERENCE, O2])
    assert not any(each.get("error") for each in row.contenders)
    assert seen == {True: {True}, False: {False}}


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(PolicyError, match="write full or tiny"):
        list(training(CPU, 1, lambda what: None, size="huge"))
    with pytest.raises(PolicyError, match="its parts are lists, eager, compiled, parity"):
        list(training(CPU, 1, lambda what: None, parts=["models"]))


# -- the clock


def test_the_clock_drops_parts() -> None:
    seconds = itertools.count(step=2.0)
    suite = replace(training, parts=partial(training.parts, contenders=[REFERENCE, O2]))
    rows = list(suite(CPU, 1, lambda what: None, size="tiny", budget=40.0, now=lambda: next(seconds)))
    dropped = [row.name for row in rows if "dropped" in row.about]
    made = [row.name for row in rows if "dropped" not in row.about]
    assert made[:2] == ["machine", "Adam, 8 x 60"]
    assert dropped[-1] == "parity, UNet" and len(made) + len(dropped) == 18 == len(rows)
    assert made == [row.name for row in rows][: len(made)]
    assert re.search(r"dropped: \d+ s of 40 s were used", training_table("training", rows, "").to_text())


@pytest.mark.parametrize(("used", "left_out"), [(440.0, False), (460.0, True)])
def test_a_part_is_dropped_when_less_is_left_than_it_needs(used: float, left_out: bool) -> None:
    moments = iter([0.0, *itertools.repeat(used, 10)])
    clock = Clock(540.0, lambda: next(moments))
    part = Part(kind="steps", name="a", needs=90, make=lambda: Row(part="steps", name="a"))
    assert ("dropped" in run_part(part, clock, lambda what: None).about) is left_out


def test_contenders_are_left_out_when_time_runs_short() -> None:
    moments = iter([0.0, 1.0, *itertools.repeat(58.0, 20)])
    row = run(toy(), [REFERENCE, O2], Clock(60.0, lambda: next(moments)), reserve=5.0)
    assert row.contenders[1]["error"] == "left out: 58 s of 60 s were used"
    assert row.contenders[0]["stats"]["rounds"] == 1  # what was begun gives one figure at least
    assert row.to_dict()["cut short"] and not complete(row.to_dict())


# -- goals


def test_graphs_are_held_against_graphs() -> None:
    found = judged(
        row_of("steps", "feed-forward", measured("torch.amp fp16", 0.010), measured("torch.amp fp16, captured", 0.0025),
               measured("preamp O2, captured", 0.0030)),
        row_of("compiled", "BERT-base b4, compiled", measured("torch.amp fp16", 0.010),
               measured("torch.amp fp16, reduce-overhead", 0.004), measured("preamp O2, reduce-overhead", 0.0038)),
    )  # fmt: skip
    captured = found[("G4", "captured step, feed-forward")]
    assert captured["met"] is True and captured["note"].startswith("both captured: x0.833")
    slowest = found[("G9", "never slower than torch.amp alike, least ratio")]
    assert slowest["measured"] == pytest.approx(0.0025 / 0.0030) and slowest["met"] is False
    assert slowest["note"] == "1 of 2 below; least: feed-forward, preamp O2, captured"


def measured(name: str, seconds: float, of: float = 0.010, **more: Any) -> dict[str, Any]:
    return {"name": name, "seconds": [seconds] * 3, "ratio": ratio([[of]] * 3, [[seconds]] * 3), **more}


def row_of(part: str, name: str, *contenders: dict[str, Any], **about: Any) -> dict[str, Any]:
    return {"part": part, "name": name, "what": "", "contenders": list(contenders), **on("NVIDIA H200"), **about}


def on(device: str) -> dict[str, Any]:
    return {"measured on": {"device": device}}


def judged(*rows: dict[str, Any], **suites: Any) -> dict[tuple[str, str], dict[str, Any]]:
    return {(g["goal"], g["what"]): g for g in goals({"training": rows, **suites})}


def test_goals_of_speed_and_memory() -> None:
    found = judged(
        row_of("optimizer", "Adam, BERT-large", measured("torch.amp fp16", 0.010), measured("preamp O2", 0.006,
               roofline=0.93), measured("torch.amp fp16, foreach", 0.018),
               measured("preamp O5, split masters, 8-bit states", 0.005)),
        row_of("steps", "BERT-large b16", measured("torch.amp fp16", 0.010, **{"peak bytes": 100}),
               measured("preamp O2", 0.0091, **{"peak bytes": 70}), measured("preamp O1", 0.0103)),
        row_of("steps", "feed-forward", measured("torch.amp fp16", 0.010), measured("preamp O2, captured", 0.002)),
        row_of("compiled", "BERT-base b32, compiled", measured("torch.amp fp16", 0.010),
               measured("torch.amp fp16, compiled", 0.0075), measured("preamp O2, compiled", 0.007)),
        row_of("steps", "UNet", measured("torch.amp fp16", 0.010), measured("torch.amp fp16, NCHW", 0.014),
               measured("preamp O2", 0.0095)),
    )  # fmt: skip
    by_name = {f"{goal} {what}": (g["measured"], g["met"]) for (goal, what), g in found.items()}
    assert by_name["G1 optimizer and casts, BERT-large"] == (pytest.approx(10 / 6), True)
    assert by_name["G1 the same with clipping"] == (None, None)
    assert by_name["G1b the same, against foreach"] == (pytest.approx(3.0), True)
    assert by_name["G1c share of copy bandwidth"] == (pytest.approx(0.93), True)
    assert by_name["G2 8-bit states"] == (pytest.approx(2.0), False)
    assert by_name["G3 step, BERT-large"] == (pytest.approx(1.0989, rel=1e-3), False)
    assert by_name["G3b compiled against eager, BERT-base b32"] == (pytest.approx(1.4286, rel=1e-3), True)
    assert by_name["G3c compiled against compiled, BERT-base b32"] == (pytest.approx(1.0714, rel=1e-3), True)
    assert by_name["G4 captured step, feed-forward"] == (pytest.approx(5.0), True)
    assert by_name["G5 UNet against NCHW"] == (pytest.approx(1.4737, rel=1e-3), False)
    assert by_name["G7 peak memory, BERT-large, O2"] == (0.7, True)
    slowest = found[("G9", "never slower than torch.amp alike, least ratio")]
    assert slowest["met"] is False and "BERT-large b16, preamp O1" in slowest["note"]


def test_goals_are_judged_device_by_device() -> None:
    def on_one(device: str, seconds: float) -> dict[str, Any]:
        return row_of(
            "optimizer", "Adam, BERT-large", measured("torch.amp fp16", 0.010), measured("preamp O2", seconds),
            **on(device),
        )  # fmt: skip

    rows = [on_one("NVIDIA H100 80GB HBM3", 0.005), on_one("NVIDIA H200", 0.010), on_one("NVIDIA L4", 0.001)]
    first = [g for g in goals({"training": rows}) if g["what"] == "optimizer and casts, BERT-large"]
    assert [(g["device"], g["measured"], g["met"]) for g in first] == [
        ("NVIDIA H100 80GB HBM3", pytest.approx(2.0), True), ("NVIDIA H200", pytest.approx(1.0), False),
        ("NVIDIA L4", pytest.approx(10.0), None),
    ]  # fmt: skip
    assert "goals for H100 and H200 only" in first[2]["note"]
    text = goals_table(goals({"training": rows})).to_text()
    assert "NVIDIA H100 80GB HBM3" in text and "NVIDIA L4" in text


def test_a_figure_has_its_interval() -> None:
    reference, ours = [[0.010]] * 7, [[0.010 / ratio] for ratio in (1.5, 1.9, 1.7, 1.6, 1.8, 1.4, 2.0)]
    row = row_of(
        "optimizer", "Adam, BERT-large", measured("torch.amp fp16", 0.010),
        {"name": "preamp O2", "seconds": [each for [each] in ours], "ratio": ratio(reference, ours)},
    )  # fmt: skip
    found = judged(row)[("G1", "optimizer and casts, BERT-large")]
    assert (found["measured"], found["low"], found["high"]) == pytest.approx((1.7, 1.4, 2.0))
    assert found["met"] is True


def test_launches_that_could_not_be_counted_meet_no_goal() -> None:
    row = row_of(
        "steps", "BERT-base b4", *(
            measured(name, 0.01, launches=None, **{"not counted": "CUPTI is not heard"})
            for name in ("preamp O2", "preamp O2, scale 1")
        ),
    )  # fmt: skip
    found = judged(row)[("G8", "kernels that scaling adds to a step")]
    assert found["met"] is None and found["measured"] is None and found["note"] == "CUPTI is not heard"


def test_goals_of_waits_and_launches() -> None:
    def rows(waits: float, launches: int) -> dict[str, Any]:
        return row_of(
            "steps", "BERT-base b4", measured("torch.amp fp16", 0.01, waits=1.0, launches=900),
            measured("preamp O2", 0.01, waits=waits, launches=launches),
            measured("preamp O2, scale 1", 0.01, waits=0.0, launches=700),
        )  # fmt: skip

    keys = ("G8", "waits a step, most of any of preamp's"), ("G8", "kernels that scaling adds to a step")
    assert [judged(rows(0.0, 704))[key]["met"] for key in keys] == [True, True]
    found = judged(rows(1.0, 705))
    assert [(found[key]["measured"], found[key]["met"]) for key in keys] == [(1.0, False), (5, False)]


def test_goals_are_written_beside_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "training.json"
    row = row_of("optimizer", "Adam, BERT-large", measured("torch.amp fp16", 0.010), measured("preamp O2", 0.005))
    path.write_text(json.dumps({"suites": {"training": [row]}}))
    main(path)
    assert json.loads(path.read_text())["goals"][0]["measured"] == pytest.approx(2.0)
    assert "optimizer and casts, BERT-large" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gap", "band", "skips", "met"),
    [(0.004, 0.0, [3], True), (0.01, 0.02, [], True), (0.01, 0.002, [], False), (0.0, 0.0, [80], False)],
)
def test_goals_of_parity(gap: float, band: float, skips: list[int], met: bool) -> None:
    row = row_of(
        "parity", "parity, UNet", {"name": "fp32", "against fp32": 0.0, "skips": []},
        {"name": "fp32, another seed", "against fp32": -band, "skips": []},
        {"name": "torch.amp fp16", "against fp32": 0.0, "skips": [0, 1]},
        {"name": "preamp O2, window", "against fp32": gap, "skips": skips}, {"name": "preamp O2", "error": "gone"},
        **{"settled after": 50},
    )  # fmt: skip
    replays = [
        {"name": "unet, 2^16", "contenders": [{"name": "backoff", "flushed": 2.0}, {"name": "window", "flushed": 1.0}]}
    ]
    found = judged(row, schedules=replays)
    assert found[("G10", "final loss against fp32, largest gap")]["met"] is met
    assert found[("G11", "skips after step 50, window schedule")]["met"] is (not any(s >= 50 for s in skips))


# -- the parts


def test_networks_have_the_sizes_of_the_protocol() -> None:
    found = {key: work.parameters for key, work in works("full").items()}
    assert found["feed-forward"] == pytest.approx(1.3e6, rel=0.02)
    assert abs(found["unet"] - 7.70e6) <= 0.1e6
    assert found["bert-base b32"] == found["bert-base b4"] == pytest.approx(110e6, rel=0.01)
    assert found["bert-large"] == pytest.approx(335e6, rel=0.01)
    assert found["resnet"] == 25_557_032


def test_operations_of_a_step() -> None:
    every = works("full")
    for key, tokens in (("bert-base b32", 32 * 128), ("bert-large", 16 * 512)):
        dense = 6 * every[key].parameters * tokens  # Kaplan et al. 2020; attention comes on top
        assert 0.98 <= every[key].flop() / dense <= 1.35, key
    assert every["resnet"].flop() == pytest.approx(3 * 2 * 4.09e9 * 128, rel=0.05)  # 4.09 GMAC a picture


def test_data_is_that_of_its_index() -> None:
    for work in works("tiny").values():
        (x, y), (again, _), (other, _) = work.data(CPU, 3), work.data(CPU, 3), work.data(CPU, 4)
        assert len(x) == len(y) == work.count and torch.equal(x, again) and not torch.equal(x, other)


@pytest.mark.parametrize("fits", [0, 8, 16, 24, 40, 56, 1000])
def test_the_largest_batch_takes_three_probes(fits: int) -> None:
    probed: list[int] = []

    def probe(size: int) -> bool:
        probed.append(size)
        return size <= fits

    assert largest(range(8, 64, 8), probe) == max((s for s in range(8, 64, 8) if s <= fits), default=0)
    assert len(probed) == 3


def test_tests_for_a_gpu_lie_where_dev_runs_them() -> None:
    root = Path(__file__).resolve().parents[1]
    marked = [p for p in root.rglob("test_*.py") if re.search(r"^[^#\n]*pytest\.mark\.gpu\b", p.read_text(), re.M)]
    elsewhere = [p.name for p in marked if p.parent != root / "gpu" and p != Path(__file__)]
    assert marked and not elsewhere, f"./dev gpu runs tests/gpu only; marked gpu: {elsewhere}"

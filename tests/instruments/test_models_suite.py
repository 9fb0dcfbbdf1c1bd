"""The suite `models`: real sizes, contenders, what fits in memory, and the report with its pictures."""

from __future__ import annotations

import copy
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch._dynamo.utils import counters
from typer.testing import CliRunner

from preamp.bench import Row
from preamp.bench._machine import DeviceLost
from preamp.bench._results import Missing, complete
from preamp.bench.models import GROUPS, NETWORKS, models
from preamp.bench.models import report as models_report
from preamp.bench.models._suite import BATCHES, COMPILED, EAGER, LOSSES, NETS
from preamp.bench.training import Contender, Trainer, Work, works
from preamp.bench.training._contenders import O2, O5_EIGHT, REFERENCE
from preamp.bench.training._largest import net_row, trains
from preamp.bench.training._parity import FP32
from preamp.cli import _bench
from preamp.cli._app import app, main
from preamp.cli._bench import run_suites
from preamp.errors import PolicyError

CPU = torch.device("cpu")
EVERY = [part.name for part in models.parts(models.run(CPU, "tiny"))]


def fits(contender: Contender, size: int) -> bool:
    """Stands for a GPU on which preamp's contenders fit twice of what torch's do, and float32 does not."""
    return size <= {REFERENCE.name: 5, FP32.name: 0}.get(contender.name, 10)


def run(names: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    """The rows of these names, in a tiny size, as JSON has them."""
    torch.set_num_threads(1)
    missing = Missing(done=frozenset(EVERY) - frozenset(names))
    suite = replace(models, parts=partial(models.parts, **options))
    rows = [row.to_dict() for row in suite(CPU, 2, lambda what: None, size="tiny", missing=missing)]
    return json.loads(json.dumps(rows, allow_nan=False))


@pytest.fixture(scope="module")
def compiled() -> tuple[dict[str, Any], tuple[int, int, int]]:
    """A row of compiled contenders; how many functions were looked at, how many graphs made, and how many breaks."""
    counters.clear()
    (row,) = run(["feed-forward, compiled"])
    return row, (counters["frames"]["total"], counters["stats"]["unique_graphs"], len(counters["graph_break"]))


@pytest.fixture(scope="module")
def graphs(compiled: tuple[dict[str, Any], tuple[int, int, int]]) -> tuple[int, int, int]:
    return compiled[1]


@pytest.fixture(scope="module")
def some(compiled: tuple[dict[str, Any], tuple[int, int, int]]) -> dict[str, dict[str, Any]]:
    """Each question asked once, of a network with Adam and of one with SGD; all searches."""
    asked = ["BERT-base b32", "SE-ResNeXt-50", "losses, GPT-2048 b4", "losses, ResNet-50"]
    asked += [name for name in EVERY if name.startswith("larg")]
    return {row["name"]: row for row in [*run(asked, fits=fits), compiled[0]]}


# -- the networks


def test_networks_have_their_real_sizes() -> None:
    every = works("full")
    assert {network.key: every[network.key].parameters for network in NETWORKS} == {
        "feed-forward": 1_313_793, "unet": 7_763_041, "bert-base b32": 109_514_298, "bert-large": 335_174_458,
        "se-resnext": 27_559_896, "resnet": 25_557_032, "gpt": 306_556_928,
    }  # fmt: skip
    deeper = every["gpt"].deeper
    assert deeper is not None
    assert deeper(5).parameters - every["gpt"].parameters == 12 * 2048**2 + 13 * 2048  # a block of width 2048


def test_a_decoder_sees_nothing_of_what_comes() -> None:
    work = works("tiny")["gpt"]
    model = work.model(CPU)
    ids, following = work.data(CPU, 0)
    assert torch.equal(ids[:, 1:], following[:, :-1])
    changed = torch.cat([ids[:, :9], (ids[:, 9:] + 1) % 64], dim=1)
    with torch.no_grad():
        logits, others = model(ids), model(changed)
    torch.testing.assert_close(logits[:, :9], others[:, :9])
    assert not torch.equal(logits[:, 9:], others[:, 9:])


# -- the parts


def test_parts_fit_in_a_call_and_are_all_asked_for() -> None:
    assert set(models.estimates()) == set(GROUPS) and max(models.estimates().values()) <= 530
    kinds = Counter(part.kind for part in models.parts(models.run(CPU)))
    assert kinds == {"steps": 7, "compiled": 7, "losses": 7, "largest batch": 7, "larger net": 2}
    assert len(set(EVERY)) == len(EVERY) == 30
    with pytest.raises(PolicyError, match="its parts are models, models-losses, models-memory"):
        list(models(CPU, 1, lambda what: None, parts=["eager"]))


def test_contenders_are_those_asked_for() -> None:
    asked = ["fp32", "tf32", "torch.amp fp16", "torch.amp bf16", *(f"preamp O{level}" for level in (1, 2, 4, 5))]
    assert {c.name for c in EAGER} == {*asked, O5_EIGHT.name}
    assert {c.name for c in COMPILED} == {f"{name}, compiled" for name in asked}
    assert all(c.compiled and not replace(c, compiled=False).compiled for c in COMPILED)
    for those in (EAGER, COMPILED, LOSSES, BATCHES, NETS):
        assert those[0].dtype is torch.float16 and not those[0].ours and those[0].fused
        assert all(c.channels_last for c in those)


def test_every_question_has_its_figures(some: dict[str, dict[str, Any]]) -> None:
    failed = [(row["name"], each) for row in some.values() for each in row["contenders"] if each.get("error")]
    assert not failed and all(complete(row) and row["size"] == "tiny" for row in some.values())
    names = {name: [each["name"] for each in row["contenders"]] for name, row in some.items()}
    assert names["BERT-base b32"] == [c.name for c in EAGER]
    assert names["SE-ResNeXt-50"] == [c.name for c in EAGER if not c.eight_bit]  # SGD has no such states
    assert names["feed-forward, compiled"] == [c.name for c in COMPILED]
    for name in ("BERT-base b32", "SE-ResNeXt-50", "feed-forward, compiled"):
        reference, *others = some[name]["contenders"]
        assert reference["ratio"]["median"] == 1 and all(each["ratio"]["low"] > 0 for each in others)
    for name in ("losses, GPT-2048 b4", "losses, ResNet-50"):
        by_name = {each["name"]: each for each in some[name]["contenders"]}
        assert by_name["fp32"]["against fp32"] == 0 and "fp32, another seed" in by_name
        for each in by_name.values():
            assert len(each["losses"]) == some[name]["steps"]
        assert by_name["preamp O2"]["losses"][0] == pytest.approx(by_name["fp32"]["losses"][0], rel=0.02)


def test_every_compiled_contender_is_compiled_whole_and_once(graphs: tuple[int, int, int]) -> None:
    made = len(COMPILED) - 1  # on a CPU fp32 and tf32 are one and share a graph
    assert graphs == (made, made, 0)  # more of a kind than dynamo keeps would run as written


# -- what fits


def test_searches_give_the_largest_that_fits(some: dict[str, dict[str, Any]]) -> None:
    row = some["largest batch, BERT-base b32"]
    assert {each["name"]: each["batch"] for each in row["contenders"]} == {
        c.name: 5 if c is REFERENCE else 0 if c is FP32 else 10 for c in BATCHES
    }  # fmt: skip
    row = some["larger net, GPT-2048 b4"]
    found = {each["name"]: (each["layers"], each["parameters"]) for each in row["contenders"]}
    deeper = works("tiny")["gpt"].deeper
    assert deeper is not None and list(found) == [c.name for c in NETS]
    assert found[REFERENCE.name] == (5, deeper(5).parameters) and found[O2.name] == (10, deeper(10).parameters)


def test_where_memory_has_no_limit_there_is_no_figure_but_a_reason() -> None:
    for row in run([name for name in EVERY if name.startswith("larg")]):
        assert not row["contenders"] and "takes a CUDA device" in row["not measured"] and complete(row)


@pytest.mark.parametrize("contender", [REFERENCE, O5_EIGHT], ids=lambda c: c.name)
def test_what_is_tried_trains(contender: Contender) -> None:
    deeper = works("tiny")["gpt"].deeper
    assert deeper is not None
    assert trains(lambda: Trainer(contender, deeper(2), CPU, count=3), CPU)


def test_out_of_memory_is_too_large_and_other_errors_are_errors() -> None:
    def work(error: Exception) -> Work:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            if len(output) > 4:
                raise error
            return F.mse_loss(output.float(), target)

        def batch(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
            return torch.ones(count, 4), torch.ones(count, 1)

        return Work(name="toy", what="", build=lambda: nn.Linear(4, 1), batch=batch, loss=loss, count=4)

    for error in (torch.OutOfMemoryError("no"), RuntimeError("GET was unable to find an engine to execute this")):
        memory = work(error)
        assert [trains(lambda n=n, w=memory: Trainer(O2, w, CPU, count=n), CPU) for n in (4, 5)] == [True, False]
    with pytest.raises(RuntimeError, match="launch failure"):
        trains(lambda: Trainer(O2, work(RuntimeError("launch failure")), CPU, count=5), CPU)

    def broken(contender: Contender, size: int) -> bool:
        if contender is O2:
            raise RuntimeError("an unspecified launch failure")
        return False

    run = models.run(CPU, "tiny")
    row = net_row(run, works("tiny")["gpt"], 1, [1, 2], [O2, REFERENCE], fits=broken)
    first, second = row.contenders
    assert first["error"] == "RuntimeError: an unspecified launch failure"
    assert second == {"name": REFERENCE.name, "layers": 0}


# -- the report


def test_the_report_shows_every_answer(some: dict[str, dict[str, Any]]) -> None:
    rows = [{**copy.deepcopy(row), "measured on": {"commit": "abc"}} for row in some.values()]
    for each in rows[0]["contenders"]:
        each["peak bytes"] = 2**30
    made = models_report(rows, {"cpu": "a small machine"})
    assert made.verdict == "Tiny networks on a small machine: the suite works; this says nothing about speed."
    text, page = made.to_text(), made.to_html()
    titles = [section.title for section in made.sections]
    assert titles[:2] == ["Overview", "In the same memory"] and "GPT-2048 b4" in titles
    assert set(chart_titles(made)) >= {
        "Larger net in the same memory", "Largest batch in the same memory", "Training steps, eager",
        "Training steps, compiled", "Peak memory, eager", "BERT-base b32: peak memory", "GPT-2048 b4: training loss",
    }  # fmt: skip
    assert "commit abc" in text
    batches = next(line for line in text.splitlines() if line.startswith("UNet   ") and "none" in line)
    assert batches.split() == ["UNet", "none", "5", "10", "10", "10"]
    (chart,) = (item for item in made.sections[1].items if getattr(item, "value_label", "").startswith("largest batch"))
    assert {bars.name: bars.values[0] for bars in chart.series} == {
        REFERENCE.name: 1, O2.name: 2, "preamp O5": 2, O5_EIGHT.name: 2
    }  # fmt: skip
    assert page.count("<svg") == 2 * page.count("The numbers of this chart") and "Difference from fp32" in page
    assert "http://" not in re.sub(r"xmlns=\S+", "", page)
    assert '"samples"' not in page and '"losses"' in page


def chart_titles(made: Any) -> list[str]:
    found = [item for section in made.sections for item in section.items]
    return [item.title for item in found if type(item).__name__ in ("BarChart", "LineChart")]


def full(name: str, contender: str, ratio: float) -> dict[str, Any]:
    """A row of the full size with a reference and one other."""

    def each(who: str, times: float) -> dict[str, Any]:
        found = {"median": times, "low": times - 0.1, "high": times + 0.1}
        return {"name": who, "ratio": found, "seconds": [0.01 / times] * 7}

    contenders = [each(REFERENCE.name, 1.0), each(contender, ratio)]
    return {"name": name, "what": "", "parameters": 7, "contenders": contenders, "size": "full"}


def test_the_verdict_is_of_what_was_measured() -> None:
    where = {"gpu": "NVIDIA H100"}
    rows = [full("UNet", O2.name, 0.97), full("BERT-large b16", O2.name, 1.214)]
    assert models_report(rows, where).verdict == (
        "On NVIDIA H100 an eager training step of preamp O2 is 0.97 (UNet) to 1.21 (BERT-large b16) times as fast as "
        "torch.amp fp16, over 2 networks."
    )
    assert "was measured on NVIDIA H100" in models_report([], where).verdict
    broken = {"name": "UNet", "error": "begun", "measured on": {}}
    late = {"name": "ResNet-50, compiled", "dropped": "no time"}
    lost = {**full("UNet, compiled", O2.name, 1.0), "contenders": [{"name": O2.name, "error": "gone"}]}
    chart: Any = models_report(rows, where).sections[0].items[0]
    (bars,) = chart.series
    assert chart.labels == ("UNet", "BERT-large b16") and bars.values == (0.97, 1.214)
    assert bars.low == pytest.approx((0.87, 1.114)) and bars.high == pytest.approx((1.07, 1.314))
    made = models_report([broken, late, lost], where)
    assert "was measured on NVIDIA H100" in made.verdict
    for said in ("failed: begun", "dropped: no time", "gone"):
        assert said in made.to_html()


def test_a_loss_that_is_not_finite_is_a_gap() -> None:
    runs = [("fp32", [2.0, 1.0, 0.5]), (O2.name, [2.0, None, None]), ("fp32, another seed", [2.0, 1.0, 1.0])]
    contenders = [
        {"name": name, "losses": losses, "loss": losses[-1], "against fp32": 0.0 if losses[-1] else None, "skips": []}
        for name, losses in runs
    ]  # fmt: skip
    made = models_report([{"name": "losses, UNet", "what": "3 steps", "contenders": contenders}], {"cpu": "a"})
    assert "2 not finite" in made.to_text() and "<svg" in made.to_html()


# -- the command


def command(monkeypatch: pytest.MonkeyPatch, suite: Callable[..., Any]) -> None:
    monkeypatch.setitem(_bench.SUITES, "models", suite)


def test_a_run_that_breaks_off_leaves_its_report_and_is_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [True]

    def suite(device: torch.device, rounds: int, tell: Any, *, missing: Missing, **_: Any) -> Any:
        for name in missing.of(["UNet", "ResNet-50"], str):
            if name == "ResNet-50" and lost:
                raise DeviceLost("gone")
            row = full(name, O2.name, 1.5)
            yield Row(part="steps", name=name, contenders=row["contenders"])

    command(monkeypatch, suite)
    console = Console(file=io.StringIO())
    with pytest.raises(DeviceLost):
        run_suites(["models"], 3, "cpu", tmp_path / "a", console)
    page = (tmp_path / "a" / "report.html").read_text()
    assert "over 1 networks" in page and "ended before it was measured" in page
    lost.clear()
    run_suites(["models"], 3, "cpu", tmp_path / "b", console, earlier=[tmp_path / "a"])
    assert "over 2 networks" in (tmp_path / "b" / "report.html").read_text()
    again = ["bench", "--report", str(tmp_path / "b" / "results.json"), "--out", str(tmp_path / "c")]
    assert CliRunner().invoke(app, again).exit_code == 0
    assert "over 2 networks" in (tmp_path / "c" / "report.html").read_text()


def test_parts_go_to_the_suite_that_has_them() -> None:
    assert _bench._own("models", ["lists", "models"]) == ["models"]
    assert _bench._own("training", ["lists", "models", "nothing"]) == ["lists", "nothing"]
    assert _bench._own("training", None) is None


def test_a_lost_device_ends_the_command_so_that_it_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise DeviceLost("the device fails")

    monkeypatch.setattr("preamp.cli._app.app", lost)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 75


@pytest.mark.parametrize("content", ["", "{}", '{"suites": {"training": []}}'])
def test_what_is_no_result_has_no_report(content: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content)
    done = CliRunner().invoke(app, ["bench", "--report", str(tmp_path / "results.json"), "--out", str(tmp_path)])
    assert "is no results.json of a bench" in str(done.exception)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_all_of_it_in_a_tiny_size() -> None:
    rows = run(EVERY, fits=fits)
    assert len(rows) == len(EVERY)
    assert not [(row["name"], each) for row in rows for each in row["contenders"] if each.get("error")]
    made = models_report(rows, {"cpu": "a small machine"})
    assert len(made.sections) == 2 + len(NETWORKS)

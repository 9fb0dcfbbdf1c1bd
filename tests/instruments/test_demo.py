"""The demo, run for real on the smallest network, and what it writes."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console
from typer.testing import CliRunner

from preamp.cli._app import app
from preamp.demo import Results, build, judge, make_plan, results_dict, schema
from preamp.demo._report import quality_chart, scale_chart
from preamp.demo._run import Bars
from preamp.demo._trial import Trial
from preamp.errors import PreampError

runner = CliRunner()


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    done = runner.invoke(app, ["demo", "--quick", "-m", "flights", "--device", "cpu", "--out", str(folder)])
    assert done.exit_code == 0, done.output
    assert "report:" in done.output
    # in a pipe a line a run, and no bars
    assert len(re.findall(r"^  O\d seed \d: loss", done.output, re.MULTILINE)) == 5
    assert re.search(r"O1 seed 0: .* ms/step; about \d+ s left$", done.output, re.MULTILINE)
    assert "\x1b" not in done.output and len(done.output.splitlines()) < 30
    return folder


def test_a_terminal_shows_all_steps_and_the_time_left() -> None:
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        with Bars(console, 300) as bars:
            with bars.of("a run that ends early", 200) as at:
                for step in range(1, 101):
                    at(step, f"loss {1 / step:.2f}")
                bars.progress.refresh()
            with bars.of("the last one", 100) as at:
                at(40, "loss 0.20")
                bars.progress.refresh()
                left = bars.left
        text = re.sub("\x1b\\[[0-9;]*m", "", console.file.getvalue())  # colours
        text = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "\n", text)  # moves of the cursor
        lines = [" ".join(line.replace("\u2501", "").split()) for line in text.splitlines() if line.strip()]
        if not terminal:
            assert not lines and re.fullmatch(r"; about \d+ s left", left)
            continue
        assert not left, "the bars tell it"
        assert any(re.fullmatch(r"all \S* ?240/300 \d:\d\d:\d\d left", line) for line in lines)  # 200 of them are over
        assert any("a run that" in line and "100/200" in line and "loss 0.01" in line for line in lines)


def test_the_steps_of_all_runs_are_known_before() -> None:
    plan = make_plan(["flights"], "O0,O1,O5", "ci", True, 2, "cpu")
    task = plan.tasks[0]
    assert plan.steps(task) == 3 * 2 * plan.recipe(task).steps


def test_results_follow_the_published_schema(flights: Path) -> None:
    results = json.loads((flights / "results.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(results, schema())
    assert [run["level"] for run in results["runs"]] == ["O0", "O1", "O2", "O4", "O5"]
    assert all(run["complete"] for run in results["runs"])


def test_runs_show_what_was_promised(flights: Path) -> None:
    page = (flights / "report.html").read_text()
    assert all(words in page for words in ("Feed-forward on NYC flights", "training loss"))
    assert "loss scale</" not in page, "at no level did it change: a flat line says nothing"
    results = json.loads((flights / "results.json").read_text())
    runs = {run["level"]: run for run in results["runs"]}
    assert runs["O0"]["dtypes"].keys() == {"fp32"}
    assert runs["O5"]["dtypes"].keys() == {"bf16"}
    assert "bf16" in runs["O4"]["dtypes"] and "fp16" in runs["O1"]["dtypes"]
    for level in ("O1", "O2"):
        assert runs[level]["scales"][0] == 65536.0
    for run in runs.values():
        assert 0.6 < run["quality"] < 0.8, "AUC of a feed-forward network on these flights"
        assert run["losses"][0] > run["final_loss"]
        assert len(run["losses"]) == len(run["scales"]) == len(run["step_ms"]) == run["steps"]
    assert runs["O4"]["peak_bytes"] < runs["O0"]["peak_bytes"]
    for level in ("O1", "O2", "O4", "O5"):
        assert runs[level]["losses"][0] == pytest.approx(runs["O0"]["losses"][0], rel=2e-2)


def interruptible() -> None:
    """A shell that runs tests in the background has SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_before_time_leaves_a_valid_partial_report(tmp_path: Path, signal_number: int) -> None:
    command = [sys.executable, "-m", "preamp", "demo", "-m", "flights", "--seeds", "50", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, preexec_fn=interruptible
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if "O0 seed 1" in line:
                break
        time.sleep(0.3)  # well inside the next run
        run.send_signal(signal_number)
        rest = run.stdout.read()
    killed = signal_number == signal.SIGKILL
    assert run.returncode == (-signal.SIGKILL if killed else 130), rest
    assert killed or "Not finished" in rest
    results = json.loads((tmp_path / "results.json").read_text())
    jsonschema.validate(results, schema())
    assert results["interrupted"]
    assert sum(r["complete"] for r in results["runs"]) >= 2
    assert "Not finished" in (tmp_path / "report.html").read_text()
    assert not [*tmp_path.glob("*.part")]


def results_of(qualities: dict[str, list[float]], seeds: int) -> Results:
    plan = make_plan(["flights"], "O0,O4", "ci", True, seeds, "cpu")
    told = dict.fromkeys(("preamp", "torch", "python", "cpu", "commit"), "x")
    results = Results(plan=plan, environment=told, interrupted=False)
    results.environment |= {"threads": 1, "device": "cpu"}
    for level, values in qualities.items():
        for seed, quality in enumerate(values):
            results.trials.append(
                Trial(task="flights", level=level, seed=seed, steps=2, batch_size=2, parameters=3, losses=[2.0, 1.0],
                      scales=[1.0, 1.0], step_ms=[1.0, 1.0], quality=quality, dtypes={"fp32": 1}, complete=True)
            )  # fmt: skip
    return results


@pytest.mark.parametrize(
    ("quality", "verdict", "status"),
    [(0.5, "below the band", "warning"), (0.65, "within the band", "good"), (0.8, "above the band", "good")],
)
def test_judgement_by_the_band_of_float32_seeds(quality: float, verdict: str, status: str) -> None:
    results = results_of({"O0": [0.6, 0.7, 0.65], "O4": [quality] * 3}, 3)
    (judgement,) = judge(results, results.plan.tasks[0])
    assert (judgement.low, judgement.high, judgement.verdict) == (0.6, 0.7, verdict)
    report = build(results)
    assert report.mood == status
    assert ("below" in report.verdict) == (verdict == "below the band")
    jsonschema.validate(results_dict(results), schema())


def test_one_seed_is_not_below_by_rounding() -> None:
    said = build(results_of({"O0": [0.6002], "O4": [0.6001]}, 1)).verdict
    assert said == "1 network trained with one seed, too few for a band; in three digits no level is below float32."
    said = build(results_of({"O0": [0.602], "O4": [0.601]}, 1)).verdict
    assert said.endswith("furthest below float32 is flights O4: AUC 0.601 against 0.602.")


def test_equal_means_are_no_bar() -> None:
    """Not one of 1e-16: the same three qualities in another order."""
    results = results_of({"O0": [0.1, 0.2, 0.3], "O4": [0.3, 0.1, 0.2]}, 3)
    chart = quality_chart(results, judge(results, results.plan.tasks[0]))
    assert chart is not None and [str(value) for bars in chart.series for value in bars.values] == ["0.0", "0.0"]


def test_a_scale_is_shown_where_it_changes() -> None:
    results = results_of({"O0": [0.6], "O4": [0.6]}, 1)
    results.trials[1].scales = [512.0, 512.0]
    assert scale_chart(results, results.plan.tasks[0]) is None
    results.trials[1].scales = [512.0, 256.0]
    chart = scale_chart(results, results.plan.tasks[0])
    assert chart is not None and [series.name for series in chart.series] == ["O4"]


def test_a_run_without_a_finite_loss_still_reports() -> None:
    results = results_of({"O0": [0.6], "O4": [0.6]}, 1)
    results.trials[1].losses = [math.nan, math.inf]
    jsonschema.validate(results_dict(results), schema())
    assert "<td" in build(results).to_html() and "inf" in build(results).to_text()


@pytest.mark.slow
def test_what_cannot_be_run_is_told() -> None:
    for arguments, message in (
        ((["resnet"], None, "ci", True, 1, "cpu"), "no model 'resnet'"),
        ((None, "O7", "ci", True, 1, "cpu"), "no level 'O7'"),
        ((None, ",", "ci", True, 1, "cpu"), "no level"),
        ((None, None, "huge", True, 1, "cpu"), "no size 'huge'"),
        ((None, None, "ci", True, 0, "cpu"), "at least one seed"),
        ((None, None, "ci", True, 1, "tpu9"), "--device tpu9"),
    ):
        with pytest.raises(PreampError, match=message):
            make_plan(*arguments)
    assert make_plan(None, "fp32,bf16-mixed,O4", "ci", False, None, "cpu").levels == ("O0", "O4")

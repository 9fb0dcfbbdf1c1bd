"""`preamp compare`: unchanged scripts, as they are and in full precision."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from preamp.doctor.command.run import time_left
from preamp.doctor.tell.comparison import Ran, build_comparison
from preamp.doctor.tell.report import schema
from preamp.report import LineChart, Table

from .. import forks

SICK = Path(__file__).parents[1] / "sick" / "scripts" / "fourier_phase.py"

SEEDED = """
import random, sys
import numpy as np, torch
from torch import nn

random.seed(3); np.random.seed(4); torch.manual_seed(5)
rng = np.random.default_rng(6)
print(random.random(), np.random.rand(), torch.rand(()).item(), rng.random())
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=AMP):
        loss = model(torch.randn(64, 8)).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"val_loss: {loss.item():.6f}")
if len(sys.argv) > 1:
    open(sys.argv[1], "w").write("done")
"""

STYLES = {
    "autocast": """
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
with torch.autocast("cpu", torch.float16):
    out = model(x)
seen = [out.dtype]
loss = out.float().square().mean()
scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
""",
    "casts": """
model = model.bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
out = model(x.to(torch.bfloat16)); model.to(dtype=torch.float16)
seen = [out.dtype, x.half().dtype, x.type(torch.HalfTensor).dtype, x.to(out).dtype, model.weight.dtype]
out.float().square().mean().backward(); optimizer.step()
""",
    "factories": """
model = nn.Linear(8, 4, dtype=torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(3, 8, dtype=torch.bfloat16)
out = model(x) * torch.tensor(2.0, dtype=torch.bfloat16) + x.new_zeros(1, dtype=torch.half)
script = torch.jit.script(nn.Linear(4, 4))
seen = [out.dtype, torch.zeros_like(x, dtype=torch.half).dtype, out.sum(dtype=torch.half).dtype, script(out).dtype]
assert torch.tensor([16256], dtype=torch.int16).view(torch.bfloat16).item() == 1.0, "the same bits"
out.float().square().mean().backward(); optimizer.step()
""",
    "preamp": """
import preamp
session = preamp.prepare(model, optimizer, level="O2", scale="dynamic")
with session.autocast():
    out = model(x)
seen = [model.weight.dtype, out.dtype]
session.backward(out.float().square().mean()); session.step()
""",
    "apex": """
from apex import amp
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
out = model(x)
seen = [model.weight.dtype, out.dtype]
with amp.scale_loss(out.float().square().mean(), optimizer) as scaled:
    scaled.backward()
optimizer.step()
""",
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="bf16", cpu=True)
inner = model
model, optimizer = accelerator.prepare(nn.Sequential(inner), optimizer)
seen = []
inner.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
accelerator.backward(model(x).float().square().mean()); optimizer.step()
""",
}
HEAD = "import torch\nfrom torch import nn\ntorch.manual_seed(0)\nmodel = nn.Linear(8, 4)\nx = torch.randn(3, 8)\n"
HEAD += "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"


def compare(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    out = folder / "out"
    ran = forks.run(["-m", "preamp", "compare", "--out", str(out), *arguments], timeout=300, cwd=folder)
    content = {}
    if (out / "compare.json").exists():
        content = json.loads((out / "compare.json").read_text())
        jsonschema.validate(content, schema("compare"))
        assert (out / "compare.html").read_text().startswith("<!DOCTYPE html>")
    return ran, content


@pytest.mark.slow
def test_pairs_share_their_seed_and_others_do_not(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SEEDED.replace("AMP", "True"))
    ran, content = compare(tmp_path, "--seeds", "2", "train.py", str(tmp_path / "{run}.txt"))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""
    assert {path.stem for path in tmp_path.glob("*.txt")} == {"mixed-0", "full-0", "mixed-1", "full-1"}
    runs = {run["name"]: run for run in content["runs"]}
    assert [run["losses"][0] for run in runs.values()] == pytest.approx(
        [runs["full-0"]["losses"][0]] * 2 + [runs["full-1"]["losses"][0]] * 2, rel=1e-2
    )
    assert runs["mixed-0"]["losses"] != runs["full-0"]["losses"]
    assert abs(runs["full-0"]["losses"][0] - runs["full-1"]["losses"][0]) > 1e-3
    assert set(runs["full-0"]["metrics"]) == {"val_loss"}
    assert content["result"] in ("equivalent", "undecided")
    assert not content["findings"]


@pytest.mark.slow
def test_full_precision_has_nothing_to_compare(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SEEDED.replace("AMP", "False"))
    ran, content = compare(tmp_path, "--seeds", "1", "train.py")
    assert ran.returncode == 0, ran.stderr
    assert content["result"] == "identical"
    assert [finding["code"] for finding in content["findings"]] == ["PA109"]


@pytest.mark.slow
def test_a_loss_that_16_bits_spoil_is_found_with_its_module(tmp_path: Path) -> None:
    ran, content = compare(tmp_path, "--seeds", "2", str(SICK))
    assert ran.returncode == 3, ran.stderr
    (finding,) = content["findings"]
    assert (finding["code"], finding["severity"], finding["module"]) == ("PA206", "error", "features")
    assert finding["fix"] == "# PA114 at fourier_phase.py:16 says what to write: preamp doctor"
    assert "Worse" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "style", [pytest.param(s, marks=() if s in ("autocast", "preamp") else pytest.mark.slow) for s in STYLES]
)
def test_every_way_to_ask_for_16_bits_is_answered_with_32(style: str, tmp_path: Path) -> None:
    text = HEAD + STYLES[style] + "\nopen(__import__('sys').argv[1], 'w').write(' '.join(map(str, seen)))\n"
    (tmp_path / "train.py").write_text(text)
    ran, content = compare(tmp_path, "--seeds", "1", "train.py", str(tmp_path / "{run}.txt"))
    assert ran.returncode == 0, ran.stderr
    assert set((tmp_path / "full-0.txt").read_text().split()) == {"torch.float32"}
    assert set((tmp_path / "mixed-0.txt").read_text().split()) & {"torch.float16", "torch.bfloat16"}
    assert content["runs"][1]["metrics"] == {}


@pytest.mark.slow
def test_a_script_that_never_steps_or_fails_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("import torch\nprint('nothing')\n")
    ran, _ = compare(tmp_path, "none.py")
    assert ran.returncode == 2
    assert "without a training step, so there is nothing to compare. Give the script that trains" in ran.stderr
    (tmp_path / "bad.py").write_text("import torch\nraise RuntimeError('no data')\n")
    ran, _ = compare(tmp_path, "bad.py")
    assert ran.returncode == 2
    assert "ended with status 1" in ran.stderr
    assert "no data" in ran.stderr
    ran, _ = compare(tmp_path, "gone.py")
    assert ran.returncode == 2
    assert "there is no script" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False])
def test_runs_that_fail_midway_are_said_to(tmp_path: Path, alone: bool) -> None:
    when = "step == 4 and AMP and loss.dtype is torch.bfloat16" if alone else "step == 4"
    script = SEEDED.replace("AMP", "True").replace(".float().square().mean()", ".square().mean()")
    script = script.replace(
        "    optimizer.step()\n", f"    optimizer.step()\n    if {when}:\n        raise ValueError('boom')\n"
    )
    (tmp_path / "fails.py").write_text(script.replace("AMP", "True"))
    ran, content = compare(tmp_path, "--seeds", "1", "fails.py")
    assert ran.returncode == (3 if alone else 1)
    failed = 1 if alone else 2
    assert f"{failed} of 2 runs failed, and only steps that both runs of a pair made are compared" in content["verdict"]
    assert "(mixed-0 ended with status 1 after 5 steps: ValueError: boom). " in content["verdict"]
    assert "Mend these runs first" in (tmp_path / "out" / "compare.html").read_text()


def test_the_table_says_what_was_compared_and_the_chart_over_which_seeds() -> None:
    losses = [3.0, 2.0, 1.0]
    runs = [Ran("mixed-0", False, 0, 0, 1.0, [3.5, math.nan, math.nan], 0, precision="bf16 products")]
    runs += [Ran("full-0", True, 0, 0, 1.0, losses, 0), Ran("mixed-1", False, 1, 0, 1.0, [5.0, 4.0, 1.5], 0)]
    runs += [Ran("full-1", True, 1, 0, 1.0, losses, 0), Ran("full-2", True, 2, 0, 1.0, [9.0] * 3, 0)]
    report, content = build_comparison(runs, None, ["train.py"])
    notes = next(item for item in report.sections[0].items if isinstance(item, Table)).notes
    assert "mixed is what the script runs: bf16 products; full is the same in float32" in notes
    assert any("at least 0.5% of the loss, or 2 standard deviations" in note for note in notes)
    assert content["environment"]["mixed precision"] == "bf16 products"
    chart = report.picture
    assert isinstance(chart, LineChart)
    assert [list(series.y) for series in chart.series] == [[4.25, 4.0, 1.5], [3.0, 2.0, 1.0]], (
        "no seed without its pair"
    )
    assert [(span.start, span.end, span.label) for span in chart.spans] == [(1, 3, "2 steps not finite in a row")]
    given, _ = build_comparison(runs[2:4], 0.01, ["train.py"])
    assert "does not matter: 1.0% of the loss" in given.to_text()


def test_the_time_left_is_told_by_precision() -> None:
    def ran(full: bool, seconds: float) -> Ran:
        return Ran("", full, 0, 0, seconds, [1.0], 0)

    assert time_left([], 6) == ""
    assert time_left([ran(False, 10)], 6) == "; about 50 s left"  # full precision is not known yet
    assert time_left([ran(False, 10), ran(True, 110)], 6) == "; about 4 min left"
    assert time_left([ran(False, 10), ran(True, 7200), ran(False, 10)], 6) == "; about 4 h left"
    assert time_left([ran(False, 0.1)] * 3 + [ran(True, 0.1)] * 2, 6) == "; about 1 s left"

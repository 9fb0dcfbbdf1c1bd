"""What a plan refuses, the verb, and that the page about it shows what is printed."""

from __future__ import annotations

import doctest
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import preamp
from preamp.cli._app import app
from preamp.errors import OptimizerError, PolicyError, PreampError, SessionError
from preamp.plan import plan

from .test_plan import SHADOWS, build, needs_shadows

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("params", "asked", "kind", "message"),
    [
        (-7e9, {}, PreampError, "no number of parameters"),
        ("0", {}, PreampError, "whole number"),
        (0.5, {}, PreampError, "whole number"),
        (math.inf, {}, PreampError, "no number"),
        (math.nan, {}, PreampError, "no number"),
        ("1e999", {}, PreampError, "whole number"),
        ("seven", {}, PreampError, "no number"),
        (True, {}, PreampError, "no number"),
        ("7B", {"world": 0}, PreampError, "one rank or more"),
        ("7B", {"world": 2.0}, PreampError, "one rank or more"),
        ("7B", {"world": 2}, PreampError, "train apart"),
        ("7B", {"units": 0}, PreampError, "one unit or more"),
        ("7B", {"shard": "fsdp"}, PreampError, "write none, ddp, fsdp2, zero1"),
        ("7B", {"optimizer": "adamax"}, PreampError, "adamw"),
        ("7B", {"optimizer": "torch.lamb"}, PreampError, "adamw"),
        ("7B", {"norm_share": 1.0}, PreampError, "norm_share"),
        ("7B", {"norm_share": math.nan}, PreampError, "norm_share"),
        ("7B", {"reduce": "int8"}, PreampError, "reduce"),
        ("7B", {"reduce": "fp64"}, PreampError, "reduce"),
        ("7B", {"reshard": False}, PreampError, "no such choice"),
        ("7B", {"shard": "ddp", "reduce": "bf16"}, PreampError, "no such choice"),
        ("7B", {"shard": "fsdp2", "bucket_view": True}, PreampError, "no such choice"),
        ("7B", {"level": "O9"}, PolicyError, "there is no level 'O9'"),
        ("7B", {"level": "O5; head -> full"}, PolicyError, "give the model"),
        ("7B", {"level": "O2", "master": "split"}, PolicyError, "bfloat16"),
        ("7B", {"level": "O4", "master": "split"}, PolicyError, "nothing to split"),
        ("7B", {"level": "O3", "master": "float32"}, PolicyError, "masters=yes"),
        ("7B", {"level": "O5", "master": "none"}, PolicyError, "masters=no"),
        ("7B", {"level": "O5", "optimizer": "lamb", "master": "split"}, OptimizerError, "LAMB with master='split'"),
        ("7B", {"optimizer": "torch.adamw", "states": "8bit"}, OptimizerError, "preamp.optim"),
        ("7B", {"optimizer": "sgd", "states": "8bit"}, OptimizerError, "adam and adamw"),
        ("7B", {"level": "O5", "rounding": "stochastic"}, OptimizerError, "masters lose nothing"),
        ("7B", {"level": "O2", "shadow": True}, PolicyError, "use level='O1' or 'O4'"),
        ("7B", {"level": "O4", "shadow": True, "optimizer": "torch.sgd"}, PolicyError, "only the optimizers of preamp"),
        ("7B", {"level": "O4", "shadow": True, "shard": "ddp"}, PolicyError, "parallel wrapper"),
        ("7B", {"level": "O4", "shadow": True, "shard": "zero1"}, PolicyError, "ZeroRedundancyOptimizer"),
        ("7B", {"level": "O4", "shadow": True, "shard": "fsdp2"}, PolicyError, "casts none"),
        ("7B", {"level": "O5", "shard": "zero1", "optimizer": "torch.adamw"}, SessionError, "whole on every rank"),
        ("7B", {"level": "O5", "shard": "fsdp2", "master": "split"}, PolicyError, "masters themselves"),
    ],
)
def test_what_cannot_be_is_one_clear_error(params: Any, asked: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        plan(params, **asked)


def test_float32_parameters_are_their_own_masters() -> None:
    assert plan("7B", level="O4", master="float32").rows == plan("7B", level="O4").rows


def test_the_verb_prints_and_writes(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["plan", "--params", "7e9", "--level", "O5", "--world", "64", "--shard", "fsdp2", "--json",
              str(tmp_path / "p.json")],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    told = json.loads((tmp_path / "p.json").read_text())
    assert told["schema"] == "preamp-plan/1" and told["total"] == 7 * 10**9 * 16 // 64
    assert told == plan(7e9, level="O5", world=64, shard="fsdp2").to_json()
    for row in told["rows"]:
        assert row["kind"] in done.output and row["formula"] in done.output
    assert "Not planned: activations" in done.output and "reduce_dtype=fp32" in done.output


def test_the_verb_leaves_a_report_with_other_ways(tmp_path: Path) -> None:
    line = ["plan", "--params", "7B", "--level", "O4", "--world", "8", "--shard", "ddp", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0 and "plan.html" in done.output
    page = (tmp_path / "plan.html").read_text()
    made = plan("7B", level="O4", world=8, shard="ddp")
    assert f"Each of 8 ranks holds {made.total / 2**30:,.2f} GiB" in page
    assert json.loads((tmp_path / "plan.json").read_text()) == made.to_json()
    (paste,) = re.findall(r'aria-label="text to paste">(.+?)</pre>', page)
    assert paste == "preamp plan --params 7B --world 8 --shard ddp --level O5 --master split --states 8bit"
    assert CliRunner().invoke(app, paste.split()[1:]).exit_code == 0
    smallest = ["plan", "--params", "7B", *paste.split()[4:], "--out", str(tmp_path)]
    assert CliRunner().invoke(app, smallest).exit_code == 0
    assert "prepare(model, optimizer, level=&#34;O5&#34;)" in (tmp_path / "plan.html").read_text()


def test_the_verb_counts_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planned_net.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Linear(10**6, 10**6)\nnot_one = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    done = CliRunner().invoke(app, ["plan", "--model", "planned_net:build", "--level", "O5"])
    assert done.exit_code == 0 and f"{10**12 + 10**6:,} parameters at O5" in done.output
    assert sys.path == before
    for wrong, message in {
        "planned_net": "module:name", "planned_net:nothing": "AttributeError", "no_such_net:x": "ModuleNotFoundError",
        "planned_net:not_one": "gave an int",
    }.items():  # fmt: skip
        error = CliRunner().invoke(app, ["plan", "--model", wrong]).exception
        assert isinstance(error, PreampError) and message in str(error)
    for both in ([], ["--params", "7B", "--model", "planned_net:build"]):
        assert "how large" in str(CliRunner().invoke(app, ["plan", *both]).exception)


def test_the_examples_of_the_page_are_what_is_printed() -> None:
    blocks = re.findall(r"```console\n\$ preamp (plan .+)\n([\s\S]+?)```", PAGE)
    assert len(blocks) == 2
    for line, shown in blocks:
        done = CliRunner().invoke(app, line.split())
        assert done.exit_code == 0 and done.output == shown


def test_the_table_of_the_page_is_planned() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (?:`(.+?)`)? ?\| ([\d.]+) \|$", PAGE, re.M)
    assert len(rows) == 8
    for level, options, wanted in rows:
        asked = eval(f"dict({options})")
        if "shadow" in asked and not SHADOWS:
            continue
        assert f"{plan(2**30, level=level, **asked).total / 2**30:.2f}" == wanted


def test_doctest() -> None:
    from preamp.plan import _plan

    result = doctest.testmod(_plan)
    assert result.attempted and not result.failed


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PolicyError, match="no module matches"):
        plan(build(), level="O2; 99 -> bf16")
    with pytest.raises(PolicyError, match="not planned"):
        plan(build(), level="O4; 3 -> full", shard="fsdp2")
    with pytest.raises(PolicyError, match="lazy"):
        plan(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(PolicyError, match=r"remove .half\(\)"):
        plan(build().half(), level="O4")
    with pytest.raises(PreampError, match="no parameters"):
        plan(nn.ReLU())
    with pytest.raises(PreampError, match="norm_share"):
        plan(build(), norm_share=0.1)
    model = build()
    with (
        preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level="O5"),
        pytest.raises(SessionError, match="already prepared"),
    ):
        plan(model)


@needs_shadows
def test_a_plan_may_be_made_while_a_session_is_open() -> None:
    model = build()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="O1; op softmax -> low") as session:
        assert plan("7B", level="O4", shadow=True).bytes_of("shadows") == 14 * 10**9
        with session.autocast():
            assert model(torch.randn(4, 64)).dtype is torch.float16

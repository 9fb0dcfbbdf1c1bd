"""A fix that the doctor prints is one that cures: it is pasted into the script, which is run again. And its text."""

from __future__ import annotations

import math
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from preamp.doctor.places import Place
from preamp.doctor.shadow.remedies import Remedy, candidates, run_kept
from preamp.doctor.shadow.source import Function, Reading, Readings, in_float32, read_in
from preamp.doctor.statements import default_of, frame_of, going_on_in_float32, statement_at  # fmt: skip

from .. import forks
from ..sick.expect import HERE, disease, doctor
from .pasting import pasted

EVERY_TIME = frozenset({"arc_margin", "bins_of_rounded_returns", "cosine_of_an_empty_row", "normalize_of_zeros"})
"""The others take minutes together and run with `./dev test --all`."""
WITH_FIX = (
    "arc_margin", "bins_of_rounded_returns", "checkpointed_gelu_by_hand", "cosine_of_an_empty_row",
    "degrees_counted_in_bf16", "entropy_of_half", "epsilon_under_a_root", "gumbel_in_half", "hmm_forward",
    "isolated_nodes", "kl_of_half_logprobs", "linear_attention_overflow", "linear_biases_in_bf16",
    "log1p_of_clamped", "minmax_of_equal_scores", "mish_by_hand", "mmd_of_expanded_distances", "narrow_policy",
    "normalize_of_zeros", "quiet_channel_quantized", "rotary_in_bf16", "sampled_coordinates",
    "sampler_of_bf16_alphas", "sinkhorn_by_hand", "squashed_action", "ssim_in_region", "static_scale_on_half_loss",
    "sum_of_squares_by_einsum", "variance_squared_to_zero",
)  # fmt: skip

KEPT = {"cosine_of_an_empty_row": "1e-8", "epsilon_under_a_root": "1e-8"}
"""Epsilons that are right in float32, and that a fix leaves as they are."""


def printed(out: str) -> list[float]:
    """The first number with a point of each line that a script printed: its loss."""
    found = [re.search(r"(?<![\w.])-?(?:\d+\.\d+(?:e[+-]?\d+)?|nan|inf)(?![\w.])", line) for line in out.splitlines()]
    return [float(one[0]) for one in found if one is not None]


def _parameters() -> list[Any]:
    return [pytest.param(one, marks=[] if one in EVERY_TIME else [pytest.mark.slow]) for one in WITH_FIX]


@pytest.mark.parametrize("name", _parameters())
def test_a_pasted_fix_cures(name: str, tmp_path: Path) -> None:
    script = HERE / "scripts" / f"{name}.py"
    wanted, text = disease(script), script.read_text(encoding="utf-8")
    report, _ = doctor(script, tmp_path / "sick")
    (finding, *_) = [one for one in report["findings"] if wanted.met_by(one) and "\n# tried: " in (one["fix"] or "")]
    assert finding["evidence"]["tried"] in finding["fix"] and "-> inf" not in finding["fix"]
    assert name not in KEPT or KEPT[name] in finding["fix"]

    cured = tmp_path / "cured.py"
    cured.write_text(pasted(text, finding["line"], finding["fix"]), encoding="utf-8")
    again, after = doctor(cured, tmp_path / "again")
    assert after.returncode == 0, after.stderr
    if [one for one in again["findings"] if one["severity"] == "error"] == []:
        return
    full = forks.run([str(script), "--fp32"], env={**os.environ}, timeout=200, cwd=tmp_path)
    ours, theirs = printed(after.stdout), printed(full.stdout)
    assert len(ours) == len(theirs) > 0
    assert all(map(math.isfinite, ours)), (finding["fix"], ours, again["findings"])
    mean = sum(theirs) / len(theirs)
    assert sum(ours) / len(ours) == pytest.approx(mean, rel=0.2, abs=0.05), (finding["fix"], again["findings"])


def test_the_fix_of_a_session_is_the_policy_that_it_has_and_the_module(tmp_path: Path) -> None:
    text = (HERE / "scripts" / "preamp_scores_overflow.py").read_text(encoding="utf-8")
    for level in ("O1", "O1,scale=256"):
        script = tmp_path / "train.py"
        script.write_text(text.replace('"O1"', repr(level)), encoding="utf-8")
        report, _ = doctor(script, tmp_path / "sick")
        (finding, *_) = report["findings"]
        line, tried = finding["fix"].split("\n")
        assert line.endswith('; attention -> full")') and tried.startswith("# tried: ")
        assert ('policy="O1; ' in line) is (level == "O1")
        script.write_text(re.sub(r"session = preamp\.prepare\(.*\)", line, script.read_text()), encoding="utf-8")
        again, after = doctor(script, tmp_path / "again")
        assert after.returncode == 0 and again["findings"] == [], (line, again["findings"], after.stderr)


STILL = ("running_loss_in_bf16", "counter_in_bf16", "decay_that_rounds_to_one", "gradients_over_micro_batches",
         "hits_counted_in_half", "lagged_adapter")  # fmt: skip
"""What stays where it is in 16 bits. The first one is quick."""


def with_fix(script: str, line: int, fix: str) -> str:
    """The script with a fix of a sum: in place of its line, or before the loop of the training."""
    lines, (begin, *loop) = script.split("\n"), fix.split("\nsession.")
    if begin.startswith(("for ", "model.", "session ")):
        at = max(index for index, each in enumerate(lines) if each.startswith("for step in"))
        lines.insert(at, f"import preamp\nmodel = {'policy' if 'policy =' in script else 'model'}\n{begin}")
    else:
        indent = lines[line - 1][: -len(lines[line - 1].lstrip())]
        lines[line - 1] = indent + begin.partition("\n")[0]
    text = "\n".join(lines)
    return text.replace("loss.backward()", "session.backward(loss)").replace(
        "optimizer.step()", "session.step()") if loop else text  # fmt: skip


@pytest.mark.parametrize("name", [STILL[0], *(pytest.param(one, marks=pytest.mark.slow) for one in STILL[1:])])
def test_a_sum_goes_on_with_the_printed_fix(name: str, tmp_path: Path) -> None:
    script = HERE / "scripts" / f"{name}.py"
    wanted, text = disease(script), script.read_text(encoding="utf-8")
    report, _ = doctor(script, tmp_path / "sick")
    (finding, *_) = [one for one in report["findings"] if wanted.met_by(one)]
    cured = tmp_path / "cured.py"
    cured.write_text(with_fix(text, finding["line"], finding["fix"]), encoding="utf-8")
    again, after = doctor(cured, tmp_path / "again")
    assert after.returncode == 0, (finding["fix"], after.stderr)
    assert [one for one in again["findings"] if one["code"] == finding["code"] and one["severity"] != "info"] == []
    full = forks.run([str(script), "--fp32"], env={**os.environ}, timeout=200, cwd=tmp_path)
    ours, theirs = ([float(n) for n in re.findall(r"-?\d+\.?\d*", out)] for out in (after.stdout, full.stdout))
    assert ours == pytest.approx(theirs, rel=0.1, abs=0.05), finding["fix"]


# -- the tool that pastes


def test_pasting() -> None:
    script = "def f(x, y):\n    z = g(\n        x + 1e-8)\n    return z / y\n\n\nz = g(a + 1e-8)\n"
    fix = (
        'with torch.autocast("cpu", enabled=False):\n'
        "    z = g(\n        x.float() + 0.0001)\n    return z / y.float()\n# tried: finite"
    )
    assert pasted(script, 4, fix) == (
        'def f(x, y):\n    with torch.autocast("cpu", enabled=False):\n'
        "        z = g(\n            x.float() + 0.0001)\n"
        '    with torch.autocast("cpu", enabled=False):\n        return z / y.float()\n\n\nz = g(a + 1e-8)\n'
    )
    with pytest.raises(AssertionError, match="no statement like"):
        pasted("z = 1\n", 1, 'with torch.autocast("cpu", enabled=False):\n    y = x.float()')


def test_what_is_printed() -> None:
    assert printed("0 1.25 1024.0\nstep\n1 nan 2.0\n2 -3.5e-05\nloss inf") == pytest.approx(
        [1.25, math.nan, -3.5e-5, math.inf], nan_ok=True
    )


# -- statements as text


def at(tmp_path: Path, text: str, line: int) -> Any:
    path = tmp_path / f"code{abs(hash(text))}.py"
    path.write_text(text, encoding="utf-8")
    return statement_at((str(path), line))


def low(*names: str, **numbers: float) -> Reading:
    return Reading(frozenset(names), numbers)


@pytest.mark.parametrize(
    ("text", "reading", "constants", "wanted"),
    [
        ("y = x + 1", low("x"), {}, "y = x.float() + 1"),
        ("y = x + z", low("x"), {}, "y = x.float() + z"),
        ("y += x", low("x"), {}, "y += x.float()"),
        ("y: Tensor = x * x", low("x"), {}, "y: Tensor = x.float() * x.float()"),
        ("a, b = f(x), g(x)", low("x"), {}, "a, b = f(x.float()), g(x.float())"),
        ("(a, b), c = x", low("x"), {}, "(a, b), c = x.float()"),
        ("y = x.t() @ x", low("x"), {}, "y = x.float().t() @ x.float()"),
        ("y = x.clamp(max=1.0 - 1e-6)", low("x"), {1e-6: 1e-3}, "y = x.float().clamp(max=1.0 - 0.001)"),
        ("self.y = self.x / 2", low("self.x"), {}, "self.y = self.x.float() / 2"),
        ("y = x / (x.sum() + self.eps)", low("x", **{"self.eps": 1e-6}), {1e-6: 1e-4},
         "y = x.float() / (x.float().sum() + 0.0001)"),
        ("y = x[0, a:b] * m['x']", low("x"), {}, "y = x.float()[0, a:b] * m['x']"),
        ("y = b['x'] * b['z'] + c.d[0]", low("b['x']", "c.d[0]"), {}, "y = b['x'].float() * b['z'] + c.d[0].float()"),
        ("y = F.normalize(x, dim=1)", low("x"), {1e-12: 1e-4}, "y = F.normalize(x.float(), dim=1, eps=0.0001)"),
        ("y = F.normalize(x, eps=1e-12)", low("x"), {1e-12: 1e-4}, "y = F.normalize(x.float(), eps=0.0001)"),
        ("print(x)", low("x"), {}, "print(x.float())"),
        ("y = arange(n, dtype=x.dtype)", low("x")._replace(dtypes=frozenset({"x.dtype"})), {},
         "y = arange(n, dtype=torch.float32)"),
        ("y = arange(n, dtype=torch.long)", low("x"), {}, "y = arange(n, dtype=torch.long)"),
        ("y = x.to(dtype=half)", low("x")._replace(dtypes=frozenset({"half"})), {}, "y = x.float().to(dtype=half)"),
        ("y = größe + x  # größe", low("x"), {}, "y = größe + x.float()  # größe"),
        ("y = 'größe', x, größe", low("x", "größe"), {}, "y = 'größe', x.float(), größe.float()"),
        ("y = [x for x in z]", low("z"), {}, "y = [x for x in z.float()]"),
        ("y = x", low("x"), {0.5: 0.25}, None),
        ("y = f(x)", low("x"), {1e-12: 1e-4}, None),
    ],
)  # fmt: skip
def test_a_statement_in_float32(
    tmp_path: Path, text: str, reading: Reading, constants: dict[float, float], wanted: str | None
) -> None:
    statement = at(tmp_path, f"import torch\n{text}\n", 2)
    assert in_float32(statement, reading, constants) == wanted
    indented = at(tmp_path, f"def f():\n    if True:\n        {text}\n", 3)
    assert in_float32(indented, reading, constants) == wanted


@pytest.mark.parametrize(
    ("text", "adds_tensor", "wanted"),
    [
        ("total += loss.detach()", True, "total = total + loss.detach().float()"),
        ("total += a - b", True, "total = total + (a - b).float()"),
        ("self.seen -= x", True, "self.seen = self.seen - x.float()"),
        ("total = total + x", True, "total = total + x.float()"),
        ("seen += 1", False, "seen = seen.float() + 1"),
        ("total = x + total", True, None),
        ("total *= x", True, None),
        ("total[0] += x", True, None),
        ("total.add_(x)", True, None),
        ("for total in totals:\n    total += x", True, None),
        ("def f(total, x):\n    total += x", True, None),
    ],
)
def test_a_sum_that_goes_on_in_float32(tmp_path: Path, text: str, adds_tensor: bool, wanted: str | None) -> None:
    assert going_on_in_float32(at(tmp_path, text, text.count("\n") + 1), adds_tensor) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("y = x.exp().to(x.dtype)", "y = x.float().exp().float()"),
        ("y = x.to(h)", "y = x.float()"),
        ("y = (x + z).half() * z", "y = (x.float() + z).float() * z"),
        ("y = x.half() + z.type_as(x)", "y = x.float() + z.float()"),
        ("y = x.half() + z.to(device)", "y = x.float() + z.to(device)"),
        ("y = x.half().to(z)", None),
        ("y = x + z", "y = x.float() + z"),
    ],
)
def test_a_statement_without_its_cast(tmp_path: Path, text: str, wanted: str | None) -> None:
    assert in_float32(at(tmp_path, f"{text}\n", 1), low("x"), {}, uncast=True) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x[0] = x.log()", "x[0] = x.float().log()"),
        ("x[m] += y", "x[m] += y.float()"),
        ("self.b.data = x.log()", "self.b.data = x.float().log()"),
        ("x.mul_(y)", "x.mul_(y.float())"),
        ("s['v'] = s['v'] * x", "s['v'] = s['v'].float() * x.float()"),
        ("torch.add(x, y, out=z)", "torch.add(x.float(), y.float(), out=z)"),
        ("d = torch.zeros_like(x).index_add_(0, i, y)", "d = torch.zeros_like(x.float()).index_add_(0, i, y.float())"),
    ],
)
def test_what_is_written_stays_itself(tmp_path: Path, text: str, wanted: str) -> None:
    """A cast of what a statement writes is a copy, and what is written into it is lost: better no fix than that one."""
    found = in_float32(at(tmp_path, f"import torch\n{text}\n", 2), low("x", "y", "z", "self.b", "s['v']"), {})
    assert found in (wanted, None)


@pytest.mark.parametrize(
    ("text", "reading", "constants", "wanted"),
    [
        ("return x / y", low("x", "y"), {}, "return x.float() / y.float()"),
        ("return x.log() + 1e-8", low("x"), {1e-8: 1e-4}, "return x.float().log() + 0.0001"),
        ("return F.normalize(x, dim=1) * self.g", low("x"), {1e-12: 1e-2},
         "return F.normalize(x.float(), dim=1, eps=0.01) * self.g"),
        ("return", low(), {}, "return"),
        ("return F.normalize(\n        x,\n        dim=1)", low("x"), {},
         "return F.normalize(\n    x.float(),\n    dim=1)"),
    ],
)  # fmt: skip
def test_a_return_in_float32(
    tmp_path: Path, text: str, reading: Reading, constants: dict[float, float], wanted: str
) -> None:
    statement = at(tmp_path, f"def f(self, x, y):\n    {text}\n", 2)
    assert in_float32(statement, reading, constants) == wanted


def test_a_statement_of_several_lines(tmp_path: Path) -> None:
    text = (
        "def f(x, y):\n    if x is not None:\n        z = torch.where(\n            x > 0,  # größer\n"
        "            x,\n            y.relu(),\n        )\n    return z\n"
    )
    for line in range(3, 8):
        statement = at(tmp_path, text, line)
        assert in_float32(statement, low("x"), {}) == (
            "z = torch.where(\n    x.float() > 0,  # größer\n    x.float(),\n    y.relu(),\n)"
        )
    assert {"x", "y"} <= set(statement.reads())
    assert at(tmp_path, text, 8).node.lineno == 8
    assert at(tmp_path, text, 2) is None, "an if is no simple statement"


def test_no_statement(tmp_path: Path) -> None:
    assert at(tmp_path, "def f(:\n", 1) is None
    assert statement_at((None, None)) is None
    assert statement_at((str(tmp_path / "missing.py"), 3)) is None
    assert at(tmp_path, "x = 1\n\n", 2) is None
    for text in ("x = 1; y = x", "if x: y = x.log(); z = y", "if x: y = x.log(\n    )"):
        assert at(tmp_path, f"{text}\n", 1) is None, "it is no whole line"


@pytest.mark.parametrize(("text", "wanted"), [
    ("def f(x): return x.log()  # größe", "def f(x):\n    return x.float().log()  # größe"),
    ("if y: z = x.log()", "if y:\n    z = x.float().log()"),
    ("    for x in y: z += x", "for x in y:\n    z += x.float()"),
    ('if "ä": z = x', 'if "ä":\n    z = x.float()'),
])  # fmt: skip
def test_a_statement_behind_what_it_is_the_only_one_of(tmp_path: Path, text: str, wanted: str) -> None:
    statement = at(tmp_path, f"class A:\n{text}\n" if text[0] == " " else f"{text}\n", 2 if text[0] == " " else 1)
    assert statement.placed(in_float32(statement, low("x"), {})) == wanted


def test_what_a_statement_reads(tmp_path: Path) -> None:
    statement = at(tmp_path, "y = self.norm(x.t()) + self.scale * torch.exp(z.a.b)[i](w) + 1e-8\n", 1)
    assert set(statement.reads()) == {"self", "x", "self.scale", "torch", "z.a.b", "i", "w"}
    assert [number.value for number in statement.numbers()] == [1e-8]


def test_the_dtypes_in_which_it_makes_something(tmp_path: Path) -> None:
    half, x = torch.half, torch.zeros(2, dtype=torch.bfloat16)
    statement = at(tmp_path, "y = f(a(dtype=half), b(dtype=x.dtype), c(dtype=torch.long), x.to(dtype=half))", 1)
    assert statement is not None and half and x.numel()
    assert read_in(sys._getframe(), statement).dtypes == {"half", "x.dtype"}


def test_what_it_reads_where_it_runs() -> None:
    class Own:
        def __init__(self) -> None:
            self.low, self.eps = torch.ones(2, dtype=torch.float16), {"a": 1e-6}

        def run(self, x: Tensor, y: tuple[Tensor, ...]) -> Tensor:
            return keep(sys._getframe()) + (x[0] + y[0] * y[1] * self.low + self.eps["a"])

    def keep(frame: Any) -> int:
        line = frame.f_code.co_filename, frame.f_lineno
        statement = statement_at(line)
        assert statement is not None and frame_of(line, sys._getframe()) is frame
        found.append(read_in(frame, statement))
        return 0

    found: list[Reading] = []
    Own().run(torch.ones(2, dtype=torch.bfloat16), (torch.ones(2), torch.ones(2).half()))
    assert found == [low("x", "y[1]", "self.low", **{"self.eps['a']": 1e-6})]
    assert frame_of((__file__, 1), sys._getframe()) is None


@pytest.mark.parametrize(("source", "is_hidden"), [
    ("half[0](x)", True), ("half[i](x)", True), ("full[i](x)", False), ("policy.log_prob(x)", True), ("x + y", False),
])  # fmt: skip
def test_numbers_that_no_text_makes_float32(tmp_path: Path, source: str, is_hidden: bool) -> None:
    """16-bit weights of a layer in a list, and what a distribution keeps: casts of operands do not reach them."""
    half, full = (torch.nn.ModuleList([torch.nn.Linear(2, 2, dtype=d)]) for d in (torch.float16, torch.float32))
    i, policy, x, y = 0, torch.distributions.Normal(torch.zeros(2).half(), 1.0), torch.ones(2).half(), 1.0
    statement = at(tmp_path, f"z = {source}\n", 1)
    assert half is not full and policy and x.numel() and y and i == 0
    assert read_in(sys._getframe(), statement).calls_module == is_hidden


@pytest.mark.parametrize("is_called", [False, True])
def test_two_dtypes_within_what_a_line_calls(is_called: bool) -> None:
    """A cast at the end of a line comes too late for the function that the line calls."""
    caller, inside = ("s.py", 9), Place(None, "s.py", 3, "forward")
    remedy, operands = Remedy((caller,), casts="dropped"), (torch.ones(2, 2), torch.ones(2, 2).half())
    within = Function("s.py", 2, 4, caller) if is_called else None
    with pytest.raises(RuntimeError) if is_called else nullcontext():
        out = run_kept(torch.ops.aten.mm.default, operands, {}, remedy, inside, within)
        assert out.dtype is torch.float16 and remedy.back == [torch.float16]


def test_the_text_of_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text("def f(a, b):\n    c = a - b\n    return c / (c.max() + 1e-8)\n", encoding="utf-8")
    file = str(path)
    seen = {(file, 2): low("a", "b"), (file, 3): low("c")}
    assert Remedy(((file, 3),)).text("cpu", seen) == (
        'with torch.autocast("cpu", enabled=False):\n    return c.float() / (c.float().max() + 1e-8)'
    )
    region = 'with torch.autocast("cuda", enabled=False):\n    '
    for at, name in (((file, 3), ""), (("other.py", 3), " of code.py")):
        assert Remedy(((file, 3), (file, 2)), ((1e-8, 1e-4),)).text("cuda", seen, at) == (
            f"# in place of line 2{name}:\n{region}c = a.float() - b.float()\n"
            f"# in place of line 3{name}:\n{region}return c.float() / (c.float().max() + 0.0001)"
        )
    assert Remedy(((file, 1),)).text("cpu", seen) is None
    assert Remedy(((file, 2),)).text("cpu", {}) is None, "a line that was not seen to run"
    assert Remedy(((file, 2),), ((1e-8, 1e-4),)).text("cpu", seen) is None
    written = Remedy(module="net.norm", policy="O1; net.norm -> full").text("cpu", {})
    assert written == 'session = preamp.prepare(model, optimizer, policy="O1; net.norm -> full")'


def test_the_epsilon_that_a_function_of_torchs_has_by_default() -> None:
    torchs = (F.normalize, F.cosine_similarity, F.linear, F.relu)
    assert [default_of(each) for each in torchs] == [1e-12, 1e-8, None, None]


def test_the_order_in_which_remedies_are_tried() -> None:
    here, before, other = ("f.py", 3), ("f.py", 2), ("f.py", 9)
    found = list(candidates([here, before], [here, other], [1e-8, 2.0, 1 - 1e-6], "m", "O1; m -> full"))
    assert found[0] == Remedy(module="m", policy="O1; m -> full")
    assert found[1] == Remedy((here,))
    assert found[2:4] == [Remedy((here,), casts="only"), Remedy((here,), casts="dropped")]
    changed = Remedy((here,), ((1e-8, 1e-4), (1 - 1e-6, 1 - 1e-4)))
    for as_it_is in (Remedy((here, other)), Remedy((before,)), Remedy((here, before))):
        assert found.index(as_it_is) < found.index(changed), "another epsilon computes another thing"
    assert len(set(found)) == len(found)
    assert all(one.module is None for one in candidates([here], [], [], "m", None))


net = torch.nn.Sequential(torch.nn.Linear(2, 2))


def computes(a: Tensor, readings: Readings) -> Tensor:
    b = a + 1
    readings.note((__file__, sys._getframe().f_lineno))
    return b


def goes_back(a: Tensor, readings: Readings) -> Tensor:
    readings.note((__file__, sys._getframe().f_lineno))
    a.sum().backward()  # type: ignore[no-untyped-call]
    return a


def calls_a_model(a: Tensor, readings: Readings) -> Tensor:
    readings.note((__file__, sys._getframe().f_lineno))
    return Tensor(net(a.float()))


@pytest.mark.parametrize("run", [computes, goes_back, calls_a_model])
def test_a_function_as_a_whole(run: Any) -> None:
    """Where no line of a function is enough, the line that calls it says float32 for all of it."""
    readings, low = Readings(), torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    z = run(low, readings) * 2
    here = z is not None and __file__, sys._getframe().f_lineno - 1
    first = run.__code__.co_firstlineno
    (reading,) = [one for line, one in readings.items() if first < (line[1] or 0) < first + 5]
    if run is not computes:
        assert reading.function is None
        return
    assert reading.function == Function(__file__, first, first + 3, here)
    remedy = Remedy((here,), within=reading.function)
    assert remedy.covers((__file__, first + 1), None) and not remedy.covers((__file__, first + 9), None)
    text = 'with torch.autocast("cpu", enabled=False):\n    z = run(low.float(), readings) * 2'
    assert remedy.text("cpu", readings) == text


@pytest.mark.parametrize(("source", "text"), [
    ("y = a * b  # of halves", "y = (a.float() * b.float()).to(torch.float16)  # of halves"),
    ("y = a.exp()", "y = (a.float().exp()).to(torch.float16)"),
    ("y=a\\\n  +b", "y=(a.float()\\\n      +b.float()).to(torch.float16)"),
    ("y += a", None),
    ("a.exp()", None),
])  # fmt: skip
def test_a_result_that_meets_16_bit_weights_is_cast_back(tmp_path: Path, source: str, text: str | None) -> None:
    (tmp_path / "s.py").write_text(f"{source}\n")
    line = str(tmp_path / "s.py"), 1
    statement = statement_at(line)
    reading = Reading(frozenset({"a", "b"}), {})
    remedy = Remedy((line,), back=[torch.float16])
    wrapped = None if text is None else f'with torch.autocast("cpu", enabled=False):\n    {text}'
    assert statement is not None and remedy.text("cpu", {line: reading}) == wrapped

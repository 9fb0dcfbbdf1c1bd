"""The lint: for every code a sick model that it finds and a healthy twin about which it says nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import preamp
from preamp.autocast import REGISTRY, autocast
from preamp.doctor import examine
from preamp.errors import PolicyError, SessionError
from preamp.policy import policy
from preamp.session import prepare
from preamp.zoo import TASKS

from ..releases import TORCH


class Run(nn.Module):
    """A linear layer, then a function of its output: what a test is about."""

    def __init__(self, then, **attributes):
        super().__init__()
        self.lin = nn.Linear(16, 16)
        self.then = then
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.then(self, self.lin(x))


X = (torch.randn(4, 16, generator=torch.Generator().manual_seed(0)),)
HALF = "params=fp16,compute=fp16,norms=fp32,masters=yes,ops=none"  # float16 with no rules that rescue operators


def found(code, model, level="O1", *, example=X, **others):
    return [f for f in examine(model, others.pop("optimizer", None), level, example=example, **others).findings
            if f.code == code]  # fmt: skip


def harmful(report):
    return [f for f in report.findings if f.severity != "info"]


# -- PA101


@pytest.mark.parametrize(
    ("level", "severity"), [("O3", "error"), ("O0", None), ("O1", None), ("O2", None), ("O5", None)]
)
def test_an_optimizers_eps_is_a_finding_on_fp16_state_only(level, severity):
    model = nn.Linear(8, 8)
    rows = found("PA101", model, level, example=None, optimizer=torch.optim.Adam(model.parameters()))
    assert [f.severity for f in rows] == ([severity] if severity else [])
    if rows:
        assert rows[0].evidence["eps"] == 1e-8 and rows[0].evidence["becomes"] == 0
        assert "optimizer.param_groups[0]['eps'] = 0.0001" in rows[0].fix


def _rms(self, x):
    return x / ((x * x).mean(-1, keepdim=True) + self.variance_epsilon).sqrt()


def _rms_full(self, x):
    y = x.float()
    return (y / ((y * y).mean(-1, keepdim=True) + self.variance_epsilon).sqrt()).to(x.dtype)


def test_a_custom_norms_eps_is_a_finding_where_it_leaves_a_zero():
    def padded(self, x):
        return torch.nan_to_num(_rms(self, 0 * x))

    (row,) = found("PA101", Run(padded, variance_epsilon=1e-8), "O2")
    assert row.severity == "error" and row.file.endswith("test_lint.py")
    assert row.line == _rms.__code__.co_firstlineno + 1
    assert not found("PA101", Run(padded, variance_epsilon=1e-6), "O2"), "a subnormal is no zero"
    assert not found("PA101", Run(_rms, variance_epsilon=1e-8), "O2"), "no number came near it"
    assert not found("PA101", Run(padded, variance_epsilon=1e-8), "O5"), "bfloat16 has float32's range"
    assert not found("PA101", Run(lambda self, x: _rms_full(self, 0 * x), variance_epsilon=1e-8), "O2")


def test_the_floor_of_normalize_vanishes_in_fp16():
    (row,) = found("PA101", Run(lambda self, x: F.normalize(0 * x).nan_to_num()), HALF)
    assert row.op == "clamp_min" and "1e-12" in row.message
    assert not found("PA101", Run(lambda self, x: F.normalize(0 * x, eps=1e-3)), HALF)


# -- PA102


def test_a_log_of_a_rounded_sigmoid_is_found():
    def sick(self, x):
        return (1 - torch.sigmoid(x)).log()

    (row,) = found("PA102", Run(sick))
    assert row.severity == "error" and row.line == sick.__code__.co_firstlineno + 1
    assert not found("PA102", Run(lambda self, x: (1 - torch.sigmoid(x.float())).log()))
    assert not found("PA102", Run(lambda self, x: F.logsigmoid(-x)))
    assert not found("PA102", Run(sick), "O0")


def test_a_cross_entropy_that_a_region_refuses_is_reported():
    def sick(self, x):
        return F.binary_cross_entropy(torch.sigmoid(x), torch.ones_like(x))

    rows = found("PA102", Run(sick))
    assert any(row.line == sick.__code__.co_firstlineno + 1 for row in rows)


# -- PA103


@pytest.mark.parametrize(
    ("then", "severity"),
    [
        (lambda self, x: x.masked_fill(x > 0, -1e9), "error"),
        pytest.param(
            lambda self, x: torch.where(x > 0, x, -1e9),
            "warning",
            marks=pytest.mark.skipif(TORCH < (2, 7), reason="torch 2.6 refuses it by itself"),
        ),
        (lambda self, x: torch.where(x > 0, x, torch.tensor(-1e9)), "warning"),
        (lambda self, x: x + torch.full_like(x, 65536.0), "error"),
        (lambda self, x: x + 1e6, "warning"),
        (lambda self, x: x.clamp(max=1e9), "error"),
        (lambda self, x: x + (x > 0).to(x.dtype) * -1e9, "warning"),
    ],
)
def test_constants_beyond_fp16_are_found(then, severity):
    rows = found("PA103", Run(then))
    assert [f.severity for f in rows] == [severity]
    assert rows[0].file.endswith("test_lint.py") and rows[0].line
    assert not found("PA103", Run(then), "O4"), "bfloat16 has float32's range"
    assert not found("PA103", Run(then), "O0")


@pytest.mark.parametrize(
    "then",
    [
        lambda self, x: x.masked_fill(x > 0, torch.finfo(x.dtype).min),
        lambda self, x: x.masked_fill(x > 0, float("-inf")),
        lambda self, x: x.float().masked_fill(x > 0, -1e9),
        lambda self, x: torch.where(x > 0, x, -1e4),
        lambda self, x: x.clamp(max=1e4),
        lambda self, x: x + (1.0 - (x > 0).float()) * -1e9,
        lambda self, x: x.float().square().sum().mul(1e9).half(),  # a loss, which no one wrote down
        lambda self, x: x * (x.float().square().sum() * 1e9),
    ],
)
def test_constants_that_do_no_harm_are_not_found(then):
    assert not found("PA103", Run(then))


# -- PA104


def large_leftovers(like):
    """Fill and free memory of a tensor's size, so that the next ones of that size find it there."""
    del [torch.full(like.shape, 60000.0, dtype=like.dtype) for _ in range(50)][:]


@pytest.mark.parametrize("make", [torch.empty_like, lambda x: x.new_empty(x.shape)])
def test_memory_that_nobody_has_written_yet_is_not_looked_at(make):
    def then(_, x):
        large_leftovers(x)
        return x + make(x).normal_()

    model, x = Run(then), X[0]
    with preamp.doctor.watch(model, every=1) as seen:
        for _ in range(5):
            with autocast("cpu", dtype=torch.float16):
                model(x).float().square().mean().backward()
    assert "PA205" not in {one.code for one in seen.findings}


@pytest.mark.parametrize(
    "then",
    [
        lambda self, x: (1 + x.tanh() / 2000).log(),
        lambda self, x: (x.tanh() * 1e-4).square(),
        lambda self, x: (x.square().mean(-1) - x.mean(-1).square() + 1e-3).rsqrt(),
        lambda self, x: (1 + x.tanh().abs()).repeat(1, 400).cumsum(-1),
    ],
)
def test_operators_that_want_float32_are_found_where_no_rule_rescues_them(then):
    def far(self, x):
        return then(self, (x.float().tanh() + 60).to(x.dtype)) if "rsqrt" in then.__code__.co_names else then(self, x)

    (row,) = found("PA104", Run(far), HALF)
    assert row.severity == "warning" and row.line
    assert not found("PA104", Run(lambda self, x: then(self, x.float())), HALF)


def _spread(x):
    return (16 + x.tanh()).repeat(1, 220)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_judged_by_their_measured_error(dtype):
    def rows(then):
        return found("PA104", Run(lambda self, x: then(_spread(x.to(dtype)))), HALF)

    for then in (lambda x: x.sum(-1), lambda x: x.mean(-1), lambda x: x.var(-1), lambda x: x.std(-1)):
        assert not rows(then), "torch adds up in float32: right to the last bit, however long"
    assert not rows(lambda x: x.mul(x).mean(-1) - x.mean(-1).mul(x.mean(-1))), "nothing is made of it"
    (row,) = rows(lambda x: (x.mul(x).mean(-1) - x.mean(-1).mul(x.mean(-1))).abs().sqrt())
    assert row.severity == "warning" and row.op == "sub" and "is off by" in row.message
    (row,) = rows(lambda x: x.cumsum(-1))
    assert row.severity == "warning" and "of the terms that it adds up" in row.message
    assert not rows(lambda x: (x - x.mean(-1, keepdim=True)).square().mean(-1)), "a variance as it should be written"
    assert not rows(lambda x: x[..., :8].cumsum(-1))
    assert not rows(lambda x: x.mean(-1) - x.std(-1).mul_(8)), "changed in place: no longer what was summed"


# -- PA105


def test_dimensions_off_the_multiple_are_named_with_the_size_to_use():
    model = nn.Sequential(nn.Linear(16, 30), nn.ReLU(), nn.Linear(30, 16))
    rows = found("PA105", model, "O4")
    assert [f.module for f in rows] == ["0", "2"] and {f.severity for f in rows} == {"info"}
    assert rows[0].fix == "# pad out_features 30 to 32" and rows[1].fix == "# pad in_features 30 to 32"
    assert not found("PA105", model, "O0")
    assert not found("PA105", model, "O4", example=None)
    assert not found("PA105", nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), "O4")
    little = nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 512), nn.Linear(512, 3))
    assert not found("PA105", little, "O4"), "a layer of little weight"


def test_convolutions_are_counted():
    model = nn.Sequential(nn.Conv2d(8, 20, 3), nn.Conv2d(20, 16, 3))
    images = (torch.zeros(2, 8, 12, 12),)
    report = examine(model, None, "O4", example=images)
    assert [f.fix for f in report.findings] == ["# pad out_channels 20 to 24", "# pad in_channels 20 to 24"]
    assert report.data["flops"] == 2 * 2 * (20 * 8 * 9 * 100 + 16 * 20 * 9 * 64)


def test_flops_of_attention_and_transposed_convolution():
    q = torch.zeros(2, 3, 5, 8)
    attention = Run(lambda self, x: F.scaled_dot_product_attention(q, q, q))
    assert examine(attention, None, "O0", example=X).data["flops"] == 2 * 4 * 16 * 16 + 4 * 2 * 3 * 5 * 5 * 8
    up = nn.ConvTranspose2d(8, 16, 2, stride=2)
    assert examine(up, None, "O0", example=(torch.zeros(1, 8, 4, 4),)).data["flops"] == 2 * 8 * 16 * 4 * 16


# -- PA109


def test_mixed_precision_that_is_not_in_effect_is_found():
    class Off(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return self.lin(x)

    (row,) = found("PA109", Off(), "O4")
    assert row.severity == "warning" and "autocast was off" in row.message and row.module == "lin"
    (row,) = found("PA109", nn.Linear(16, 16).double(), "O4", example=(X[0].double(),))
    assert "float64" in row.fix and row.evidence["observed"] == ["fp64"]
    (row,) = found("PA109", nn.Linear(16, 16), "compute=bf16,ops=none")
    assert "ops=none" in row.fix


def test_mixed_precision_in_effect_or_not_asked_for_is_nothing():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    assert not found("PA109", model, "O4")
    assert not found("PA109", model, "O0")
    assert not found("PA109", model, "O4; .* -> full"), "full by the policy's own rule"


# -- PA111


def test_a_model_cast_by_hand_is_found():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).half()
    rows = found("PA111", model, "O1", example=None)
    assert {f.severity for f in rows} == {"error"} and "0.weight" in rows[0].message
    assert any("running statistics" in f.message for f in rows)
    assert found("PA111", model, "O1", example=(X[0].half(),)), "also where it runs"
    assert not found("PA111", model.float(), "O1", example=None)
    assert not found("PA111", model.bfloat16(), "O0", example=None), "bfloat16 is PA204's business"


def test_fp16_parameters_without_masters_are_found():
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (row,) = found("PA111", model, "O3", optimizer=optimizer)
    assert row.severity == "warning" and row.op == "SGD" and row.evidence["parameters"] == 2
    assert not found("PA111", model, "O2", optimizer=optimizer)


def test_numbers_that_are_not_finite_are_found():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert not found("PA111", model, "O0", example=None)
    model[1].running_var[1] = float("inf")
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    rows = found("PA111", model, "O0", example=None)
    assert [(f.severity, f.module) for f in rows] == [("error", "0"), ("error", "1")]


def test_a_prepared_model_is_examined_as_it_is():
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    optimizer = torch.optim.Adam(model.parameters())
    with prepare(model, optimizer, level="O2"):
        report = examine(model, optimizer, "O2", example=X)
        assert not harmful(report)
        assert report.data["low share of flops"] == 1.0


# -- the whole


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("name", list(TASKS))
def test_healthy_networks_have_no_error_and_no_warning(name, level):
    task = TASKS[name]
    model = task.build("ci", seed=0)
    inputs, _ = next(task.batches("ci", seed=0, steps=1, batch_size=4))
    report = examine(model, torch.optim.AdamW(model.parameters()), level, example=inputs)
    assert not harmful(report)
    assert report.mood == "good" and "Nothing speaks against" in report.verdict


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_examine_changes_nothing(level):
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5))
    model[3].eval()
    model[0](X[0]).sum().backward()
    model(X[0])
    optimizer = torch.optim.Adam(model.parameters())
    x = X[0].clone().requires_grad_()

    def picture():
        tensors = {**model.state_dict(), **{f"{n}.grad": p.grad for n, p in model.named_parameters()}}
        bits = {n: None if t is None else (t.dtype, t.numpy().tobytes()) for n, t in tensors.items()}
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training, type(m)) for m in model.modules()]
        generators = (torch.get_rng_state().numpy().tobytes(), random.getstate(), str(np.random.get_state()))
        torchs = (torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.get_default_dtype(), REGISTRY.stamp)
        ours = (x.grad, x.detach().numpy().tobytes(), str(optimizer.state_dict()))
        return bits, hooks, generators, torchs, ours

    pointers = [p.data_ptr() for p in model.parameters()]
    autocast.uninstall()
    before = picture()
    examine(model, optimizer, level, example=(x,))
    assert picture() == before
    assert [p.data_ptr() for p in model.parameters()] == pointers


def test_a_failed_run_leaves_nothing_behind():
    autocast.uninstall()
    model = nn.Sequential(nn.Dropout(), nn.Linear(16, 16))
    state = torch.get_rng_state()
    with pytest.raises(SessionError, match=r"example did not run.*O4.*'1'"):
        examine(model, None, "O4", example=(torch.zeros(2, 3),))
    assert torch.equal(torch.get_rng_state(), state)
    assert not REGISTRY.stamp and not torch.is_autocast_enabled("cpu")


def test_modules_are_told_apart_inside_an_except_block_and_after_an_error_that_the_model_caught():
    class Raising(nn.Module):
        def forward(self, x):
            raise ValueError("caught by the parent")

    class Catching(nn.Module):
        def __init__(self):
            super().__init__()
            self.raising, self.lin = Raising(), nn.Linear(16, 16)

        def forward(self, x):
            try:
                x = self.raising(x)
            except ValueError:
                x = self.lin(x)
            return x.masked_fill(x > 0, -1e9)

    try:
        raise KeyError
    except KeyError:
        (row,) = found("PA103", nn.Sequential(Catching(), nn.ReLU(), Run(lambda self, x: x)))
        assert row.module == "0"
        (row,) = found("PA103", nn.Sequential(nn.Linear(16, 16), Run(lambda self, x: x.masked_fill(x > 0, 1e9))))
        assert row.module == "1"


def test_lazy_and_meta_models_are_examined_statically():
    assert examine(nn.LazyLinear(8), None, "O2").findings == ()
    assert examine(nn.Linear(8, 8, device="meta"), None, "O2").findings == ()


def test_keyword_inputs_auto_and_the_report():
    report = examine(nn.Linear(16, 16), example={"input": X[0]})
    assert report.environment["policy"] in ("O0", "O4")
    assert examine(nn.Linear(16, 16), None, policy("O4"), example=X[0]).findings == ()
    sick = examine(Run(lambda self, x: x.masked_fill(x > 0, -1e9)), None, "O1", example=X)
    assert sick.verdict.startswith("1 error under O1; the worst is PA103")
    assert sick.to_dict()["findings"][0]["code"] == "PA103" and "PA103" in sick.to_html()


def test_findings_are_sorted_by_harm_and_not_repeated():
    def looping(self, x):
        for _ in range(3):
            x = torch.where(x > 0, x, torch.tensor(1e9))
        return x.masked_fill(x > 1, -1e9)

    rows = examine(Run(looping), None, "O1", example=X).findings
    assert [f.severity for f in rows] == ["error", "warning"]


def test_wrong_inputs_give_one_clear_error():
    model = nn.Linear(16, 16)
    with pytest.raises(SessionError, match=r"takes a torch\.nn\.Module; got a str"):
        examine("model")
    with pytest.raises(SessionError, match="optimizer= is"):
        examine(model, model)
    with pytest.raises(SessionError, match="example= is a tuple"):
        examine(model, example=3)
    with pytest.raises(SessionError, match="names of forward's arguments"):
        examine(model, example={1: X[0]})
    with pytest.raises(PolicyError, match="no level 'O9'"):
        examine(model, policy="O9")


# -- PA201 of infinities that leave no trace


@pytest.mark.parametrize(("op", "then"), [
    ("pow", lambda x: x * x.pow(2).mean(-1, keepdim=True).rsqrt()),
    ("mul", lambda x: x / (x * x).mean(-1, keepdim=True).sqrt()),
    ("sum", lambda x: x / x.abs().repeat(1, 60).sum(-1, keepdim=True)),
    ("pow", lambda x: x.float() * x.pow(2).float().sum(-1, keepdim=True).pow(-0.5)),
])  # fmt: skip
def test_infinities_that_become_zeros_are_told_where_they_are_made(op, then):
    def large(self, x):
        return then(600 + 0 * x)

    rows = found("PA201", Run(large), HALF)
    assert [(row.op, row.severity, row.direction) for row in rows] == [(op, "error", "forward")]
    assert rows[0].line and "makes other numbers of it" in rows[0].message
    assert not found("PA201", Run(lambda self, x: then(1 + 0 * x)), HALF)
    assert not found("PA201", Run(lambda self, x: then((600 + 0 * x).float())), HALF)


@pytest.mark.parametrize("then", [
    lambda x: 1 / (1 + (12 + 0 * x).exp()),  # a sigmoid by hand: zero is right
    lambda x: x.masked_fill(x > 0, -torch.inf).softmax(-1),
    lambda x: (600 + 0 * x).pow(2).clamp(max=100),
    lambda x: x / torch.full_like(x, torch.inf),
])  # fmt: skip
def test_infinities_that_are_meant_are_not(then):
    assert not found("PA201", Run(lambda self, x: then(x)), HALF)


class Squares(nn.Module):
    """Squares that a region computes in float32, and a layer that takes them in 16 bits."""

    def __init__(self, factor: float, masks: bool = False) -> None:
        super().__init__()
        self.norm, self.head, self.factor, self.masks = nn.BatchNorm1d(8), nn.Linear(8, 8), factor, masks

    def forward(self, x):
        out = self.head((self.factor * self.norm(x)).square())
        return out.masked_fill(out < 0, -torch.inf) if self.masks else out


def test_an_output_that_is_not_finite_is_traced_to_its_operator():
    torch.manual_seed(0)
    model, x = Squares(1000.0), torch.randn(16, 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (finding,) = [one for one in examine(model, None, "O2", example=(x,)).findings if one.severity != "info"]
    assert (finding.code, finding.severity, finding.module, finding.direction) == ("PA201", "error", "head", "forward")
    assert not [one for one in examine(model, None, "O5", example=(x,)).findings if one.severity != "info"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_an_example_that_is_not_finite_itself_is_told_so():
    x = torch.randn(16, 8)
    x[3, 2] = torch.nan
    assert "PA207" in {finding.code for finding in examine(Squares(1.0), None, "O2", example=(x,)).findings}


def test_an_output_with_a_mask_is_nothing():
    torch.manual_seed(0)
    assert not harmful(examine(Squares(1.0, masks=True), None, "O2", example=(torch.randn(16, 8),)))

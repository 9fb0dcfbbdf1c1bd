"""Shadows beside values: what is followed, blamed and not blamed, and that nothing of it reaches the script."""

from __future__ import annotations

import gc
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import preamp
from preamp.doctor.hooks import Clock
from preamp.doctor.measure import key_of
from preamp.doctor.operators import Observer, Stream
from preamp.doctor.places import Places
from preamp.doctor.shadow.absorbed import Changes
from preamp.doctor.shadow.execution import BETWEEN, Shadowed
from preamp.doctor.shadow.facts import Absorbed, Fact, spelled
from preamp.doctor.shadow.values import Shadows, has_shadow, relative_error, share_differing, share_lost

from ._origin import names_of

HALF, BF16 = torch.float16, torch.bfloat16


def observed(step: Callable[[], Any], observers: list[Observer], model: nn.Module | None = None) -> Any:
    """What a step gives under observation. An error of the observers is an error here."""
    names = names_of(model if model is not None else nn.Module())
    places = Places(names.known, names.owners, observed.__code__)
    stream = Stream(lambda: places, Clock())
    with torch.autograd.set_multithreading_enabled(False), stream.shown_to(*observers):
        return step()


def watched(
    step: Callable[[], Any], model: nn.Module | None = None, limit: float = math.inf
) -> tuple[Shadowed, list[Fact]]:
    """A step with shadows, and the facts of it."""
    shadowed = Shadowed(limit)
    observed(step, [shadowed], model)
    return shadowed, shadowed.facts


def facts_of(step: Callable[[], Any], model: nn.Module | None = None) -> list[Fact]:
    return watched(step, model)[1]


def changes_of(step: Callable[[Changes], Any]) -> list[Absorbed]:
    changes = Changes()
    observed(lambda: step(changes), [changes])
    return list(changes.events())


def line_of(function: Any, text: str) -> int:
    """The line of this file on which `function` says `text`."""
    lines, start = inspect.getsourcelines(function)
    return next(start + offset for offset, line in enumerate(lines) if text in line)


# -- shadows

VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t.t() if t.dim() == 2 else t,
    lambda t: t[1:] if t.shape[0] > 1 else t,
    lambda t: t[::2],
    lambda t: t.flip(0)[: t.shape[0]],  # a copy: another storage
    lambda t: t.unsqueeze(0),
    lambda t: t.squeeze(0),
    lambda t: t.expand(3, *t.shape),
    lambda t: t.narrow(-1, 0, max(1, t.shape[-1] - 1)) if t.dim() else t,
    lambda t: t.movedim(0, -1) if t.dim() else t,
]


@given(st.lists(st.integers(0, len(VIEWS) - 1), max_size=5), st.sampled_from([HALF, BF16, torch.float32]))
@settings(max_examples=60, deadline=None)
def test_a_view_has_the_view_of_the_shadow(path: list[int], dtype: torch.dtype) -> None:
    base = torch.arange(24.0).reshape(4, 6).to(dtype)
    shadows = Shadows(math.inf, {})
    view = base
    for index in path:
        view = VIEWS[index](view) if view.dim() else view
    shadow = shadows.of(view)
    assert shadow.dtype is torch.float32 and shadow.shape == view.shape
    assert torch.equal(shadow, view.float())
    if view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr():
        shadows.of(base).add_(0.25)
        assert torch.equal(shadow, view.double() + 0.25), "they share their numbers"
        assert shadows.find(view) is not None


def test_what_is_written_through_a_view_is_in_the_shadow_of_the_whole() -> None:
    x = torch.zeros(4, 4, dtype=HALF)

    def step() -> None:
        x[1].fill_(0.5)
        x[:, 2].add_(0.1)
        x.t().mul_(3)

    shadowed, facts = watched(step)
    exact = torch.zeros(4, 4)
    exact[1] = 0.5
    exact[:, 2] += 0.1
    found = shadowed.shadows.find(x)
    assert found is not None and torch.equal(found, exact * 3)
    assert not torch.equal(found, x.float()), "float16 has rounded a tenth"
    assert facts == []


def test_a_shadow_follows_what_is_written_before_the_models_however_large() -> None:
    shadowed, x = Shadowed(math.inf, between=True), torch.zeros(BETWEEN[1] + 8, dtype=HALF)
    observed(lambda: [x[:4].add_(0.1), x.fill_(5)], [shadowed])
    assert shadowed.error_of(x) == 0


def test_shadows_of_freed_storages_go() -> None:
    shadows = Shadows(math.inf, {})
    kept = torch.ones(3, dtype=HALF)
    shadows.of(kept).fill_(7)
    for _ in range(600):
        shadows.of(torch.zeros(1000, dtype=HALF))
    gc.collect()
    assert len(shadows._of) < 400
    assert shadows._bytes < 400 * 8000
    assert torch.equal(shadows.of(kept), torch.full((3,), 7.0, dtype=torch.float64))


def test_a_storage_at_the_same_place_has_no_old_shadow() -> None:
    shadows = Shadows(math.inf, {})
    for value in range(50):  # torch's allocator gives the same memory again
        x = torch.full((64,), float(value), dtype=HALF)
        assert shadows.find(x) is None
        shadows.of(x).add_(100)
        del x


def test_another_dtype_of_a_storage_begins_anew() -> None:
    shadows = Shadows(math.inf, {})
    x = torch.ones(4, dtype=HALF)
    shadows.of(x).fill_(7)
    other = x.view(BF16)
    assert shadows.find(other) is None
    assert torch.equal(shadows.of(other), other.double())
    weight = nn.Parameter(torch.ones(4))
    shadows.of(weight).fill_(7)
    weight.data = weight.data.to(BF16)
    assert torch.equal(shadows.of(weight), torch.ones(4, dtype=torch.float64))
    weight.data.untyped_storage().resize_(16)
    assert shadows.find(weight) is None


def test_numbers_without_a_shadow() -> None:
    assert has_shadow(torch.ones(2)) and has_shadow(nn.Parameter(torch.ones(2, dtype=HALF)))
    for other in (
        torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.long), torch.ones(2, dtype=torch.complex64),
        torch.ones(2).to_sparse(), torch.ones(2, device="meta"), 1.0, None,
        torch.imag(torch.ones(2, dtype=torch.complex64).conj()),
    ):  # fmt: skip
        assert not has_shadow(other)


def test_beyond_the_limit_errors_are_followed_a_module_at_a_time() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).bfloat16()
    x = torch.randn(4, 8, dtype=BF16)
    largest = []

    class Kept(Observer):
        def after(self, _: Any) -> None:
            largest.append(shadowed.shadows._bytes)

    shadowed = Shadowed(500)
    observed(lambda: model(x), [shadowed, Kept()], model)
    assert not shadowed.shadows.whole
    assert max(largest[3:]) < 1000, "one module's: a weight, its cast, an input and a result"
    whole, _ = watched(lambda: model(x), model)
    assert whole.shadows.whole and whole.operators == shadowed.operators


def test_a_fact_within_a_module_is_found_beyond_the_limit() -> None:
    class Act(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * x).log()

    model = nn.Sequential(nn.Identity(), Act())
    _, facts = watched(lambda: model(torch.full((64,), 1e-4, dtype=HALF)), model, limit=1)
    assert [(fact.kind, fact.op, fact.place.module) for fact in facts] == [("lost", "mul", "1")]


# -- how errors are measured


def test_the_measures() -> None:
    one = torch.ones(4, dtype=torch.float64)
    assert relative_error(torch.ones(4, dtype=HALF), one) == 0
    assert relative_error(torch.full((4,), 1.5, dtype=HALF), one) == 0.5
    assert relative_error(torch.tensor([1.0, 1, 1, math.inf]), one) == math.inf
    assert relative_error(torch.tensor([1.0, 1, 1, math.nan]), one) == math.inf
    assert relative_error(torch.ones(4), torch.full((4,), math.inf, dtype=torch.float64)) == 0, "nor is the shadow"
    assert relative_error(torch.ones(4), torch.zeros(4, dtype=torch.float64)) == math.inf
    assert relative_error(torch.zeros(4), torch.zeros(4, dtype=torch.float64)) == 0
    masked = torch.tensor([1.5, 1.5, -math.inf, math.nan])
    assert relative_error(masked, torch.tensor([1.0, 1, -math.inf, math.nan])) == 0.5, "the others say nothing"
    assert relative_error(torch.ones(0), torch.ones(0, dtype=torch.float64)) == 0
    assert share_differing(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    assert share_differing(torch.ones(0), torch.ones(0)) == 0
    assert share_lost(torch.tensor([0.0, 1, 0, 0]), torch.tensor([1.0, 1, 0, 1])) == pytest.approx(2 / 3)
    assert share_lost(torch.zeros(2), torch.zeros(2)) == 0
    names = {
        "linalg_cholesky_ex": "cholesky", "_to_copy": "a cast", "aten.log1p.default": "log1p", "_softmax": "softmax",
        "_log_softmax_backward_data": "log_softmax", "native_layer_norm": "layer_norm", "sqrt_": "sqrt",
    }  # fmt: skip
    assert {name: spelled(name) for name in names} == names


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 1e9, 1e30])
@pytest.mark.parametrize("shape", [(0,), (), (7,), (3, 5)])
def test_an_error_in_float32_is_that_in_float64(size: float, shape: tuple[int, ...]) -> None:
    """Also of numbers whose squares float32 does not hold, and with another default dtype."""
    torch.manual_seed(0)
    shadow = (torch.randn(shape, dtype=torch.float64) * size).float()
    value, exact = (shadow * 1.3).to(BF16), shadow.double()
    off = float((value.double() - exact).norm() / exact.norm()) if value.numel() else 0.0
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        assert relative_error(value, shadow) == pytest.approx(off, rel=1e-4)
        if value.numel():
            assert relative_error(torch.full_like(value, math.nan), shadow) == math.inf
    finally:
        torch.set_default_dtype(before)


@given(st.floats(1e-3, 1e3), st.sampled_from([HALF, BF16, torch.float32]), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_rounding_alone_is_no_error(size: float, dtype: torch.dtype, seed: int) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed)).double() * size
    assert relative_error(x.to(dtype), x) <= torch.finfo(dtype).eps


# -- what is blamed


def test_made() -> None:
    x = (1 + torch.linspace(-0.008, 0.008, 200)).to(torch.float32)

    def step() -> Tensor:
        low = x.bfloat16()
        return low.log() * 2

    (fact,) = facts_of(step)
    assert (fact.kind, fact.op, fact.name, fact.dtype, fact.shape) == ("made", "log", "log", "bf16", (200,))
    assert 0.25 < fact.error < 1 and fact.inputs < 0.005 and 1 < fact.largest < 1.01
    assert (fact.place.file, fact.place.line) == (__file__, line_of(step, "low.log()"))
    assert fact.lines == ((__file__, line_of(step, "low.log()")), (__file__, line_of(step, "x.bfloat16()")))
    assert fact.code == "PA104"


def test_lost() -> None:
    (fact,) = facts_of(lambda: torch.full((64,), 1e-4, dtype=HALF).square())
    assert (fact.kind, fact.op, fact.error, fact.code) == ("lost", "pow", 1.0, "PA104")


def test_decided() -> None:
    (fact,) = facts_of(lambda: torch.arange(300.0, 500.0).bfloat16().long())
    assert (fact.kind, fact.name, fact.code) == ("decided", "a cast", "PA114")
    assert fact.error == pytest.approx(0.5, abs=0.05)
    times = torch.linspace(0.7, 0.7002, 50)
    (fact,) = facts_of(lambda: times.bfloat16() > 0.7001)
    assert (fact.kind, fact.op) == ("decided", "gt")


def test_an_angle_of_a_large_number() -> None:
    (fact,) = facts_of(lambda: torch.arange(0.0, 2000.0).bfloat16().sin())
    assert (fact.kind, fact.op, fact.code) == ("made", "sin", "PA114")
    assert facts_of(lambda: torch.arange(0.0, 100.0).bfloat16().sin()) == []
    low = 10000 ** -(torch.arange(16) / 16)
    (fact,) = facts_of(lambda: torch.outer(torch.arange(3000.0), low.bfloat16().float()).cos())  # a few of 16 columns
    assert (fact.code, fact.dtype) == ("PA114", "fp32") and 0.1 < fact.error < 0.25


def test_not_finite_is_no_fact_while_it_shows() -> None:
    shadowed, facts = watched(lambda: torch.full((8,), 20.0, dtype=HALF).exp() * 2)
    assert facts == []
    ((place, fact),) = shadowed.broke
    assert (fact.kind, fact.op, fact.code, place) == ("not finite", "exp", "PA201", fact.place)


def test_hidden() -> None:
    (fact,) = facts_of(lambda: torch.full((8,), 300.0, dtype=HALF).square().reciprocal())
    assert (fact.kind, fact.op, fact.hidden_by) == ("not finite", "pow", "reciprocal")
    assert fact.code == "PA201"
    sigma = torch.cat([torch.full((63,), 9.0), torch.full((1,), 700.0)]).half()
    (fact,) = facts_of(lambda: sigma / (sigma**2 + 1).sqrt())
    assert (fact.op, fact.hidden_by) == ("pow", "div"), "one entry of many is all wrong"
    assert facts_of(lambda: 1 / (sigma**2 + 1)) == [], "nearly nothing, beside the others"
    assert facts_of(lambda: 1 / (1 + torch.full((8,), 12.0, dtype=HALF).exp())) == [], "a sigmoid written by hand"


def test_hidden_beside_larger_numbers() -> None:
    """A row whose result is large and right must not speak for those that are all wrong."""
    x = torch.cat([torch.full((1, 8), 0.02), torch.full((7, 8), 1000.0)]).half()

    def normed() -> Tensor:
        return torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-3)

    (fact,) = facts_of(lambda: x * normed())
    assert (fact.op, fact.hidden_by) == ("pow", "rsqrt")
    (fact,) = facts_of(lambda: (x[1:] * normed().clone()[1:]).sum(0))
    assert (fact.op, fact.hidden_by) == ("pow", "rsqrt")
    for harmless in (normed, lambda: normed() * 3 + 1, lambda: normed() @ torch.ones(1, 4, dtype=HALF)):
        assert facts_of(harmless) == []

    def wrong_elsewhere() -> Tensor:
        return (normed() + 1) * torch.full((8, 1), 1e-4, dtype=HALF).square()

    assert [fact.hidden_by for fact in facts_of(wrong_elsewhere)] == [None], "that is another fault"


def test_a_mask_does_not_hide_what_is_wrong_beside_it() -> None:
    mask = torch.tensor([0.0, 0, 0, -math.inf], dtype=HALF)
    (fact,) = facts_of(lambda: (torch.full((4,), 1e-4, dtype=HALF).square() + mask).exp() * 2)
    assert (fact.kind, fact.op) == ("lost", "pow")


def test_read_by_the_script() -> None:
    shadowed, facts = watched(lambda: torch.full((), 300.0, dtype=HALF).square().item())
    assert facts == []
    (fact,) = shadowed.read_out
    assert (fact.kind, fact.op) == ("not finite", "pow")


def test_a_factor_of_a_rounded_matrix() -> None:
    z = torch.randn(8, 32, generator=torch.Generator().manual_seed(3))

    def step() -> Tensor:
        low = z.bfloat16()
        cov = (low.t() @ low * 4000).float() + torch.eye(32)
        return torch.linalg.inv(cov)

    facts = facts_of(step)
    assert [fact.code for fact in facts] == ["PA115"]
    assert facts[0].kind == "made" and facts[0].name in ("inv", "solve", "inverse")


def test_a_place_is_told_once() -> None:
    def step() -> None:
        for _ in range(3):
            torch.full((64,), 1e-4, dtype=HALF).square()

    assert len(facts_of(step)) == 1


def test_what_is_off_already_is_not_blamed_on_what_reads_it() -> None:
    def step() -> Tensor:
        x = torch.full((64,), 1e-4, dtype=HALF).square()
        return (x * 100).sqrt() + 0.01

    assert [fact.op for fact in facts_of(step)] == ["pow"]


def test_backward_has_the_line_of_its_forward() -> None:
    x = torch.full((64,), 3e-4, dtype=HALF, requires_grad=True)

    def step() -> None:
        y = x**3
        y.backward(torch.full((64,), 1e-3, dtype=HALF))

    facts = facts_of(step)
    assert {fact.place.direction for fact in facts} == {"forward", "backward"}
    assert {fact.place.line for fact in facts} == {line_of(step, "y = x**3")}


# -- what is not


def _adam() -> None:
    model = nn.Linear(16, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    with torch.autocast("cpu", BF16):
        model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()


def _dead_relu() -> None:
    x = torch.randn(32, 32, dtype=BF16)
    ((-x.abs() - 1).relu() @ x).sum()


def _attention() -> None:
    q, k, v = torch.randn(3, 2, 8, 16, dtype=BF16).requires_grad_()
    mask = torch.ones(8, 8).tril().bool()
    scores = (q @ k.transpose(-1, -2) / 4).masked_fill(~mask, -math.inf)
    (scores.softmax(-1) @ v).square().mean().backward()
    F.scaled_dot_product_attention(q, k, v, is_causal=True).mean()


def _dropout() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4)).bfloat16()
    F.dropout(model(torch.randn(8, 16, dtype=BF16)), 0.3).float().square().mean().backward()


def _others() -> None:
    x = torch.randn(8, 8)
    torch.fft.fft(x).abs().sum()
    torch.view_as_complex(x.view(8, 4, 2)).mul_(1j)
    torch.sparse.mm(x.relu().to_sparse(), x)
    nn.Embedding(9, 3, sparse=True)(torch.arange(4)).sum().backward()
    torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)
    x.double().half().double()


def _too_close_for_float32() -> None:
    near = 1e4 * (1 + torch.rand(64))
    beside = torch.nextafter(near, near + 1)
    (near.bfloat16().square() - beside.bfloat16().square()).abs().reciprocal()


SILENT: dict[str, Callable[[], Any]] = {
    "a difference that float32 cannot tell either": _too_close_for_float32,
    "a sum that cancels": lambda: torch.cat([x := torch.randn(4096, dtype=BF16) / 3, -x]).sum() + 0,
    "a difference of neighbours": lambda: (torch.randn(64) * 1e-3 + 1).bfloat16() - 1,
    "the place of a maximum": lambda: (1 + 1e-3 * torch.rand(8, 100)).bfloat16().argmax(-1),
    "an order": lambda: (1 + 1e-3 * torch.rand(8, 100)).bfloat16().sort(-1),
    "units that are dead": _dead_relu,
    "Adam's first step": _adam,
    "dropout": _dropout,
    "a mask of -inf": _attention,
    "what has no shadow": _others,
    "exp in float32": lambda: torch.full((4,), 100.0).exp().reciprocal(),
    "exp that float32 would not bear either": lambda: torch.full((4,), 100.0, dtype=HALF).exp().reciprocal(),
    "what was drawn around a rounded mean": lambda: (
        (torch.normal(mean := torch.randn(64).bfloat16().float(), torch.full((64,), 1e-4)) - mean).abs().log()
    ),
    "a comparison far from ties": lambda: torch.randn(512).bfloat16() > 0,
    "infinity that came in": lambda: torch.tensor([math.inf, 1.0], dtype=HALF).reciprocal(),
    "NaN that came in": lambda: torch.nan_to_num(torch.tensor([math.nan, 1.0], dtype=HALF)),
    "random numbers": lambda: torch.rand(64, dtype=BF16) + torch.empty(64, dtype=HALF).normal_(),
    "no numbers": lambda: torch.randn(0, 4, dtype=HALF).sum(0) + torch.randn(0, dtype=BF16).mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_silent(name: str) -> None:
    shadowed, facts = watched(SILENT[name])
    assert facts == []
    assert not shadowed.broke or "float32" not in name


@pytest.mark.parametrize("dtype", [HALF, BF16, torch.float32])
def test_bytes_that_a_forward_pass_left_are_not_for_the_shadows(dtype: torch.dtype) -> None:
    """They are of one dtype's kernel: another one's would read and write beside them."""
    net, x = nn.LSTM(16, 24, batch_first=True), torch.randn(4, 8, 16)
    given, ran = [], []

    class Kept(Shadowed):
        def after(self, call: Any) -> None:
            given.extend([call.base] if any(t.dtype is torch.uint8 for t in call.given) else [])
            super().after(call)

        @staticmethod
        def _run(call: Any, shadow: Any, dtype: torch.dtype) -> list[Tensor]:
            ran.append(call.base)
            return Shadowed._run(call, shadow, dtype)

    def step() -> None:
        with preamp.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            net(x)[0].float().square().mean().backward()

    observed(step, [Kept()], net)
    assert given and ran and not set(given) & set(ran)


def test_gradients_are_off_however_small_they_are() -> None:
    shadowed, small = Shadowed(), torch.full((64,), 1e-30, dtype=BF16)
    shadowed.shadows.of(small).mul_(2)
    shadowed.gradients_came([small, None])
    assert shadowed.gradients_off == pytest.approx(0.5)


def test_operators_that_cannot_run_are_counted_and_their_results_are_believed() -> None:
    def step() -> Tensor:
        table = torch.randn(8, 4, dtype=HALF)
        return torch.ops.aten._embedding_bag(table, torch.arange(4), torch.tensor([0, 2]))[0] * 2

    shadowed, facts = watched(step)
    assert facts == []
    assert all(count > 0 for count in shadowed.skipped.values())


# -- numbers that stay what they are


def _event(events: list[Absorbed], op: str) -> Absorbed:
    (event,) = [event for event in events if event.op.startswith(op)]
    return event


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda t: t.add_(1),
    "sub": lambda t: t.sub_(torch.ones_like(t)),
    "mul": lambda t: t.mul_(1 - 1e-4),
    "div": lambda t: t.div_(1.0001),
    "lerp": lambda t: t.lerp_(t + 32, 1e-3),
    "addcmul": lambda t: t.addcmul_(torch.ones_like(t), torch.ones_like(t), value=0.1),
    "addcdiv": lambda t: t.addcdiv_(torch.ones_like(t), torch.ones_like(t), value=-0.1),
}


@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("op", IN_PLACE)
def test_a_change_that_is_lost(op: str, dtype: torch.dtype) -> None:
    size = 1024.0 if dtype is BF16 else 8192.0
    total = torch.full((32,), size, dtype=dtype)
    event = _event(changes_of(lambda _: IN_PLACE[op](total)), op)
    assert torch.equal(total, torch.full((32,), size, dtype=dtype))
    assert (event.moved, event.stayed, event.times) == (32, 32, 1)
    assert event.dtype == ("bf16" if dtype is BF16 else "fp16") and not event.is_gradient
    assert event.at[0] == __file__


@pytest.mark.parametrize("op", IN_PLACE)
def test_a_change_that_is_not_lost(op: str) -> None:
    small = torch.full((32,), 1e-2 if op not in ("mul", "div") else 1.0, dtype=BF16)
    change = {"mul": lambda t: t.mul_(0.9), "div": lambda t: t.div_(1.1)}.get(op, IN_PLACE[op])
    assert _event(changes_of(lambda _: change(small)), op).stayed == 0
    assert changes_of(lambda _: IN_PLACE[op](torch.full((32,), 1024.0))) == [], "float32"


def test_lists_of_tensors() -> None:
    many = [torch.full((8,), 1024.0, dtype=BF16) for _ in range(3)]

    def step(_: Changes) -> None:
        torch._foreach_add_(many, 1.0)
        torch._foreach_mul_(many, 0.9999)
        torch._foreach_lerp_(many, [m + 16 for m in many], 1e-2)
        torch._foreach_addcdiv_(many, [torch.ones(8, dtype=BF16)] * 3, [torch.ones(8, dtype=BF16)] * 3, -0.1)

    events = [event for event in changes_of(step) if event.goes_on]
    assert [event.op for event in events] == ["add", "mul", "lerp", "addcdiv"]
    assert {(event.moved, event.stayed) for event in events} == {(24, 24)}


def test_new_numbers_that_take_the_place_of_old_ones() -> None:
    total, average, fresh = (torch.full((n,), 1024.0, dtype=BF16) for n in (1, 8, 1))

    def step(_: Changes) -> None:
        nonlocal total
        for _ in range(3):
            total = total + 1.0
            average.copy_(average * 0.9999 + 0.01)
            del_me = fresh + 2.0  # its memory is given again, and it is no sum
            del del_me

    found = [(event.op, event.moved, event.stayed, event.goes_on) for event in changes_of(step)]
    assert found == [("add", 3, 3, True), ("mul", 24, 24, True), ("add", 24, 24, True), ("add", 3, 3, False)]


def test_an_average_that_is_made_anew_takes_the_place_of_the_old_one() -> None:
    average = {"w": torch.full((32,), 1024.0, dtype=BF16)}
    one, weight, x = torch.ones(32, dtype=BF16), torch.ones(1, requires_grad=True), average["w"].clone()

    def step(_: Changes) -> None:
        nonlocal average, x
        for _ in range(1):
            weight.sum().backward()  # type: ignore[no-untyped-call]
            average = {name: each + one for name, each in average.items()}
            other = average["w"] + one
            for block in (one,):
                x = x + block
            del other

    found = [(event.stayed, event.goes_on) for event in changes_of(step)]
    assert [each for each in found if each[0]] == [(32, True), (32, False), (32, False)]


def test_a_factor_is_no_epsilon() -> None:
    x = torch.ones(4, dtype=HALF)
    shadowed, _ = watched(lambda: 1e-5 * x / 2e-5 + (x + 1e-6) * (1 - 1e-6))
    assert sorted(n for many in shadowed.constants.values() for n in many) == [1e-6, 1 - 1e-6]


def test_sums_in_graphs_and_of_whole_models_are_left_alone() -> None:
    x, weight = torch.full((8,), 1024.0, dtype=BF16), torch.ones(8, dtype=BF16, requires_grad=True)

    def step(_: Changes) -> None:
        y, z = x, weight * 1024.0
        for _ in range(3):
            y, z = y + 1.0, z + 1.0

    assert not any(event.goes_on for event in changes_of(step))


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_of_torchs(fused: bool) -> None:
    model = nn.Linear(16, 16).bfloat16()
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=1e-2, fused=fused)
    model(torch.randn(8, 16, dtype=BF16)).float().square().mean().backward()

    def step(changes: Changes) -> None:
        changes.steps(optimizer)
        optimizer.step()
        changes.steps(None)

    events = [event for event in changes_of(step) if event.stayed >= 256]
    assert events and all(event.optimizer is optimizer for event in events)
    assert all(event.stayed >= 0.5 * event.moved for event in events)


@pytest.mark.parametrize("foreach", [False, True])
def test_moments_and_weights_are_counted_apart(foreach: bool) -> None:
    """Both are multiplied in the one line of the script's that steps: by 0.999, and by a factor that rounds to 1."""
    weight = nn.Parameter(torch.ones(64, dtype=BF16))
    optimizer = torch.optim.AdamW([weight], lr=1e-5, weight_decay=1e-2, foreach=foreach)
    weight.grad = torch.full((64,), 0.5, dtype=BF16)
    optimizer.step()

    def step(changes: Changes) -> None:
        changes.steps(optimizer)
        optimizer.step()
        changes.steps(None)

    storages = {key_of(weight): 1 - 1e-7, key_of(optimizer.state[weight]["exp_avg_sq"]): 0.999}
    events = [event for event in changes_of(step) if event.op == "mul"]
    assert {next(iter(event.storages)): event.by for event in events} == pytest.approx(storages, abs=1e-9)
    assert all(event.moved <= 64 for event in events)


def test_a_count() -> None:
    seen = torch.tensor(256.0, dtype=BF16)
    event = _event(changes_of(lambda _: seen.add_(1)), "add")
    assert event.counts and event.by == 1 and event.stayed == 1
    assert not _event(changes_of(lambda _: seen.add_(0.25)), "add").counts


def _rounded_stochastically(target: Tensor, update: Tensor) -> None:
    bits = (target.float() + update).view(torch.int32)
    target.copy_((bits + torch.randint_like(bits, 1 << 16)).bitwise_and(-65536).view(torch.float32))


def test_stochastic_rounding_by_hand_loses_nothing() -> None:
    weight = nn.Parameter(torch.ones(4096, dtype=BF16))
    optimizer = torch.optim.SGD([weight], lr=1e-3)

    def step(changes: Changes) -> None:
        changes.steps(optimizer)
        with torch.no_grad():
            _rounded_stochastically(weight, torch.full((4096,), -5e-4))
        changes.steps(None)

    assert sum(event.stayed for event in changes_of(step)) == 0


@pytest.mark.parametrize("inside", [False, True])
def test_masters_that_are_copied_to_16_bits(inside: bool) -> None:
    weight = nn.Parameter(torch.ones(64, dtype=BF16))
    master = nn.Parameter(torch.full((64,), 1.0001))
    optimizer = torch.optim.SGD([master], lr=1e-3)

    def step(changes: Changes) -> None:
        if inside:
            changes.steps(optimizer)
        with torch.no_grad():
            weight.copy_(master)
        changes.steps(None)

    assert [event for event in changes_of(step) if event.stayed] == []


def test_an_update_that_is_computed_in_float32_and_copied_is_lost() -> None:
    weight = nn.Parameter(torch.ones(64, dtype=BF16))
    optimizer = torch.optim.SGD([weight], lr=1e-3)

    def step(changes: Changes) -> None:
        changes.steps(optimizer)
        with torch.no_grad():
            weight.copy_(weight.float() - 1e-4)
        changes.steps(None)

    event = _event(changes_of(step), "copy")
    assert (event.moved, event.stayed, event.optimizer) == (64, 64, optimizer)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_preamps_own_steps_are_left_out(rounding: str) -> None:
    model = nn.Linear(16, 16).bfloat16()
    optimizer = preamp.optim.AdamW(model.parameters(), lr=1e-5, master=None, rounding=rounding)
    model(torch.randn(8, 16, dtype=BF16)).float().square().mean().backward()

    def step(changes: Changes) -> None:
        changes.steps(optimizer)
        optimizer.step()
        changes.steps(None)

    assert changes_of(step) == []


def test_gradients_that_are_added_up() -> None:
    model = nn.Linear(4, 1, bias=False).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(changes: Changes) -> None:
        for _ in range(600):
            model(torch.ones(1, 4, dtype=BF16)).sum().backward()
        changes.steps(optimizer)
        changes.steps(None)

    (event,) = changes_of(step)
    assert event.is_gradient and event.times >= 599
    assert event.error == pytest.approx(1 - 256 / 600, rel=0.05)


# -- the script has the same numbers as without


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()))

    def inner(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(self.norm(x)))))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().float().mean()
        if self.how.startswith("checkpoint") and self.training:
            return x + checkpoint(self.inner, x, use_reentrant=self.how == "checkpoint reentrant")
        return x + self.inner(x)


def _trained(how: str, observe: bool) -> list[Tensor]:
    """Losses, gradients, weights, states of the optimizer and of the random numbers after three steps."""
    torch.manual_seed(5)
    low = how == "half weights"
    model = nn.Sequential(nn.Linear(8, 16), Block(how), nn.Dropout(0.1), nn.Linear(16, 4))
    model = model.bfloat16() if low else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Tensor] = []
    changes = Changes()

    def region() -> Any:
        if how == "preamp region":
            return preamp.autocast("cpu", dtype=BF16)
        return torch.autocast("cpu", HALF if how == "float16" else BF16, enabled=not low)

    def step() -> None:
        x = torch.randn(6, 8)
        with region():
            loss = model(x.bfloat16() if low else x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        found.extend(p.grad.clone() for p in model.parameters())
        changes.steps(optimizer)
        optimizer.step()
        changes.steps(None)
        model.eval()
        with torch.no_grad(), region():
            found.append(model(x.bfloat16() if low else x).float())
        model.train()
        found.append(loss.detach())

    for _ in range(3):
        if observe:
            shadowed = Shadowed()
            observed(step, [shadowed, changes], model)
            assert shadowed.operators > 40
        else:
            step()
    found += [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    found += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return [*found, torch.random.get_rng_state()]


@pytest.mark.parametrize(
    "how",
    ["bfloat16", "float16", "half weights", "preamp region", "checkpoint reentrant", "checkpoint"],
)
def test_the_same_bits(how: str) -> None:
    alone, beside = _trained(how, False), _trained(how, True)
    assert len(alone) == len(beside)
    for ours, theirs in zip(alone, beside, strict=True):
        assert ours.dtype is theirs.dtype and torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_is_found_forward(reentrant: bool) -> None:
    x = torch.full((64,), 1e-4, dtype=HALF, requires_grad=True)

    def inner(x: Tensor) -> Tensor:
        return (x * x).float() + x

    facts = facts_of(lambda: checkpoint(inner, x, use_reentrant=reentrant).sum().backward())
    assert [(fact.kind, fact.op) for fact in facts if fact.place.direction == "forward"] == [("lost", "mul")]
    assert facts[0].place.line == line_of(inner, "x * x")


def test_without_gradients() -> None:
    with torch.no_grad():
        (fact,) = facts_of(lambda: torch.full((64,), 1e-4, dtype=HALF).square())
    assert fact.kind == "lost"
    with torch.inference_mode():
        (fact,) = facts_of(lambda: torch.full((64,), 1e-4, dtype=HALF).square())
    assert fact.kind == "lost"


def test_through_a_region_of_torchs_and_back() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(32, 8)

    def step() -> None:
        with torch.autocast("cpu", BF16):
            loss = model(x).float().square().mean()
        loss.backward()

    shadowed, facts = watched(step, model)
    assert facts == []
    for parameter in model.parameters():
        assert parameter.grad is not None
        shadow = shadowed.shadows.find(parameter.grad)
        assert shadow is not None
        assert 1e-5 < relative_error(parameter.grad, shadow) < 0.05
    wide = [p.detach().double().requires_grad_() for p in model.parameters()]
    exact = (torch.tanh(x.double() @ wide[0].t() + wide[1]) @ wide[2].t() + wide[3]).square().mean()
    for parameter, grad in zip(model.parameters(), torch.autograd.grad(exact, wide), strict=True):
        shadow = shadowed.shadows.find(parameter.grad)
        assert shadow is not None and relative_error(shadow, grad) < 1e-6, "the shadows are float32's arithmetic"


def test_what_runs_in_a_module_and_a_region_of_preamps_is_placed() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.half()
            return x * x

    model = nn.Sequential(nn.Identity(), Square())

    def step() -> None:
        with preamp.autocast("cpu", dtype=HALF):
            model(torch.full((64,), 1e-4))

    (fact,) = facts_of(step, model)
    assert (fact.place.module, fact.kind, fact.place.ours) == ("1", "lost", False)


def test_a_remainder_is_blamed_once_something_divides_by_it() -> None:
    x = 60 + torch.linspace(-1, 1, 64).repeat(4, 1)

    def variance(low: Tensor) -> Tensor:
        return low.square().mean(-1) - low.mean(-1).square()

    def divided() -> Tensor:
        return 1 / (variance(x.half()).abs() + 1e-3)

    (fact,) = facts_of(divided)
    assert (fact.kind, fact.op, fact.code) == ("made", "sub", "PA104")
    assert (fact.place.file, fact.place.line) == (__file__, line_of(variance, "low.square()"))
    assert facts_of(lambda: variance(x.half()) + 100) == []
    assert facts_of(lambda: variance(x.half()) / 3) == []
    assert facts_of(lambda: 1 / (variance(x) + 1e-3)) == []


def test_a_running_sum_is_judged_by_its_terms() -> None:
    (fact,) = facts_of(lambda: torch.rand(3000).half().cumsum(0))
    assert (fact.op, fact.code) == ("cumsum", "PA104") and fact.error > 0.25
    assert facts_of(lambda: torch.rand(64).half().cumsum(0)) == []
    assert facts_of(lambda: torch.rand(3000).half().float().cumsum(0)) == []

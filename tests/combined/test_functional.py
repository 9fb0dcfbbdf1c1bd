"""torch.func, double backward and hooks under a session: which dtype and which scale each of them sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

import preamp

from ..releases import TORCH
from ..rows import over
from .runs import LEVELS, LOW, OUTPUT, Net, batch, loss_under, prepared

FP32 = torch.float32

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch.func.jvp's own


class Products(nn.Module):
    """Low, full and promoting operators in a row, of one sample or of many."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(F.gelu(self.first(x)))
        return self.last(torch.cat([hidden[..., :4].softmax(-1), hidden[..., 4:]], -1))


def samples() -> tuple[Tensor, Tensor]:
    x, y = batch(0, 7)
    return x.mean(1), y


def scaled(level: str) -> dict[str, Any]:
    return {"scale": 64.0} if level in ("O1", "O2") else {}


@over(level=LEVELS, inside=[True, False])
def test_vmap_is_the_loop(level: str, inside: bool) -> None:
    """One sample at a time and all at once run the same operators in the same dtypes, up to the order of sums.

    The last layer has no bias: under vmap torch adds one in float32, to the low product, and the sum is float32.
    """
    model, (x, _) = Products(), samples()
    with prepared(model, level) as session:
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def plain(row: Tensor) -> Tensor:
            return functional_call(model, parameters, (row,))

        region = session.autocast()
        one = region(plain) if inside else plain
        run: Callable[[Tensor], Tensor] = vmap(one)
        mapped = run(x) if inside else region(run)(x)
        loop = torch.stack([region(plain)(row) for row in x])
        whole = region(plain)(x)
    assert mapped.dtype is whole.dtype is loop.dtype is OUTPUT[level]
    rough = 8 * torch.finfo(LOW[level]).eps
    assert torch.allclose(mapped, loop, rtol=rough, atol=rough) and torch.allclose(
        mapped, whole, rtol=rough, atol=rough
    )


@over(level=["O1", "O4"], what=["softmax", "layer_norm", "sum", "exp", "matmul", "cat", "einsum"])
def test_rules_hold_under_vmap_and_grad(level: str, what: str) -> None:
    """The dtype that each rule gives, seen from inside of the transformations."""
    low = LOW[level]
    operators: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda t: t.softmax(-1), "layer_norm": lambda t: F.layer_norm(t, (6,)), "sum": lambda t: t.sum(),
        "exp": lambda t: t.exp(), "matmul": lambda t: t.float() @ torch.ones(6, 6),
        "einsum": lambda t: torch.einsum("i,ij->j", t.float(), torch.ones(6, 6)),
        "cat": lambda t: torch.cat([t, t.float()]),
    }  # fmt: skip
    expected = {"matmul": low, "einsum": low}.get(what, FP32)
    seen: list[torch.dtype] = []

    def total(row: Tensor) -> Tensor:
        result = operators[what](row)
        seen.append(result.dtype)
        return result.float().sum()

    x, _ = samples()
    with prepared(Products(), level) as session, session.autocast():
        vmap(total)(x.to(low))
        grads = vmap(grad(total))(x.to(low))
        jvp(total, (x[0].to(low),), (x[1].to(low),))
    assert set(seen) == {expected} and grads.dtype is low


@pytest.mark.parametrize(
    ("level", "kind"),
    [*((level, kind) for level in LEVELS for kind in ("layer", "group", "instance")
       if kind != "instance" or level not in ("O1", "O4")),  # has no rule, and fails so in torch.autocast as well
     *((level, f"{kind}, evaluating") for level in ("O2", "O5") for kind in ("batch", "group", "instance"))],
)  # fmt: skip
def test_gradients_by_sample_through_norms(level: str, kind: str) -> None:
    """Where a norm's kernel takes 16-bit activations with float32 weights, torch's rule for it under vmap does not."""
    made: dict[str, Callable[[], nn.Module]] = {
        "layer": lambda: nn.LayerNorm(8),
        "group": lambda: nn.GroupNorm(3, 3),
        "batch": lambda: nn.BatchNorm1d(3),
        "instance": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats="evaluating" in kind),
    }
    model = nn.Sequential(nn.Linear(6, 8), made[kind.split(",")[0]](), nn.Linear(8, 2)).train("evaluating" not in kind)
    x = torch.randn(5, 1, 3, 6)
    with prepared(model, level, **scaled(level)) as session:
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss_of(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
            with session.autocast():
                return functional_call(model, parameters, (row,)).float().pow(2).sum()

        mapped = vmap(grad(loss_of), in_dims=(None, 0))(parameters, x)
        loop = [grad(loss_of)(parameters, row) for row in x]
    rough = 16 * torch.finfo(LOW[level]).eps
    for name, ours in mapped.items():
        theirs = torch.stack([grads[name] for grads in loop])
        assert ours.dtype is theirs.dtype is parameters[name].dtype
        assert (ours - theirs).float().norm() <= rough * theirs.float().norm() + 1e-6, name


@pytest.mark.parametrize("level", LEVELS)
def test_transformations_leave_nothing_in_the_kept_casts(level: str) -> None:
    """A transformation wraps the results of casts: none of them may be found by the next micro-batch."""

    def grads(transformed: bool) -> list[Tensor]:
        model, (x, y) = Products(), samples()
        with prepared(model, level, **scaled(level)) as session:
            for i in range(3):
                with session.autocast():
                    if transformed:
                        grad(lambda row: model(row).float().sum())(x[0])
                        vmap(jacrev(model))(x)
                        if TORCH >= (2, 11):  # torch's own cache of casts keeps these before
                            with torch.no_grad():
                                model(x)
                    loss = F.cross_entropy(model(x), y)
                session.backward(loss, sync=i == 2)
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    ours, theirs = grads(True), grads(False)
    assert len(ours) == len(theirs) == 5 and all(map(torch.equal, ours, theirs))


@over(level=LEVELS, how=["session.grad", "autograd.grad", "autograd.grad, scaled"], checkpointed=[False, True])
def test_gradient_penalty(level: str, how: str, checkpointed: bool) -> None:
    """Double backward; the reference is the same in float32 without a session."""
    from torch.utils.checkpoint import checkpoint

    def through(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)

    def penalised(session: preamp.Session | None) -> list[Tensor]:
        model = Net(through if checkpointed else None) if session is None else session.models[""]
        x, y = batch(0)
        x.requires_grad_()
        region = session.autocast if session is not None else torch.enable_grad
        with region():
            loss = F.cross_entropy(model(x), y)
        if session is None or how == "autograd.grad":
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        elif how == "session.grad":
            (slope,) = session.grad(loss, x)
        else:
            (slope,) = torch.autograd.grad(loss * 64.0, x, create_graph=True)
            slope = slope / 64.0
        assert slope.dtype is FP32 and slope.requires_grad
        with region():
            total = loss + 10.0 * slope.pow(2).sum().sqrt()
        if session is None:
            total.backward()
        else:
            session.backward(total)
            session.unscale_()
        return [p.grad.clone().float() for p in model.parameters() if p.grad is not None]

    true = penalised(None)
    with prepared(Net(through if checkpointed else None), level, **scaled(level)) as session:
        ours = penalised(session)
        assert not session.step().skipped
    flat, truth = torch.cat([g.flatten() for g in ours]), torch.cat([g.flatten() for g in true])
    assert (flat - truth).norm() <= (1e-6 if level == "O0" else 32 * torch.finfo(LOW[level]).eps) * truth.norm()


@pytest.mark.parametrize("level", LEVELS)
def test_what_hooks_see(level: str) -> None:
    """Until `unscale_` or `step` all gradients are scaled, and those of parameters have the parameters' dtype."""
    scale = 64.0 if level in ("O1", "O2") else 1.0
    low, model = LOW[level], Net()
    weight = model.blocks[0].qkv.weight
    resting = low if level in ("O2", "O5") else FP32
    seen: dict[str, Any] = {}
    true: dict[str, Tensor] = {}

    def watch() -> list[Any]:
        return [
            model.blocks[0].register_forward_pre_hook(lambda m, a: seen.update(before=a[0].dtype)),
            model.blocks[0].qkv.register_forward_hook(lambda m, a, out: seen.update(after=out.dtype)),
            model.blocks[0].qkv.register_full_backward_hook(lambda m, i, o: seen.update(full=(i[0].dtype, o[0].dtype))),
            weight.register_hook(lambda g: seen.update(hook=g.clone())),
            weight.register_post_accumulate_grad_hook(lambda p: seen.update(post=p.grad.clone())),
        ]

    def gradient(session: preamp.Session | None) -> Tensor:
        x, y = batch(0)
        if session is None:
            loss = F.cross_entropy(model(x), y)
            return torch.autograd.grad(loss, weight)[0]
        with session.autocast():
            hidden = model.first(x)
            hidden.register_hook(lambda g: seen.update(activation=g))
            for block in model.blocks:
                hidden = block(hidden)
            loss = F.cross_entropy(model.head(hidden.mean(1)), y)
        loss.register_hook(lambda g: seen.update(loss=g.clone()))
        session.backward(loss)
        assert weight.grad is not None
        return weight.grad

    true["weight"] = gradient(None)
    with prepared(model, level, **scaled(level)) as session:
        handles = watch()
        if level in ("O2", "O5"):
            model.first.register_forward_pre_hook(lambda m, a: (a[0].to(low),))  # the root's cast, which we go round
        resting_gradient = gradient(session).clone()
        session.unscale_()
        made_true = weight.grad
        assert made_true is not None and made_true.dtype is FP32
        for handle in handles:
            handle.remove()
    assert seen["loss"] == scale
    assert seen["after"] is low and seen["full"] == (low if level in ("O2", "O5") else seen["full"][0], low)
    assert seen["before"] is low and seen["activation"].dtype is low
    for name in ("hook", "post"):
        assert seen[name].dtype is resting and torch.equal(seen[name], resting_gradient), name
    rough = 32 * torch.finfo(low).eps
    for value in (made_true, seen["post"].float() / scale):
        assert (value - true["weight"]).norm() <= rough * true["weight"].norm()


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_that_change_what_passes(level: str) -> None:
    """A hook that halves gradients halves the true ones, and a forward hook's result goes on in its dtype."""

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def grads(hooked: bool) -> dict[str, Tensor]:
        model, (x, y) = Net(), batch(0)
        with prepared(model, level, **scaled(level)) as session:
            if hooked:
                model.head.weight.register_hook(lambda g: g / 2)
                model.head.bias.register_post_accumulate_grad_hook(halve)
                model.blocks[2].register_forward_hook(lambda m, a, out: out * 1)
            session.backward(loss_under(session, model)(x, y))
            session.unscale_()
            return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    ours, theirs = grads(True), grads(False)
    for name, gradient in theirs.items():
        assert torch.equal(ours[name] * (2 if name.startswith("head") else 1), gradient), name

"""Calls of a session in an order that torch's own objects allow: right, or an error before harm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.errors import PreampWarning, SessionError

from ..releases import TORCH
from ..rows import over

SCALED, PLAIN = ("O1", "O2"), ("O0", "O4", "O5")
LIBRARIES = {"torch": torch.optim, "preamp": preamp.optim}


class Run:
    """One linear layer with SGD under a level, beside what plain float32 gives."""

    def __init__(self, level: str, library: str = "torch", *, layers: int = 1, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(layers)))
        self.start = [p.detach().clone() for p in self.model.parameters()]
        sgd = LIBRARIES[library].SGD
        self.optimizers = [sgd(layer.parameters(), lr=0.1) for layer in self.model]
        scale = {"scale": 1024.0} if level in SCALED else {}
        given: Any = self.optimizers if layers > 1 else self.optimizers[0]
        self.session = preamp.prepare(self.model, given, level=level, **scale, **options)

    def loss(self, seed: int = 1) -> Tensor:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
        with self.session.autocast():
            return self.model(x).float().square().mean()

    def moved(self) -> list[Tensor]:
        with self.session.full_precision(values_only=True):
            now = [p.detach().clone() for p in self.model.parameters()]
        self.session.close()
        return [a - b for a, b in zip(now, self.start, strict=True)]

    def true_step(self, *seeds: int) -> list[Tensor]:
        """What a step of the sum of losses moves, in float32."""
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in self.start))
        for parameter, value in zip(model.parameters(), self.start, strict=True):
            parameter.data.copy_(value)
        for seed in seeds:
            model(torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        return [-0.1 * p.grad for p in model.parameters()]  # type: ignore[operator]

    def check(self, *seeds: int) -> None:
        for seen, right in zip(self.moved(), self.true_step(*seeds), strict=True):
            assert (seen - right).norm() < 0.02 * right.norm(), f"{seen.norm():.5f} for {right.norm():.5f}"

    def unmoved(self) -> None:
        assert not any(each.any() for each in self.moved())


@over(level=[*SCALED, *PLAIN], library=LIBRARIES, how=["closure", "closure by name", "hook"])
def test_a_step_whose_backward_begins_inside_it(level: str, library: str, how: str) -> None:
    run = Run(level, library)
    (optimizer,) = run.optimizers

    def closure() -> Tensor:
        loss = run.loss()
        run.session.backward(loss)
        return loss

    def step() -> None:
        if how == "hook":
            run.model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
            closure()
        else:
            optimizer.step(closure) if how == "closure" else optimizer.step(closure=closure)

    masters = level in ("O2", "O5") and library == "torch"
    if level in SCALED or masters:
        with pytest.raises(SessionError, match=r"step\("):
            step()
        run.unmoved()
    else:
        step()
        run.check(1)


@over(level=[*SCALED, *PLAIN], library=LIBRARIES, backward=["session", "loss"])
def test_a_closure_of_an_optimizer_that_the_session_does_not_have(level: str, library: str, backward: str) -> None:
    """Its gradients come inside the step: scaled, or of 16-bit copies."""
    run = Run(level, library)
    other = LIBRARIES[library].SGD(run.model.parameters(), lr=0.1)

    def closure() -> Tensor:
        loss = run.loss()
        run.session.backward(loss) if backward == "session" else loss.backward()
        return loss

    if level in SCALED or level == "O5":
        with pytest.raises(SessionError, match=r"does not have.*inside session\.full_precision"):
            other.step(closure)
        run.unmoved()
    else:
        other.step(closure)
        run.check(1)


@over(level=[*SCALED, *PLAIN], library=LIBRARIES, whose=["own", "other"], how=["step", "closure"],
      backward=["session", "loss"])  # fmt: skip
def test_steps_by_the_caller_in_full_precision(level: str, library: str, whose: str, how: str, backward: str) -> None:
    run = Run(level, library)
    mine = run.optimizers[0] if whose == "own" else LIBRARIES[library].SGD(run.model.parameters(), lr=0.1)

    def closure() -> Tensor:
        loss: Tensor = run.model(torch.randn(16, 8, generator=torch.Generator().manual_seed(1))).square().mean()
        run.session.backward(loss) if backward == "session" else loss.backward()
        return loss

    def step() -> None:
        with run.session.full_precision():
            if how == "step":
                closure()
            mine.step(closure) if how == "closure" else mine.step()

    if level in SCALED and backward == "session":
        with pytest.raises(SessionError, match="multiplie"):
            step()
        run.unmoved()
    else:
        step()
        run.check(1)


@over(level=[*SCALED, *PLAIN], library=LIBRARIES, clear=["session", "optimizer", "model", "load", "skip"])
def test_the_rest_of_a_graph_after_gradients_were_read_and_cleared(level: str, library: str, clear: str) -> None:
    """Gradients of each task, one after the other, as PCGrad takes them."""
    run = Run(level, library, layers=2)
    first, second = run.loss(), run.loss(2)
    both = first + second
    run.session.backward(both * float("inf") if clear == "skip" else both, retain_graph=True)
    run.session.unscale_()
    if clear == "load":
        run.session.load_state_dict(run.session.state_dict())
        run.model.zero_grad()
    else:
        if clear == "skip":
            assert run.session.step().skipped
        for each in {"session": [run.session], "model": [run.model]}.get(clear, run.optimizers):
            each.zero_grad()
    run.session.backward(both)
    run.session.step()
    run.check(1, 2)


@over(level=[*SCALED, *PLAIN], library=LIBRARIES)
def test_steps_of_the_session_in_hooks_of_a_backward_pass(level: str, library: str) -> None:
    run = Run(level, library, layers=2)
    for layer, optimizer in zip(run.model, run.optimizers, strict=True):
        layer.weight.register_post_accumulate_grad_hook(lambda _, o=optimizer: (run.session.step(o), None)[1])
    run.session.backward(run.loss())
    run.check(1)


@pytest.mark.parametrize("level", [*SCALED, *PLAIN])
def test_a_session_without_an_optimizer(level: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4, bias=False)
    session = preamp.prepare(model, None, level=level)
    x = torch.randn(4, 8, requires_grad=True)
    with session.autocast():
        loss = model(x).float().square().mean()
    if level in ("O0", "O4"):
        session.backward(loss)
        assert model.weight.grad is not None and model.weight.grad.isfinite().all()
    else:
        (gradient,) = session.grad(loss, x, create_graph=False)
        assert gradient.any()
        with session.autocast():
            loss = model(x).float().square().mean()
        with pytest.raises(SessionError, match=r"prepared without an optimizer.*session\.grad"):
            session.backward(loss)
        with pytest.raises(SessionError, match="prepared without an optimizer"):
            session.scale(loss)
    session.close()


@over(level=[*SCALED, *PLAIN], library=LIBRARIES, call=["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_out_of_time(level: str, library: str, call: str) -> None:
    run = Run(level, library)
    clip = getattr(run.session, call)
    with pytest.raises(SessionError, match=r"after session\.backward\(loss\) and before session\.step\(\)"):
        clip(1e-3)
    for seed in (1, 2):
        loss = run.loss(seed)
        run.session.backward(loss)
        clip(1e3)
        run.session.step()
        with pytest.raises(SessionError, match=r"after session\.backward"):
            clip(1e-3)
    run.session.zero_grad()
    with pytest.raises(SessionError, match=r"after session\.backward"):
        clip(1e-3)
    run.session.close()


@over(level=PLAIN, library=LIBRARIES)
def test_a_loss_backward_of_ones_own_is_right_without_a_scale(level: str, library: str) -> None:
    run = Run(level, library)
    run.loss().backward()
    assert run.session.clip_grad_norm_(1e9) > 0
    assert not run.session.step().skipped
    with pytest.raises(SessionError, match="since the last step"):
        run.session.step()
    run.check(1)


@pytest.mark.parametrize("level", SCALED)
def test_a_loss_backward_of_ones_own_is_refused_under_a_scale(level: str) -> None:
    run = Run(level)
    run.loss().backward()
    with pytest.raises(SessionError, match=r"make them of session\.scale"):
        run.session.step()
    with pytest.raises(SessionError, match="clear gradients in between"):
        run.session.backward(run.loss())
    run.session.zero_grad()
    run.session.backward(run.loss())
    with pytest.raises(SessionError, match=r"loss\.backward\(\) after session\.backward\(\)"):
        run.loss().backward()
    run.session.zero_grad()
    run.session.backward(run.loss())
    run.session.step()
    run.check(1)


@pytest.mark.parametrize("level", SCALED)
def test_gradients_made_by_hand_of_a_scaled_loss(level: str) -> None:
    run = Run(level)
    (weight,) = run.model.parameters()
    (weight.grad,) = torch.autograd.grad(run.session.scale(run.loss()), [weight])
    run.session.step()
    run.check(1)


@over(level=[*SCALED, *PLAIN], library=LIBRARIES, before=[True, False], of=["the session", "the loss", "a scaled loss"])
def test_another_backward_after_unscale(level: str, library: str, before: bool, of: str) -> None:
    run = Run(level, library)
    first, second = run.loss(1), run.loss(2)
    scaled = run.session.scale(second) if of == "a scaled loss" and level in PLAIN else None
    run.session.backward(first)
    run.session.unscale_()
    if not before:
        second = run.loss(2)
    try:
        if of == "the session":
            run.session.backward(second)
        elif of == "the loss":
            second.backward()
        else:
            (run.session.scale(second) if scaled is None else scaled).backward()
        run.session.step()
    except SessionError:
        assert level in SCALED and of == "the loss" and not before
        run.session.zero_grad()
        run.unmoved()
        return
    run.check(1, 2)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_late_gradient_that_is_not_finite_skips_the_step(level: str) -> None:
    run = Run(level)
    first, second = run.loss(1), run.loss(2) * float("inf")
    run.session.backward(first)
    run.session.unscale_()
    second.backward()
    assert run.session.step().skipped
    run.unmoved()


@over(level=[*SCALED, *PLAIN], library=LIBRARIES)
def test_one_optimizer_stepped_twice(level: str, library: str) -> None:
    run = Run(level, library, layers=2)
    a, b = run.optimizers
    run.session.backward(run.loss())
    run.session.step(a)
    if level in SCALED:
        with pytest.raises(SessionError, match="a second time after one"):
            run.session.step(a)
        run.session.step(b)
        run.check(1)
    else:
        run.session.step(a)
        run.session.step(b)
        (moved, _), (right, _) = run.moved(), run.true_step(1)
        assert (moved - 2 * right).norm() < 0.02 * right.norm()


@over(level=[*SCALED, *PLAIN], library=LIBRARIES, between=["step", "clipped step", "load", "unscale and load"])
def test_gradients_that_nobody_clears_while_the_scale_changes(level: str, library: str, between: str) -> None:
    """Later ones are added to them, as in torch: to those that a step has used, or that come before a load."""
    scale = {"scale": preamp.DynamicScale(init_scale=2.0**8, growth_interval=1)} if level in SCALED else {}
    torch.manual_seed(0)
    model, reference = nn.Linear(8, 8), nn.Linear(8, 8)
    reference.load_state_dict(model.state_dict())
    start = [p.detach().clone() for p in model.parameters()]
    run, plain = LIBRARIES[library].SGD(model.parameters(), lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    with preamp.prepare(model, run, level=level, **scale) as session:
        early = copy.deepcopy(session.state_dict())
        for turn in range(4):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(turn))
            with session.autocast():
                loss = model(x).float().square().mean()
            session.backward(loss)
            reference(x).square().mean().backward()
            if between == "clipped step":
                session.clip_grad_norm_(0.01)
                torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
            if "step" in between or turn == 3:
                session.step()
                plain.step()
            elif turn == 1:
                if between == "unscale and load":
                    session.unscale_()
                masters = copy.deepcopy(session.state_dict()["masters"])
                losses = {"loss": {**early["losses"]["loss"], **({"scale": 2.0**5} if level in SCALED else {})}}
                session.load_state_dict({**early, "losses": losses, "masters": masters})
    for seen, right, was in zip(model.parameters(), reference.parameters(), start, strict=True):
        assert (seen - right).norm() < 0.02 * (right - was).norm()


@over(level=[*SCALED, *PLAIN], library=LIBRARIES)
def test_an_optimizer_without_gradients(level: str, library: str) -> None:
    run = Run(level, library, layers=2)
    with run.session.autocast():
        loss = run.model[0](torch.randn(4, 8)).float().square().mean()
    run.session.backward(loss)
    run.session.step(run.optimizers[0])
    if level in SCALED:
        with pytest.raises(SessionError, match=r"need not be stepped: leave it out"):
            run.session.step(run.optimizers[1])
    else:
        assert not run.session.step(run.optimizers[1]).skipped
    moved = run.moved()
    assert moved[0].any() and not moved[1].any()


@over(level=[*SCALED, *PLAIN], library=LIBRARIES, read=["not", "unscale_", "clip_grad_norm_", "clip_grad_value_"],
      group=["new", "same", "another"], names=["", "ab"])  # fmt: skip
def test_parameters_that_join_between_backward_and_step(
    level: str, library: str, read: str, group: str, names: str
) -> None:
    """With gradients as backward left them; those that leave are not stepped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    start = [p.detach().clone() for p in model.parameters()]
    model[1].weight.requires_grad_(False)
    optimizer = LIBRARIES[library].SGD(model[0].parameters(), lr=0.1)
    scale: Any = {"scale": dict.fromkeys(names, 1024.0) or 1024.0} if level in SCALED else {}
    with preamp.prepare(model, optimizer, level=level, losses=tuple(names) or "loss", **scale) as session:
        model[1].weight.requires_grad_(True)
        for name in names or [None]:
            with session.autocast():
                loss = model(torch.ones(4, 8)).float().square().mean()
            session.backward(loss / max(len(names), 1), name=name)
        if read != "not":
            getattr(session, read)(*((1e3,) if "clip" in read else ()))
        if group == "new":
            optimizer.add_param_group({"params": [model[1].weight]})
        else:
            own = optimizer.param_groups[0]
            own["params"] = [*(own["params"] if group == "same" else ()), model[1].weight]
        session.step()
    reference = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    for parameter, value in zip(reference.parameters(), start, strict=True):
        parameter.data.copy_(value)
    reference(torch.ones(4, 8)).square().mean().backward()
    for index, (now, was, p) in enumerate(zip(model.parameters(), start, reference.parameters(), strict=True)):
        right = 0 if group == "another" and index == 0 else -0.1 * p.grad
        assert (now - was - right).norm() <= 0.02 * p.grad.norm() * 0.1


@over(level=[*SCALED, *PLAIN], library=LIBRARIES, call=["clip_grad_norm_", "clip_grad_value_", "unscale_", "step",
      "zero_grad"])  # fmt: skip
def test_what_is_meant_for_gradients_that_are_put_aside(level: str, library: str, call: str) -> None:
    """Inside full_precision, which has put them aside: an error, and nothing has happened."""
    run = Run(level, library)
    run.session.backward(run.loss())
    aside = pytest.raises(SessionError, match=r"has put the gradients from before it aside")
    with run.session.full_precision(), aside:
        getattr(run.session, call)(*((0.01,) if "clip" in call else ()))
    assert run.session.step().grad_norm > 0.1
    (moved,), (right,) = run.moved(), run.true_step(1)
    assert (moved - right).norm() < 0.02 * right.norm()


@over(level=[*SCALED, *PLAIN], library=LIBRARIES, cleared=["first", "last", "given up"])
def test_whole_steps_in_full_precision(level: str, library: str, cleared: str) -> None:
    run = Run(level, library)
    for seed in (1, 2):
        if cleared == "given up" and seed == 1:
            run.session.backward(run.loss())
            run.optimizers[0].zero_grad()
        with run.session.full_precision():
            if cleared == "first":
                run.optimizers[0].zero_grad()
            run.session.backward(run.model(torch.ones(4, 8)).square().mean())
            run.session.clip_grad_norm_(0.1)
            run.session.step()
            if cleared != "first":
                run.session.zero_grad()
    (moved,) = run.moved()
    assert 0.018 < moved.norm() < 0.0201


CHANGES = {
    "clip": lambda p: torch.nn.utils.clip_grad_norm_(p, 1.0),
    "clamp": lambda p: torch.nn.utils.clip_grad_value_(p, 0.1),
    "halve": lambda p: [each.grad.mul_(0.5) for each in p],
}


@over(level=SCALED, library=LIBRARIES, change=CHANGES, by=["session", "scaler"])
def test_gradients_that_are_clipped_while_scaled_are_told_of(level: str, library: str, change: str, by: str) -> None:
    """As torch.nn.utils.clip_grad_norm_ without unscale_ clips them; what is linear does no harm and is not told."""
    run = Run(level, library)
    scaler = preamp.SessionScaler(run.session)
    parameters = list(run.model.parameters())

    def step(seed: int, *, unscale: bool = False) -> None:
        loss = run.loss(seed)
        run.session.backward(loss) if by == "session" else scaler.scale(loss).backward()
        if unscale:
            run.session.unscale_()
        CHANGES[change](parameters)
        run.session.step()
        run.session.zero_grad()

    step(1, unscale=True)
    if change == "halve":
        step(2)
    else:
        with pytest.warns(PreampWarning, match=r"loss scale 1024.*session\.clip_grad_norm_.*unscale_") as told:
            step(2)
        assert (len(told) == 1 and told[0].filename == __file__) or TORCH < (
            2,
            7,
        )  # whose wrapper has a frame of its own
        step(3)  # once is enough
    run.session.close()

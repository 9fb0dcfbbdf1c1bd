"""Packed storage: the same steps, and parameters that stay ordinary."""

from __future__ import annotations

import copy
import io
import pickle
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import profile

import preamp
from preamp import optim
from preamp.ledger import packed
from preamp.ledger.packed import SMALL

from ..session.toys import loss_of, mlp, same, weights

KINDS = {
    "Adam": lambda p, **k: optim.Adam(p, 1e-2, weight_decay=0.1, **k),
    "AdamW": lambda p, **k: optim.AdamW(p, 1e-2, amsgrad=True, **k),
    "SGD": lambda p, **k: optim.SGD(p, 1e-2, momentum=0.9, nesterov=True, **k),
    "plain SGD": lambda p, **k: optim.SGD(p, 1e-2, **k),
    "Adagrad": lambda p, **k: optim.Adagrad(p, 1e-2, initial_accumulator_value=0.1, **k),
}
EACH = pytest.mark.parametrize("kind", KINDS)


def made() -> list[Parameter]:
    torch.manual_seed(2)
    ordinary = [torch.randn(s) for s in ((4, 3), (7,), (1,), (0, 2), (2, 3, 2, 2), (SMALL + 1,), (5, 5))]
    odd = [torch.randn(6, 4).t(), torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)]
    return [Parameter(t) for t in ordinary + odd]


def give(params: list[Parameter], step: int, skip: int = -1) -> None:
    torch.manual_seed(step)
    for i, p in enumerate(params):
        p.grad = None if i == skip else torch.empty_like(p).copy_(torch.randn(p.shape))


def detached(params: list[Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


@EACH
@pytest.mark.parametrize("how", [None, True])
def test_steps_are_the_same(kind: str, how: bool | None) -> None:
    """To an ulp: torch's kernels round an element at the end of a row otherwise than one in a vector register."""
    results = []
    for flat in (False, how):
        params = made()
        optimizer = KINDS[kind]([{"params": params[:4]}, {"params": params[4:], "lr": 3e-3}], flat=flat)
        for step in range(15):
            give(params, step, skip=1 if step % 4 == 3 else -1)
            optimizer.step()
        states = sorted(optimizer.state_dict()["state"].items())
        results.append((detached(params), [value.clone() for _, state in states for value in state.values()]))
    for part in (0, 1):
        for one, other in zip(results[0][part], results[1][part], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@EACH
def test_in_pieces_through_one_scratch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several shapes, a scalar, a gradient with a graph; steps are counted once, whatever the pieces."""
    results = []
    for piece in (2**18, 16):
        monkeypatch.setattr("preamp.ledger.buckets.PIECE", piece)
        torch.manual_seed(4)
        params = [Parameter(torch.randn(s)) for s in [(4, 3), (7,), (1,), (), (2, 3), (5,), (9,)] * 3]
        before = [p.data_ptr() for p in params]
        optimizer = KINDS[kind](params)
        for step in range(6):
            give(params, step, skip=2 if step == 3 else -1)
            params[1].grad = (params[1] * 2).requires_grad_()
            optimizer.step()
        counts = [float(optimizer.state[p]["step"]) for p in params if "step" in optimizer.state[p]]
        assert [p.data_ptr() for p in params] == before
        results.append((detached(params), counts))
        if piece == 16 and optimizer.counts_steps:
            assert counts == [5.0 if i == 2 else 6.0 for i in range(len(params))]
    for one, other in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert results[0][1] == results[1][1]


@given(
    shapes=st.lists(st.sampled_from([(3,), (8,), (20,), (2, 4), (5, 4), (9, 4), (3, 5), (2, 3, 2)]), min_size=2),
    grain=st.sampled_from([1, 16, 30, 100]),
    flat=st.sampled_from([None, True]),
)
@settings(max_examples=60, deadline=None)
def test_in_however_many_calls_they_are_packed(shapes: list[tuple[int, ...]], grain: int, flat: bool | None) -> None:
    """Every gradient gets to its own parameter; few entries a call, but where all are equal."""
    torch.manual_seed(5)
    params = [Parameter(torch.randn(shape)) for shape in shapes]
    expected = detached(params)
    with patch("preamp.kernels.lists.GRAIN", grain):
        optimizer = optim.SGD(params, 0.5, weight_decay=0.5, flat=flat)
        for step in range(2):
            give(params, step)
            optimizer.step()
            for value, p in zip(expected, params, strict=True):
                assert p.grad is not None
                value -= 0.5 * (p.grad + 0.5 * value)
        for begin, end in packed._runs(sorted(params, key=packed.order)):
            run = sorted(params, key=packed.order)[begin:end]
            assert len({p.shape[1:] for p in run}) == 1
            assert len(run) == 1 or sum(map(Tensor.numel, run)) < grain or len({p.shape for p in run}) == 1
    for value, p in zip(expected, params, strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=1e-6, atol=1e-6)


def test_small_ones_are_packed_and_others_are_not() -> None:
    params = made()
    params += [Parameter(torch.randn(4, 3)), Parameter(torch.randn(4, 4)), Parameter(torch.randn(5, 5))]
    before = [p.data_ptr() for p in params]
    optimizer = optim.AdamW(params)
    give(params, 0)
    optimizer.step()
    assert optimizer._buckets is not None
    small = [b.params for b in optimizer._buckets.all if isinstance(b.where, packed.Packed)]
    assert {id(p) for own in small for p in own} == {id(params[i]) for i in (0, 1, 2, 4, 6, 9, 10, 11)}
    assert [p.data_ptr() for p in params] == before


@pytest.mark.parametrize("how", [None, True])
@pytest.mark.parametrize("scaled", [True, False])
def test_under_scalers_and_sessions(scaled: bool, how: bool | None) -> None:
    results = []
    for flat in (False, how):
        model = mlp()
        optimizer = optim.AdamW(model.parameters(), 1e-2, flat=flat)
        if scaled:
            scaler = preamp.GradScaler("cpu", init_scale=64.0)
            for step in range(6):
                scaler.scale(loss_of(model, step) * (float("inf") if step == 3 else 1.0)).backward()
                if step == 1:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        else:
            with preamp.prepare(model, optimizer, level="O4") as session:
                for step in range(6):
                    with session.autocast():
                        loss = loss_of(model, step)
                    session.backward(loss)
                    session.clip_grad_norm_(0.5)
                    session.step()
                    session.zero_grad()
        results.append(weights(model))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_parameters_stay_ordinary() -> None:
    """state_dict, load_state_dict, deepcopy, pickle, .to, writes, torch.save: and steps go on rightly after each."""

    def run(flat: bool | None) -> list[Tensor]:
        model = mlp()
        optimizer = optim.AdamW(model.parameters(), 1e-2, flat=flat)

        def train(steps: int) -> None:
            for step in range(steps):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()

        train(3)
        state = copy.deepcopy(model.state_dict())
        kept = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kept)
        train(2)
        model.load_state_dict(state)
        train(1)
        with torch.no_grad():
            model[0].weight.mul_(2)
        train(1)
        model.to(torch.float64).to(torch.float32)
        train(2)
        kept.seek(0)
        saved = torch.load(kept, weights_only=True)
        optimizer.load_state_dict(saved["optimizer"])
        model.load_state_dict(saved["model"])
        train(2)
        twin = copy.deepcopy(model)
        train(1)
        assert not same(weights(twin), weights(model))
        assert same(weights(pickle.loads(pickle.dumps(model))), weights(model))
        for p in model.parameters():
            p.data = p.data.clone()
        train(2)
        model[0].weight.requires_grad_(False)
        train(1)
        return weights(model)

    for one, other, third in zip(run(True), run(False), run(None), strict=True):
        torch.testing.assert_close(third, other, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_copies_of_the_optimizer_go_on() -> None:
    params = made()
    optimizer = optim.SGD(params, 1e-2, momentum=0.9, flat=True)
    for step in range(3):
        give(params, step)
        optimizer.step()
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twins = twin.param_groups[0]["params"]
        reference = [Parameter(p.detach().clone()) for p in params]
        plain = optim.SGD(reference, 1e-2, momentum=0.9)
        plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for step in range(3, 6):
            for set_, each in ((twins, twin), (reference, plain)):
                give(set_, step)
                each.step()
        assert not same(detached(params), detached(twins))
        for one, other in zip(twins, reference, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("flat", [False, True, None])
@pytest.mark.parametrize("hook", ["own", "global", "none"])
def test_hooks_see_and_replace_true_gradients(flat: bool | None, hook: str) -> None:
    """A hook before the step may put other gradients in place, and what it sees is unscaled."""
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(2))]
    optimizer = optim.SGD(params, 1.0, flat=flat)
    scaler = preamp.GradScaler("cpu", init_scale=4.0)
    seen: list[float] = []

    def replace(*_: object) -> None:
        seen.append(params[0].grad[0].item())
        params[0].grad = torch.full((3,), 0.25)

    handle = None
    if hook == "own":
        handle = optimizer.register_step_pre_hook(replace)
    elif hook == "global":
        handle = register_optimizer_step_pre_hook(replace)
    try:
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(params[0].sum() * 0.5 + params[1].sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    finally:
        if handle is not None:
            handle.remove()
    expected = 1 - 2 * (0.5 if hook == "none" else 0.25)
    assert params[0].tolist() == [expected] * 3 and params[1].tolist() == [-1.0, -1.0]
    assert seen == ([] if hook == "none" else [0.5, 0.5])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_watches_a_step_is_told(flat: bool, wrapped: bool) -> None:
    """Hooks after it, an optimizer's own and those of all; and profilers, of every step."""
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(2))]
    optimizer = optim.SGD(params, 1.0, flat=flat)
    if wrapped:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    told: list[str] = []
    handles = [
        optimizer.register_step_post_hook(lambda *_: told.append("own")),
        register_optimizer_step_post_hook(lambda *_: told.append("all")),
    ]
    try:
        for step in range(5):
            if step in (3, 4):
                handles.pop().remove()
            give(params, step)
            optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert told == ["own", "all"] * 3 + ["own"]
    with profile(acc_events=True) as seen:
        for step in range(3):
            give(params, step)
            optimizer.step()
    assert [event.count for event in seen.key_averages() if event.key == "Optimizer.step#SGD.step"] == [3]


def test_a_failed_step_leaves_nothing_behind() -> None:
    (param,) = [Parameter(torch.ones(3))]
    optimizer = optim.SGD([param], 1.0)
    scaler = preamp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(param.sum()).backward()
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    handle.remove()
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys() and optimizer._handed is None
    param.grad = torch.full((3,), 0.5)
    optimizer.step()
    assert param.tolist() == [0.5] * 3

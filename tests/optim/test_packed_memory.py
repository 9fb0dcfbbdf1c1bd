"""Parameters are packed for the length of a step: their memory stays theirs, whoever else refers to it."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Parameter

import preamp
from preamp import optim


def step(optimizer: torch.optim.Optimizer, seed: int = 0, without: tuple[int, ...] = ()) -> None:
    torch.manual_seed(seed)
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        gradient = torch.randn(p.shape)
        p.grad = None if i in without else gradient
    optimizer.step()


def places(params: list[Parameter]) -> list[int]:
    return [p.data_ptr() for p in params]


def ordinary(*shapes: tuple[int, ...]) -> list[Parameter]:
    torch.manual_seed(1)
    return [Parameter(torch.randn(shape)) for shape in shapes]


HOLDERS: dict[str, Callable[[Parameter], object]] = {
    "a view": lambda p: p.detach().view(-1),
    "an array": lambda p: p.detach().numpy(),
    "data": lambda p: p.data,
    "a view in a graph": lambda p: torch.ones(2, 4, requires_grad=True) @ p.t(),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_refers_to_their_memory_sees_every_step(holder: str) -> None:
    params = ordinary((4, 4), (4, 4), (8,), (8,))
    kept = HOLDERS[holder](params[1])
    before = places(params)
    optimizer = optim.SGD(params, 0.1)
    step(optimizer)
    assert params[1].data_ptr() == before[1]
    if holder in ("a view", "an array", "data"):
        assert params[1].flatten().tolist() == kept.reshape(-1).tolist()  # type: ignore[attr-defined]
    del kept
    step(optimizer)


def test_memory_of_others_stays_theirs() -> None:
    """Of an array or a buffer torch cannot know who reads it."""
    arrays = [np.ones(16, np.float32) for _ in range(2)]
    buffer = bytearray(64)
    params = [Parameter(torch.from_numpy(array)) for array in arrays]
    params.append(Parameter(torch.frombuffer(buffer, dtype=torch.float32)))
    optimizer = optim.SGD(params, 1.0)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones(16)
        optimizer.step()
    assert [array.tolist() for array in arrays] == [[-1.0] * 16] * 2
    assert np.frombuffer(buffer, np.float32).tolist() == [-2.0] * 16


def test_shared_memory_stays_shared() -> None:
    """Hogwild: a process that steps the parameters of another one must not take them away."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).share_memory()
    before = copy.deepcopy(model.state_dict())
    child = os.fork()
    if child == 0:  # pragma: no cover
        with torch.no_grad():
            optimizer = optim.SGD(model.parameters(), 1.0)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] - 1)


def test_packed_ones_can_be_shared_later() -> None:
    params = ordinary((4, 4), (4, 4))
    optimizer = optim.SGD(params, 0.1)
    step(optimizer)
    for p in params:
        p.share_memory_()
    reference = [Parameter(p.detach().clone()) for p in params]
    step(optimizer, 1)
    step(torch.optim.SGD(reference, 0.1), 1)
    assert all(p.is_shared() for p in params)
    for p, r in zip(params, reference, strict=True):
        torch.testing.assert_close(p, r)


STEPS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": lambda p, **k: optim.Adam(p, 1e-2, **k),
    "AdamW amsgrad": lambda p, **k: optim.AdamW(p, 1e-2, weight_decay=0.1, amsgrad=True, **k),
    "SGD": lambda p, **k: optim.SGD(p, 1e-2, **k),
    "momentum": lambda p, **k: optim.SGD(p, 1e-2, momentum=0.9, weight_decay=0.1, dampening=0.3, **k),
    "nesterov": lambda p, **k: optim.SGD(p, 1e-2, momentum=0.9, nesterov=True, maximize=True, **k),
    "Adagrad": lambda p, **k: optim.Adagrad(p, 1e-2, weight_decay=0.1, **k),
}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_pieces_make_no_difference_to_any_bit(kind: str, scale: float) -> None:
    shapes = [(16,), (7,), (4, 8), (5, 3), (64, 4), (3,), (2, 2, 2, 2), (5, 3), (2, 9), (70, 90), (61, 51), (3001,)] * 2

    def run(piece: int, flat: bool | None) -> list[Tensor]:
        params = ordinary(*shapes)
        optimizer = STEPS[kind](params, flat=flat)
        scaler = preamp.GradScaler("cpu", init_scale=scale)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("preamp.ledger.buckets.PIECE", piece)
            for i in range(6):
                torch.manual_seed(i)
                optimizer.zero_grad()
                loss = sum(((p * torch.randn(p.shape)).sin().sum() for p in params), torch.zeros(()))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return [p.detach().clone() for p in params]

    first = run(2**18, None)
    for piece in (64, 999):
        for one, other in zip(run(piece, True), first, strict=True):
            assert torch.equal(one, other)
    if "Adam" in kind and scale == 1:  # of full vector registers torch's kernels make the same
        for one, other in zip(run(2**18, False), first, strict=True):
            assert one.numel() % 16 or torch.equal(one, other)


def test_what_fills_a_row_is_never_read() -> None:
    """A step that fails with NaN leaves none in the zeros behind gradients."""
    params = ordinary((7,), (3,))
    optimizer = optim.SGD(params, 1e-2)
    optimizer.grad_scale = torch.tensor(float("nan"))
    step(optimizer)
    del optimizer.grad_scale
    with torch.no_grad():
        for p in params:
            p.fill_(1)
    scaler = preamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(sum(p.sum() for p in params)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.skipped and all(bool(p.isfinite().all()) for p in params)


@pytest.mark.parametrize("flat", [None, True])
def test_file_formats_take_them(flat: bool | None, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = optim.Adam(model.parameters(), flat=flat)
    step(optimizer)
    states = {str(i): optimizer.state[p]["exp_avg"] for i, p in enumerate(model.parameters())}
    for tensors in (model.state_dict(), states):
        safetensors.save_file(tensors, tmp_path / "some.safetensors")
        loaded = safetensors.load_file(tmp_path / "some.safetensors")
        assert all(torch.equal(loaded[name], value) for name, value in tensors.items())
        for value in tensors.values():
            one, whole = io.BytesIO(), io.BytesIO()
            torch.save(value, one)
            torch.save(value.detach().clone(), whole)
            assert len(one.getvalue()) == len(whole.getvalue())  # not all the others with it


@pytest.mark.parametrize("kind", ["Adam", "SGD", "Adagrad"])
@pytest.mark.parametrize("flat", [None, True, False])
def test_a_step_is_a_write(kind: str, flat: bool | None) -> None:
    """A second backward pass through a graph of before the step says so, as after a step of torch's optimizers."""
    model = nn.Linear(16, 16)
    optimizer = getattr(optim, kind)(model.parameters(), 0.1, flat=flat)
    x = torch.randn(2, 16, requires_grad=True)
    for _ in range(2):
        loss = model(x).pow(2).sum()
        loss.backward(retain_graph=True)
        versions = [p._version for p in model.parameters()]
        optimizer.step()
        assert all(p._version > v for p, v in zip(model.parameters(), versions, strict=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss


def test_two_optimizers_of_the_same_parameters() -> None:
    params = ordinary((4, 4), (16,), (3,))
    reference = [Parameter(p.detach().clone()) for p in params]
    pair = optim.SGD(params, 0.1), optim.Adam(params, 0.01)
    plain = optim.SGD(reference, 0.1, flat=False), optim.Adam(reference, 0.01, flat=False)
    for i in range(8):
        for optimizer in (*pair, *plain):
            step(optimizer, i)
    for p, r in zip(params, reference, strict=True):
        torch.testing.assert_close(p, r, rtol=1e-6, atol=1e-6)


EVENTS = st.lists(
    st.sampled_from(["step", "without", "hold", "release", "double", "load", "swap", "share", "copy"]), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(events=EVENTS, kind=st.sampled_from(["Adam", "SGD"]), flat=st.sampled_from([None, True]))
def test_whatever_happens_between_steps(events: list[str], kind: str, flat: bool | None) -> None:
    """The same as with each parameter by itself, to an ulp or two."""

    def run(how: bool | None) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 9), nn.Linear(9, 8))
        torch.manual_seed(5)
        for p in model.parameters():
            nn.init.normal_(p)
        make = {"Adam": optim.Adam, "SGD": lambda p, **k: optim.SGD(p, momentum=0.9, **k)}[kind]
        optimizer = make(model.parameters(), lr=0.01, flat=how)
        held: list[Tensor] = []
        for i, event in enumerate(["step", *events, "step", "step"]):
            if event == "step":
                step(optimizer, i)
            elif event == "without":
                step(optimizer, i, without=(i % 8, (i + 3) % 8))
            elif event == "hold":
                held = [p.detach() for p in model.parameters()][::2]
            elif event == "release":
                held = []
            elif event == "double":
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(2)
            elif event == "load":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                model.load_state_dict(copy.deepcopy(model.state_dict()))
            elif event == "swap":
                for p in list(model.parameters())[1::3]:
                    p.data = p.data.clone()
            elif event == "share":
                model.share_memory()
            elif event == "copy":
                model.to(torch.float64).to(torch.float32)
        del held
        return [p.detach().clone() for p in model.parameters()]

    for one, other in zip(run(flat), run(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

"""Accelerate's own loop under `attach` trains as a plain loop with a session, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import preamp
from preamp.errors import SessionError

accelerate: Any = pytest.importorskip("accelerate")
from preamp.integrations.accelerate import attach  # noqa: E402

from . import loops  # noqa: E402
from .conftest import forget_accelerate  # noqa: E402
from .loops import BAD, CASES, CLIP, MAKERS, MICRO, STEPS, data, network, schedule_of  # noqa: E402


def loader(start: int = 0) -> DataLoader[Any]:
    return DataLoader(data()[start * MICRO :], batch_size=None)  # type: ignore[arg-type]


Trained = dict[str, Any]


def told_of(parameters: Any, state: dict[str, Any], losses: list[float], rates: list[float]) -> Trained:
    """What a training leaves behind, in numbers and tensors; names of parameters differ."""
    scales = [
        value for scale in state["losses"].values() for value in scale.values() if isinstance(value, (int, float))
    ]
    return {
        "parameters": parameters, "masters": list(state["masters"].values()), "scales": scales,
        "counts": [state["steps"], state["skipped"]], "losses": losses, "rates": rates,
    }  # fmt: skip


def assert_same(one: Any, other: Any) -> None:
    """Bit for bit, NaN included."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def plain(level: str, kind: str) -> Trained:
    done = loops.plain(level, kind)
    return told_of(done.parameters, done.state, done.losses, done.rates)


def by_accelerate(
    level: str, kind: str, steps: int = STEPS, *, own: bool = False, start: int = 0, folder: Path | None = None,
    load: Path | None = None, closed: bool = False,
) -> Trained:  # fmt: skip
    """Accelerate's loop, from its documentation."""
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=MICRO, cpu=True)
    model = network()
    optimizer = MAKERS[kind](model.parameters())
    if own:
        attached = attach(accelerator, preamp.prepare(model, optimizer, level=level))
    else:
        attached = attach(accelerator, level)
    schedule = schedule_of(optimizer)
    model, optimizer, rows, schedule = accelerator.prepare(model, optimizer, loader(start), schedule)
    if load is not None:
        accelerator.load_state(str(load))
    losses, rates = [], []
    for x, y in rows:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if accelerator.sync_gradients:
            rates.append(optimizer.param_groups[0]["lr"])
            assert optimizer.step_was_skipped == attached.session.last_step.skipped == (len(rates) - 1 + start == BAD)
            if len(rates) + start == steps:
                break
    parameters, state = [p.detach().clone() for p in model.parameters()], copy.deepcopy(attached.session.state_dict())
    if closed:
        attached.close()
    if folder is not None:
        accelerator.save_state(str(folder))
    if not closed:
        attached.session.close()
    return told_of(parameters, state, losses, rates)


@pytest.mark.parametrize(
    ("level", "kind", "own"),
    [*((*case, False) for case in CASES), *((level, "preamp", True) for level in ("O0", "O1", "O5"))],
)
def test_its_loop_is_a_session_loop(level: str, kind: str, own: bool) -> None:
    result = by_accelerate(level, kind, own=own)
    assert_same(result, plain(level, kind))
    assert result["counts"] == [STEPS, 1]


@pytest.mark.parametrize(
    ("level", "kind", "closed"),
    [("O1", "preamp", False), ("O2", "fused", False), ("O5", "preamp", False),
     *((level, "preamp", True) for level in ("O1", "O2", "O5"))],
)  # fmt: skip
def test_a_resumed_run_goes_on_bit_for_bit(level: str, kind: str, closed: bool, tmp_path: Path) -> None:
    by_accelerate(level, kind, 20, folder=tmp_path / "state", closed=closed)
    assert {v.dtype for v in load_file(tmp_path / "state" / "model.safetensors").values()} == {torch.float32}
    assert "masters" not in torch.load(tmp_path / "state" / "scaler.pt", weights_only=True)
    forget_accelerate()
    resumed, whole = by_accelerate(level, kind, start=20, load=tmp_path / "state"), plain(level, kind)
    assert_same(resumed, {**whole, "rates": whole["rates"][20:], "losses": whole["losses"][20 * MICRO :]})


def test_autocast_and_outputs_are_the_sessions() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    attached = attach(accelerator, "O4")
    with pytest.raises(SessionError, match=r"accelerator\.prepare.* makes it"):
        attached.session
    given = network()
    model, _ = accelerator.prepare(given, torch.optim.SGD(given.parameters(), 0.1))
    with attached.session:
        assert model(torch.randn(2, 6)).dtype is torch.float32
        with accelerator.autocast():
            assert torch.randn(2, 2).mm(torch.randn(2, 2)).dtype is torch.bfloat16
        bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert bare is given and bare(torch.randn(2, 6)).dtype is torch.float32
        assert "_original_forward" not in vars(bare)


@pytest.mark.parametrize("own", [False, True], ids=["level", "session"])
def test_after_close_the_loop_is_accelerates_own(own: bool) -> None:
    def trained(accelerator: Any, model: nn.Module, optimizer: Any) -> list[Tensor]:
        for x, y in data()[:6]:
            with accelerator.autocast():
                loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            assert not optimizer.step_was_skipped
        return [p.detach().clone() for p in model.parameters()]

    accelerator, given = accelerate.Accelerator(cpu=True), network()
    optimizer = torch.optim.AdamW(given.parameters(), 1e-2)
    attached = attach(accelerator, preamp.prepare(given, optimizer, level="O5") if own else "O5")
    model, optimizer = accelerator.prepare(given, optimizer)
    attached.close()
    attached.close()
    assert type(optimizer) is accelerate.optimizer.AcceleratedOptimizer and accelerator.scaler is None
    assert model is given and "forward" not in vars(model)
    after = trained(accelerator, model, optimizer)
    forget_accelerate()
    plainly, other = accelerate.Accelerator(cpu=True), network()
    wanted = trained(plainly, *plainly.prepare(other, torch.optim.AdamW(other.parameters(), 1e-2)))
    assert_same(after, wanted)
    accelerator.prepare(network())
    assert not attached.is_open


def test_a_second_optimizer_that_comes_later_is_refused_before_it_steps() -> None:
    accelerator, one, two = accelerate.Accelerator(cpu=True), network(), network()
    attached = attach(accelerator, "O2")
    accelerator.prepare(one, torch.optim.SGD(one.parameters(), 0.1))
    with attached.session, pytest.raises(SessionError, match=r"to one call of accelerator\.prepare"):
        accelerator.prepare(two, torch.optim.SGD(two.parameters(), 0.1))


def test_freed_memory_is_another_session_with_a_loss_scale_of_its_own() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    attached = attach(accelerator, "O2", scale=preamp.DynamicScale(init_scale=2.0**40))
    for _ in range(2):  # as `find_executable_batch_size` goes about it
        accelerator.free_memory()
        given = network()
        model, optimizer = accelerator.prepare(given, torch.optim.SGD(given.parameters(), 0.1))
        assert attached.session.loss_scale() == 2.0**40
        accelerator.backward(model(torch.randn(2, 6)).sum())
        optimizer.step()
        assert optimizer.step_was_skipped and attached.session.loss_scale() < 2.0**40
        assert attached.session.steps == 1 and given[0].weight.dtype is torch.float16
    accelerator.free_memory()
    assert not attached.is_open and given[0].weight.dtype is torch.float32 and "forward" not in vars(given)
    assert type(optimizer) is accelerate.optimizer.AcceleratedOptimizer and not optimizer.step_was_skipped


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.parametrize("level", ["O0", "O5"])
def test_without_gradients_there_is_nothing_to_step(level: str) -> None:
    accelerator, given = accelerate.Accelerator(cpu=True), network()
    attached = attach(accelerator, level)
    plain = torch.optim.SGD(given.parameters(), 0.1)
    model, optimizer, schedule = accelerator.prepare(given, plain, schedule_of(plain))
    for _ in range(2):
        optimizer.step()
        schedule.step()
    assert attached.session.steps == 0 and schedule.scheduler.last_epoch == 2
    accelerator.backward(model(torch.full((2, 6), float("inf"))).sum())
    optimizer.step()
    assert optimizer.step_was_skipped and attached.session.steps == 1
    optimizer.zero_grad()
    optimizer.step()
    assert not optimizer.step_was_skipped and attached.session.steps == 1
    attached.close()


def test_an_optimizer_that_is_prepared_before_its_model() -> None:
    accelerator, given = accelerate.Accelerator(cpu=True), network()
    attached = attach(accelerator, "O5")
    optimizer = accelerator.prepare(torch.optim.SGD(given.parameters(), 0.1))
    given(torch.randn(2, 6)).sum().backward()
    with pytest.raises(SessionError, match="given no model that trains"):
        optimizer.step()
    optimizer.zero_grad()
    alone = accelerator.prepare_optimizer(torch.optim.SGD(network().parameters(), 0.1))
    with pytest.raises(SessionError, match="given no model that trains"):
        alone.step(lambda: None)
    accelerator._optimizers.remove(alone)
    model = accelerator.prepare(given)
    accelerator.backward(model(torch.randn(2, 6)).sum())
    optimizer.step()
    assert attached.session.steps == 1
    attached.close()


def test_two_networks_of_a_gan() -> None:
    accelerator, one, two = accelerate.Accelerator(cpu=True), network(), network()
    attached = attach(accelerator, "O2", scale=8.0)
    one, two, first, second = accelerator.prepare(
        one, two, torch.optim.SGD(one.parameters(), 0.1), torch.optim.SGD(two.parameters(), 0.1)
    )
    before = [p.detach().clone() for p in (*one.parameters(), *two.parameters())]
    for x, y in data()[:4]:
        for model, optimizer in ((one, first), (two, second)):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    assert attached.session.steps == 8 and attached.session.skipped == 0
    attached.close()
    after = [*one.parameters(), *two.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_it_refuses() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(SessionError, match="takes an Accelerator; this is"):
        attach(model, "O5")
    once = accelerate.Accelerator(cpu=True)
    attach(once, "O5")
    with pytest.raises(SessionError, match="a second time"):
        attach(once, "O2")
    forget_accelerate()
    low = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(SessionError, match="leave mixed_precision out"):
        attach(low, "O5")
    forget_accelerate()
    accelerator = accelerate.Accelerator(cpu=True)
    session = preamp.prepare(model, optimizer, level="O2")
    with session:
        with pytest.raises(SessionError, match="options for a new one: scale"):
            attach(accelerator, session, scale=128.0)
        attach(accelerator, session)
        with pytest.raises(SessionError, match="attach\\(\\) a second time"):
            attach(accelerator, session)
        later = accelerate.Accelerator(cpu=True)
        later.prepare(network())
        with pytest.raises(SessionError, match="call it before"):
            attach(later, session)


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_copies_of_a_model_run_after_close_too(level: str) -> None:
    accelerator, x = accelerate.Accelerator(cpu=True), data()[0][0]
    attached, given = attach(accelerator, level), network()
    model, _ = accelerator.prepare(given, torch.optim.SGD(given.parameters(), 0.1))
    early = copy.deepcopy(model)
    with attached.session.full_precision(values_only=True):
        whole = copy.deepcopy(model)
    attached.close()
    assert {p.dtype for p in whole.parameters()} == {torch.float32}
    torch.testing.assert_close(whole(x), model(x), rtol=0, atol=1e-6)
    torch.testing.assert_close(early(x), model(x), rtol=0, atol=0.05)


def test_float32_weights_are_saved_between_steps(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    attached, given = attach(accelerator, "O5"), network()
    model, optimizer = accelerator.prepare(given, MAKERS["preamp"](given.parameters()))
    x, y = data()[0]
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    accelerator.unscale_gradients()
    assert {p.grad.dtype for p in given.parameters()} == {torch.float32}
    optimizer.step()
    with attached.session.full_precision(values_only=True):
        accelerator.save_model(model, tmp_path)
        saved = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    attached.close()
    assert_same(saved, dict(given.state_dict()))
    assert (tmp_path / "model.safetensors").stat().st_size > 4 * sum(p.numel() for p in given.parameters())

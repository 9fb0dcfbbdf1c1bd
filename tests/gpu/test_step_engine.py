"""Steps on a CUDA device: without waiting for it, in compiled code, and by preamp's GradScaler."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from benchmarks.counting import launches
from torch import Tensor, nn

import preamp

from ..session.toys import squares, step_of_squares
from .training import CASES, DEVICE, MAKERS, OPTIMIZERS, batch, network, no_waiting, scaled, spoiled, train_step

pytestmark = pytest.mark.gpu

# -- no waits


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize(("level", "name"), CASES)
def test_a_step_does_not_wait(level: str, name: str, clip: float | None) -> None:
    model = network()
    batches = [spoiled(step, bad=(9,)) for step in range(12)]
    with preamp.prepare(model, MAKERS[name](model.parameters()), level=level, **scaled(level)) as session:
        step = train_step(model, session, clip)
        for x, y in batches[:8]:  # states are made, and parameters are no longer compared with their masters
            step(x, y)
        with no_waiting():
            for x, y in batches[8:]:
                step(x, y)
        assert session.steps == 12
        assert session.skipped == 1
        assert session.last_step is not None and not session.last_step.skipped


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("schedule", ["backoff", "hysteresis"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_without_gradients_is_not_waited_for(name: str, schedule: str, first: bool) -> None:
    """As that of the network whose turn it is not, when two are trained against each other."""
    model, idle = network(), network()
    pair = [MAKERS[name](each.parameters()) for each in ((idle, model) if first else (model, idle))]
    with preamp.prepare([model, idle], pair, level="O2", scale=schedule) as session:
        step = train_step(model, session)
        for index in range(8):
            step(*batch(index))
        ready = [batch(index) for index in range(8, 12)]
        with no_waiting():
            for x, y in ready:
                step(x, y)


# -- writes through .data


@pytest.mark.parametrize("pile", [1, 100, 2**24])
def test_a_write_through_data_is_found_where_values_are_compared(pile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preamp.ledger.audit.PILE", pile)
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model = nn.Sequential(convolution, nn.Flatten(), nn.Linear(16, 3)).to(DEVICE)
    optimizer = preamp.optim.SGD(model.parameters(), 0.0)
    x = torch.ones(2, 3, 4, 4, device=DEVICE)
    with preamp.prepare(model, optimizer, level="O2") as session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with session.full_precision(values_only=True):
            wanted = [parameter.clone() for parameter in model.parameters()]
        for step in range(6):
            squares(session, model, x)
            if step == 2:
                convolution.weight.data[1].mul_(3.0)
                model[2].bias.data[0] = 7.0
                wanted[0][1] = convolution.weight.data[1].float()
                wanted[-1][0] = 7.0
            session.step()
            session.zero_grad()
            torch.cuda.synchronize()
        with session.full_precision(values_only=True):
            assert all(map(torch.equal, model.parameters(), wanted))
    assert any("written through .data" in str(warning.message) for warning in caught)


def test_values_are_compared_in_few_launches() -> None:
    layers = [nn.Linear(8, 8) for _ in range(40)]
    model = nn.Sequential(*layers).to(DEVICE)
    with preamp.prepare(model, preamp.optim.SGD(model.parameters(), 0.1), level="O2") as session:
        counts = []
        for _ in range(40):
            squares(session, model, torch.ones(2, 8, device=DEVICE))
            counts.append(launches(session.step))
            session.zero_grad()
    assert max(counts[8:]) <= min(counts[8:]) + 160  # one by one the 80 parameters took 880 more


# -- compiled


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("name", ["preamp.optim.AdamW", "torch AdamW, fused"])
def test_forward_and_loss_compile_in_one_graph(level: str, name: str) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = network()
    with preamp.prepare(model, OPTIMIZERS[name](model.parameters()), level=level) as session:

        @torch.compile(fullgraph=True)
        def forward(x: Tensor, y: Tensor) -> Tensor:
            with session.autocast():
                return F.cross_entropy(model(x), y)

        losses = []
        for index in range(40):
            loss = forward(*spoiled(index, bad=(20,)))
            session.backward(loss)
            session.clip_grad_norm_(1.0)
            session.step()
            session.zero_grad()
            losses.append(loss.detach())
        assert session.skipped >= 1
    assert float(losses[-1]) < 0.8 * float(losses[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# -- the GradScaler


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_our_scaler_steps_low_parameters_without_waiting(low: torch.dtype) -> None:
    model = network().to(low)
    optimizer, scaler = preamp.optim.AdamW(model.parameters(), 3e-3), preamp.GradScaler(DEVICE)
    losses = []

    def step(index: int) -> None:
        x, y = batch(index)
        loss = F.cross_entropy(model(x.to(low)).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())

    for index in range(4):
        step(index)
    with no_waiting():
        for index in range(4, 60):
            step(index)
    assert float(torch.stack(losses[-10:]).mean()) < 0.8 * float(losses[0])
    assert all(optimizer.state[p]["master"].dtype is torch.float32 for p in model.parameters())


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_gradients_on_another_device_are_refused(level: str) -> None:
    """A kernel would read the host's memory."""
    model = nn.Linear(16, 4).to("cuda")
    with preamp.prepare(model, preamp.optim.AdamW(model.parameters()), level=level) as session:
        for moved in (False, False, True):
            squares(session, model, torch.ones(8, 16, device="cuda"))
            if moved:
                assert model.weight.grad is not None
                model.weight.grad.data = model.weight.grad.data.cpu()
                before = [p.detach().clone() for p in model.parameters()]
                with pytest.raises(preamp.errors.OptimizerError, match="a gradient lies on cpu"):
                    session.step()
                assert all(map(torch.equal, model.parameters(), before))
            else:
                session.step()
            session.zero_grad()


def test_masters_that_somebody_has_are_followed_to_other_memory() -> None:
    """The old memory is kept, so that nothing but its address tells."""
    ends = []
    for moves in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(16, 4).to("cuda")
        with preamp.prepare(model, preamp.optim.AdamW(model.parameters(), 0.1), level="O2", scale=8.0) as session:
            masters, old = {}, []
            for step in range(10):
                if step == 4:
                    masters = session.state_dict()["masters"]
                if step == 7 and moves:
                    old = [master.data for master in masters.values()]
                    for master in masters.values():
                        master.data = master.data.clone()
                step_of_squares(session, model, torch.ones(8, 16, device="cuda"))
            assert len(old) == 2 * moves
            ends.append([p.detach().float() for p in model.parameters()] + [m.clone() for m in masters.values()])
    assert all(map(torch.equal, *ends))

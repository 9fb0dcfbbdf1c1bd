"""preamp.optim as torch.optim: the same numbers, groups, states and protocol."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import preamp
from preamp import optim
from preamp.errors import OptimizerError

from ..session.toys import same
from .pairs import PAIRS, Make

EACH = pytest.mark.parametrize("name", PAIRS)
LOW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
SHAPES = [(3, 4), (1,), (5,), (2, 3, 2, 2), (0, 3)]


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    torch.manual_seed(7)
    made = [Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    made.append(Parameter(torch.randn(2, 4, 3, 3).to(dtype).to(memory_format=torch.channels_last)))
    made.append(Parameter(torch.randn(6, 4).to(dtype).t()))
    return made


def give(params: list[Parameter], step: int, missing: Callable[[int], bool] = lambda i: False) -> None:
    torch.manual_seed(step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape).to(p.dtype)
        p.grad = None if missing(i) else torch.empty_like(p).copy_(grad)


def run(make: Make, steps: int = 20, *, missing: Callable[[int, int], bool] = lambda s, i: False) -> list[Tensor]:
    params = parameters()
    optimizer = make([{"params": params[:3]}, {"params": params[3:], "lr": 3e-3}])
    for step in range(steps):
        give(params, step, lambda i, step=step: missing(step, i))
        optimizer.step()
    return [p.detach() for p in params]


def unfused(make: Make) -> Make:
    """Torch's fused kernels go by address."""

    def made(params: Any) -> torch.optim.Optimizer:
        optimizer = make(params)
        for group in optimizer.param_groups:
            group["fused"] = False
        return optimizer

    return made


@EACH
def test_bit_for_bit_as_torchs_fused(name: str) -> None:
    ours, torchs = PAIRS[name]
    assert same(run(ours), run(torchs))


@EACH
def test_parameters_that_miss_gradients_now_and_then(name: str) -> None:
    """Each counts its own steps, though those that always step together share the counter."""
    ours, torchs = PAIRS[name]

    def missing(step: int, i: int) -> bool:
        return (step * 7 + i * 3) % 5 == 0 or (i == 2 and step < 6)

    if "momentum" not in name:
        assert same(run(ours, missing=missing), run(torchs, missing=missing))
        return
    with pytest.raises(TypeError, match="NoneType"):  # torch's fused SGD cannot; should it learn to, compare with it
        run(torchs, missing=missing)

    for mine, theirs in zip(run(ours, missing=missing), run(unfused(torchs), missing=missing), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@EACH
def test_states_have_torchs_names_and_go_both_ways(name: str) -> None:
    ours, torchs = PAIRS[name]
    made: dict[str, tuple[list[Parameter], torch.optim.Optimizer]] = {}
    for who, make in (("ours", ours), ("torchs", torchs)):
        params = parameters()
        optimizer = make(params)
        for step in range(4):
            give(params, step, lambda i, step=step: i == 1 and step < 2 and "momentum" not in name)
            optimizer.step()
        made[who] = (params, optimizer)
    states = {who: optimizer.state_dict() for who, (_, optimizer) in made.items()}
    for mine, theirs in zip(states["ours"]["param_groups"], states["torchs"]["param_groups"], strict=True):
        assert mine.keys() - theirs.keys() <= {"decoupled_weight_decay"}  # torch before 2.7 has none
        assert theirs == {**{field: mine[field] for field in theirs}, "fused": True}
    assert states["ours"]["state"].keys() == states["torchs"]["state"].keys()
    for key, theirs in states["torchs"]["state"].items():
        mine = states["ours"]["state"][key]
        assert mine.keys() == theirs.keys()
        for field, value in theirs.items():
            assert torch.equal(mine[field], value), (key, field)
    for source, make in (("ours", torchs), ("torchs", ours)):
        params = [Parameter(p.detach().clone()) for p in made[source][0]]
        optimizer = make(params)
        optimizer.load_state_dict(copy.deepcopy(states[source]))
        # `parameters` and gradients lie alike here: torch's fused operators would take the wrong entries of others,
        # and are not what a state of preamp's chooses
        assert source == "torchs" or not any(group["fused"] for group in optimizer.param_groups)
        for group in optimizer.param_groups:
            group["fused"] = True
        others, other = copy.deepcopy(made[source])
        for step in range(4, 8):
            for set_, each in ((params, optimizer), (others, other)):
                give(set_, step)
                each.step()
        assert same([p.detach() for p in params], [p.detach() for p in others])


@EACH
@LOW
def test_low_parameters_alone_have_masters(name: str, dtype: torch.dtype) -> None:
    """Outside a session too: torch's optimizer on float32 copies, rounded after each step."""
    ours, torchs = PAIRS[name]
    params = parameters(dtype)
    copies = [Parameter(p.detach().float()) for p in params]
    mine, theirs = ours(params), torchs(copies)
    for step in range(40):
        give(params, step)
        for p, c in zip(params, copies, strict=True):
            c.grad = p.grad.float()
        mine.step()
        theirs.step()
    assert same([p.detach() for p in params], [c.detach().to(dtype) for c in copies])
    assert all(p.dtype is dtype for p in params)
    assert same([mine.state[p]["master"] for p in params], [c.detach() for c in copies])


@LOW
def test_without_masters_low_parameters_step_as_torch_steps_them(dtype: torch.dtype) -> None:
    params, copies = parameters(dtype), parameters(dtype)
    mine, theirs = optim.AdamW(params, 1e-2, master=None), torch.optim.AdamW(copies, 1e-2, fused=True)
    for step in range(20):
        for set_, each in ((params, mine), (copies, theirs)):
            give(set_, step)
            each.step()
    assert same([p.detach() for p in params], [p.detach() for p in copies])
    assert "master" not in mine.state[params[0]] and mine.state[params[0]]["exp_avg"].dtype is dtype


@LOW
@pytest.mark.parametrize("make", [
    lambda p: optim.SGD(p, 0.125, master=None), lambda p: optim.SGD(p, 0.125, momentum=0.5, master=None),
    lambda p: optim.Adagrad(p, 0.125, master=None), lambda p: optim.AdamW(p, 0.125, eps=2.0**-10, master=None),
])  # fmt: skip
def test_every_element_of_a_low_parameter_moves(make: Any, dtype: torch.dtype) -> None:
    """torch's fused SGD on a CPU moves those at the end of a 16-bit tensor only."""
    param = Parameter(torch.ones(300, dtype=dtype))
    optimizer = make([param])
    for _ in range(3):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert len(param.detach().unique()) == 1 and float(param.detach()[0]) < 0.9


@LOW
def test_loading_keeps_what_autograd_has_of_a_parameter(dtype: torch.dtype) -> None:
    """Parallel wrappers hang hooks on a parameter's accumulator; changing its dtype for a moment makes a new one."""
    param = Parameter(torch.ones(3, dtype=dtype))
    optimizer = optim.AdamW([param], 0.1)
    param.grad = torch.ones_like(param)
    optimizer.step()
    accumulator = param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    calls: list[int] = []
    accumulator.register_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    (param * 1).sum().backward()
    optimizer.load_state_dict(optimizer.state_dict())
    (param * 1).sum().backward()
    assert calls == [1, 1]


def test_a_master_follows_a_parameter_written_from_outside() -> None:
    param = Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = optim.SGD([param], 1e-4)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(param.detach(), torch.ones_like(param)) and float(optimizer.state[param]["master"][0]) < 1
    with torch.no_grad():
        param[0] = 5
    optimizer.step()
    master = optimizer.state[param]["master"]
    assert float(param.detach()[0]) == 5 and float(master[0]) == pytest.approx(5 - 1e-4)
    assert float(master[1]) == pytest.approx(1 - 2e-4), "what was not written keeps its own bits"


def test_float16_parameters_under_our_scaler() -> None:
    """torch's scaler refuses float16 gradients, or steps them without masters; ours unscales them into float32."""
    params = parameters(torch.float16)
    copies = [Parameter(p.detach().float()) for p in params]
    mine, theirs = optim.Adam(params, 1e-2), torch.optim.Adam(copies, 1e-2, fused=True)
    scaler = preamp.GradScaler("cpu", init_scale=2.0**20)
    for step in range(10):
        give(params, step)
        scaler.scale(torch.zeros(()))
        for p, c in zip(params, copies, strict=True):
            p.grad.mul_(2.0**-10)
            c.grad = p.grad.float() * 2.0**-20
        scaler.step(mine)
        scaler.update()
        theirs.step()
    assert same([mine.state[p]["master"] for p in params], [c.detach() for c in copies])


def test_torch_around_it_works() -> None:
    """Schedulers, hooks, closures, named parameters, a learning rate that is a tensor, add_param_group, zero_grad."""
    model = nn.Linear(3, 2)
    optimizer = optim.AdamW(model.named_parameters(), lr=torch.tensor(0.01))
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).pow(2).sum()
        loss.backward()
        return loss.item()

    first = optimizer.step(closure)
    scheduler.step()
    second = optimizer.step(closure)
    assert second < first and seen == ["before", "after"] * 2
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.005)
    extra = Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [("extra", extra)], "lr": 0.5})
    extra.grad = torch.ones(2)
    optimizer.step()
    assert float(extra.detach()[0]) < 1 and int(optimizer.state[extra]["step"]) == 1
    assert int(optimizer.state[model.weight]["step"]) == 3
    optimizer.zero_grad()
    before = extra.detach().clone()
    optimizer.step()
    assert torch.equal(extra, before), "no gradients, no step"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: optim.SGD(p, nesterov=True), "momentum above 0"),
        (lambda p: optim.Adam(p, differentiable=True), "differentiated through"),
        (lambda p: optim.Adam(p, master="fp32"), "master='fp32'"),
    ],
)
def test_bad_arguments(make: Make, says: str) -> None:
    with pytest.raises(OptimizerError, match=says):
        make([Parameter(torch.ones(1))])


def test_gradients_it_cannot_step() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = optim.Adam(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match="SparseAdam"):
        optimizer.step()
    number = Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = optim.Adam([number])
    number.grad = torch.ones_like(number)
    with pytest.raises(OptimizerError, match="complex64"):
        optimizer.step()

"""bfloat16 weights with split masters, and without masters: stochastic rounding."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import preamp
from preamp.errors import OptimizerError, PolicyError
from preamp.kernels import join
from preamp.optim import SGD, Adam, AdamW

from ..session.toys import loss_of, mlp, same, weights

BF16 = torch.bfloat16


def made(*shapes: tuple[int, ...]) -> list[Parameter]:
    torch.manual_seed(5)
    return [Parameter(torch.randn(shape).to(BF16)) for shape in shapes or ((50, 3), (7,), (1,), (0, 2))]


def give(params: list[Parameter], step: int) -> None:
    torch.manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape).to(p.dtype)


def masters(optimizer: torch.optim.Optimizer, params: list[Parameter]) -> list[Tensor]:
    return [join(p.detach(), optimizer.state[p]["master_bits"]) for p in params]


@pytest.mark.parametrize("arguments", [{}, {"amsgrad": True, "maximize": True}, {"weight_decay": 0.1}], ids=str)
def test_split_masters_are_float32_masters_bit_for_bit(arguments: dict[str, object]) -> None:
    params, twins = made(), made()
    split, whole = AdamW(params, 1e-2, master="split", **arguments), AdamW(twins, 1e-2, **arguments)
    for step in range(200):
        for set_, optimizer in ((params, split), (twins, whole)):
            give(set_, step)
            optimizer.step()
    expected = [whole.state[p]["master"] for p in twins]
    assert same(masters(split, params), expected)
    for p, master in zip(params, expected, strict=True):
        assert ((p.detach().float() - master).abs() <= (p.detach().float().abs() * 2.0**-8)).all()


def test_fourteen_bytes_a_parameter() -> None:
    def size(master: str) -> int:
        params = made((1000, 100))
        optimizer = AdamW(params, master=master)
        give(params, 0)
        optimizer.step()
        held = [v for s in optimizer.state.values() for v in s.values()] + [*params, *(p.grad for p in params)]
        return sum(t.numel() * t.element_size() for t in held) // 100_000

    assert (size("split"), size("float32")) == (14, 16)


@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_bits_are_saved(way: str) -> None:
    params = made()
    optimizer: torch.optim.Optimizer = Adam(params, 1e-3, master="split")
    for step in range(5):
        give(params, step)
        optimizer.step()
    if way == "state_dict":
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        twins = [Parameter(p.detach().clone()) for p in params]
        twin: torch.optim.Optimizer = Adam(twins, master="split")
        twin.load_state_dict(torch.load(file, weights_only=True))
    else:
        twin = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        twins = twin.param_groups[0]["params"]
    assert twin.state[twins[0]]["master_bits"].dtype is torch.int16
    assert twin.state[twins[0]]["exp_avg"].dtype is torch.float32
    for step in range(5, 10):
        for set_, each in ((params, optimizer), (twins, twin)):
            give(set_, step)
            each.step()
    assert same(masters(optimizer, params), masters(twin, twins))


def train(session: preamp.Session, model: torch.nn.Module, steps: range) -> list[float]:
    losses = []
    for step in steps:
        with session.autocast():
            loss = loss_of(model, step)
        session.backward(loss)
        session.clip_grad_norm_(1.0)
        session.step()
        session.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_session_with_split_masters() -> None:
    """The same training as with float32 masters, but for ties; saved in the same form, and given back in float32."""
    states, losses, finals = [], [], []
    for master in ("float32", "split"):
        model = mlp()
        optimizer = AdamW(model.parameters(), 1e-2, master=master)
        with preamp.prepare(model, optimizer, level="O5") as session:
            losses.append(train(session, model, range(20)))
            states.append(copy.deepcopy((session.state_dict(), optimizer.state_dict(), model.state_dict())))
            with session.full_precision():
                assert {p.dtype for p in model.parameters()} == {torch.float32}
                inside = {name: p.detach().clone() for name, p in model.named_parameters()}
            losses.append(train(session, model, range(20, 25)))
        finals.append(weights(model))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        named = states[-1][0]["masters"]
        assert same([inside[name] for name in named], list(named.values()))
    assert losses[0] == pytest.approx(losses[2], rel=1e-2)
    for a, b in zip(*finals, strict=True):
        assert torch.allclose(a, b, atol=2e-2)
    for mine, theirs in ((0, 1), (1, 0)):  # a state of one is a state of the other
        model = mlp()
        optimizer = AdamW(model.parameters(), 1e-2, master=("float32", "split")[mine])
        with preamp.prepare(model, optimizer, level="O5") as session:
            session_state, optimizer_state, model_state = states[theirs]
            model.load_state_dict(model_state)
            optimizer.load_state_dict(optimizer_state)
            session.load_state_dict(session_state)
            assert same(list(session.state_dict()["masters"].values()), list(session_state["masters"].values()))
            train(session, model, range(20, 22))


def test_a_weight_written_from_outside_moves_its_master() -> None:
    (param,) = made((8,))
    optimizer = Adam([param], 1e-5, master="split")
    give([param], 0)
    optimizer.step()
    with torch.no_grad():
        param.fill_(3)
    assert (masters(optimizer, [param])[0] - 3).abs().max() <= 3 * 2.0**-8
    optimizer.step()
    assert (param.detach().float() - 3).abs().max() <= 3 * 2.0**-7


def test_stochastic_rounding_keeps_what_rounding_to_nearest_loses() -> None:
    moved = {}
    for rounding in ("nearest", "stochastic"):
        param = Parameter(torch.ones(20_000, dtype=BF16))
        optimizer = Adam([param], 1e-4, master=None, rounding=rounding)
        for _ in range(50):
            param.grad = torch.ones_like(param)
            optimizer.step()
        moved[rounding] = 1 - param.detach().double().mean().item()
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(50e-4, rel=0.05)


def test_chance_can_be_repeated() -> None:
    def run(seed: int) -> list[Tensor]:
        params = made()
        optimizer = AdamW(params, 1e-3, master=None, rounding="stochastic", seed=seed)
        for step in range(10):
            give(params, step)
            optimizer.step()
        assert optimizer.state[params[0]]["exp_avg"].dtype is torch.float32
        return [p.detach() for p in params]

    assert same(run(1), run(1)) and not same(run(1), run(2))


@pytest.mark.parametrize("kind", ["split", "stochastic"])
def test_a_skip_changes_nothing(kind: str) -> None:
    params = made()
    optimizer = AdamW(params, master="split") if kind == "split" else AdamW(params, master=None, rounding=kind)
    scaler = preamp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    for bad in (False, True):
        give(params, 0)
        if bad:
            params[0].grad[3, 1] = float("inf")
            before = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
        scaler.step(optimizer)
        scaler.update()
    assert same([p.detach() for p in params], before[0])
    after = optimizer.state_dict()
    for key, state in before[1]["state"].items():
        assert all(torch.equal(after["state"][key][name], value) for name, value in state.items())


def test_misuse() -> None:
    with pytest.raises(OptimizerError, match="SGD with master='split'"):
        SGD(made(), master="split")
    with pytest.raises(OptimizerError, match="master=None"):
        Adam(made(), rounding="stochastic")
    half = Parameter(torch.ones(2, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    with pytest.raises(OptimizerError, match="float16"):
        Adam([half], master="split").step()
    model = mlp()
    before = weights(model)
    with pytest.raises(PolicyError, match="level='O5'"):
        preamp.prepare(model, Adam(model.parameters(), master="split"), level="O2")
    assert same(weights(model), before)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_do_not_take_the_place_of_stochastic_rounding(level: str) -> None:
    """Nobody would notice that the rounding is not used, but for the memory."""
    model = mlp()
    optimizer = AdamW(model.parameters(), master=None, rounding="stochastic")
    with pytest.raises(PolicyError, match="O5,masters=no"):
        preamp.prepare(model, optimizer, level=level)
    assert all(p.dtype is torch.float32 for p in model.parameters())
    with preamp.prepare(model, optimizer, policy="O5,masters=no") as session:
        session.backward(loss_of(model, 0))
        session.step()
        assert not session.state_dict()["masters"] and not [s for s in optimizer.state.values() if "master" in s]

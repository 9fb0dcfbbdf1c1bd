"""Master weights against a plain-maths reference: float32 leaves, 16-bit copies, gradients divided by the scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import preamp
from preamp.kernels import join

from ..optim.pairs import PAIRS
from ..rows import over
from .toys import MASTER_LEVELS, backward, batch, loss_of, masters_in, mlp, same, step, weights

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD-momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "SGD-fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2),
    "Adam-fused": lambda p: torch.optim.Adam(p, 1e-2, fused=True),
    "Adam-loop": lambda p: torch.optim.Adam(p, 1e-2, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "Adagrad-fused": lambda p: torch.optim.Adagrad(p, 1e-2, fused=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, 1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, 1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}


def reference(make_optimizer, dtype: torch.dtype, scale: float, steps: int) -> list[torch.Tensor]:
    """Masters after training an mlp without norms, by the book."""
    model = mlp(norm=False)
    masters = dict(model.named_parameters())
    optimizer = make_optimizer(masters.values())
    for index in range(steps):
        x, y = batch(index)
        low = {name: p.detach().to(dtype).requires_grad_() for name, p in masters.items()}
        with preamp.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(functional_call(model, low, (x.to(dtype),)).float(), y)
        grads = torch.autograd.grad(loss * scale, list(low.values()))
        for p, g in zip(masters.values(), grads, strict=True):
            p.grad = g.float() * (1 / scale)
        optimizer.step()
    return weights(model)


@over(level=MASTER_LEVELS, name=[*OPTIMIZERS, *PAIRS])
def test_masters_step_as_the_reference_bit_for_bit(level: str, name: str) -> None:
    """Also preamp.optim, handed gradients that are low and scaled, against torch's optimizer on float32 masters."""
    scale = 1024.0 if level == "O2" else 1.0
    dtype = preamp.policy(level).params
    steps = 12 if name not in PAIRS else 20
    ours, torchs = PAIRS[name] if name in PAIRS else (OPTIMIZERS[name], OPTIMIZERS[name])
    expected = reference(torchs, dtype, scale, steps)
    model = mlp(norm=False)
    optimizer = ours(model.parameters())
    with preamp.prepare(model, optimizer, level=level, scale=scale) as session:
        for index in range(steps):
            backward(session, model, index)
            session.step()
            optimizer.zero_grad()
        masters = masters_in(session.state_dict())
        assert same(masters, expected)
        assert all(
            p.dtype is dtype and torch.equal(p, m.to(dtype)) for p, m in zip(model.parameters(), masters, strict=True)
        )
    assert same(weights(model), expected)


def test_lbfgs_is_refused_and_nothing_changes() -> None:
    model = mlp()
    with pytest.raises(preamp.errors.SessionError, match="LBFGS"):
        preamp.prepare(model, torch.optim.LBFGS(model.parameters()), level="O2")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_low_parameter_from_elsewhere_is_adopted() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with preamp.prepare(model, optimizer, level="O5") as session:
        extra = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer.add_param_group({"params": [extra]})
        for index in range(40):  # each update is a quarter of a bfloat16 step: without a master it would be lost
            x, y = batch(index)
            with session.autocast():
                loss = F.cross_entropy(model(x), y) * 0 + (extra * 0.5).sum()
            session.backward(loss)
            session.step()
            session.zero_grad()
        assert torch.allclose(extra.float(), torch.full((3,), 0.98), atol=2**-8)
        assert extra.dtype is torch.bfloat16


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.SparseAdam(p, 0.1)])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_sparse_gradients_add_up(level: str, kind: Any, make: Any) -> None:
    """Over micro-batches, and within one that looks up twice."""

    def run(level: str) -> Tensor:
        torch.manual_seed(0)
        model = kind(9, 8, sparse=True)
        with preamp.prepare(model, make(list(model.parameters())), level=level, scale=64.0) as session:
            for _ in range(3):
                for i in range(3):
                    rows = torch.arange(i, i + 4).view(2, 2)
                    with session.autocast():
                        loss = (model(rows) + model(rows + 1)).float().square().mean()
                    session.backward(loss, sync=i == 2)
                session.clip_grad_norm_(1.0)
                assert not session.step().skipped
                session.zero_grad()
        return model.weight.detach()  # type: ignore[no-any-return]

    assert torch.allclose(run(level), run("O0"), atol=3e-2)


def changed_by_hand(session: preamp.Session, optimizers: list[torch.optim.Optimizer], model: nn.Module) -> None:
    session.unscale_()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)  # after which a sparse one is no longer coalesced
    session.step()
    session.zero_grad()


def stepped_in_turn(session: preamp.Session, optimizers: list[torch.optim.Optimizer], model: nn.Module) -> None:
    session.step(optimizers[1])  # the scale changes after it, and the gradients of the other one follow
    session.zero_grad(optimizer=optimizers[1])
    if session.steps % 2:
        session.step(optimizers[0])
        session.zero_grad(optimizer=optimizers[0])


@pytest.mark.parametrize("end", [changed_by_hand, stepped_in_turn])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_sparse_embedding_trains_as_a_dense_one(level: str, end: Any) -> None:
    def run(sparse: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 8, sparse=sparse), nn.Linear(8, 1))
        optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(each.parameters(), 0.1) for each in model]
        scale = preamp.DynamicScale(64.0, growth_interval=1) if level in ("O1", "O2") else None
        with preamp.prepare(model, optimizers, level=level, scale=scale) as session:
            for _ in range(4):
                with session.autocast():
                    loss = model(torch.tensor([1, 1, 2, 3, 3, 3])).float().square().mean()
                session.backward(loss)
                end(session, optimizers, model)
        return model[0].weight.detach()  # type: ignore[no-any-return]

    assert torch.allclose(run(True), run(False), atol=1e-2)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_write_from_outside_reaches_the_masters(level: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with preamp.prepare(model, optimizer, level=level) as session:
        weight = model[0].weight
        before = session.state_dict()["masters"]["0.weight"].clone()
        with torch.no_grad():
            weight[0].fill_(0.5)
        after = session.state_dict()["masters"]["0.weight"]
        assert torch.all(after[0] == 0.5)
        assert torch.equal(after[1:], before[1:]), "entries nobody wrote keep their 32 bits"


def test_evaluations_do_not_use_up_the_comparisons_of_steps() -> None:
    model = mlp()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.0), level="O5") as session:
        for _ in range(8):
            with session.full_precision():
                pass
        model[0].weight.data.fill_(0.5)
        session.backward(loss_of(model, 0))
        with pytest.warns(preamp.PreampWarning, match=r"\.data"):
            session.step()
        assert bool((session.state_dict()["masters"]["0.weight"] == 0.5).all())


@pytest.mark.parametrize("states", ["float32", "8bit"])
def test_zeroed_weights_of_split_masters_stay_numbers(states: str) -> None:
    """As pruning and padding do. A zero beside the bits of a number just below another weight was NaN."""
    model = nn.Linear(64, 128)
    optimizer = preamp.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, master="split", states=states)
    with preamp.prepare(model, optimizer, level="O5") as session:
        for index in range(2):
            session.backward(model(torch.randn(4, 64)).float().square().mean())
            session.step()
            session.zero_grad()
            if index == 0:
                with torch.no_grad():
                    model.weight[::2] = 0
                with session.full_precision():
                    assert float(model.weight.detach()[::2].abs().max()) < 1e-40
        with session.full_precision():
            assert all(bool(p.isfinite().all()) for p in model.parameters())
            assert 0 < float(model.weight.detach()[::2].abs().max()) < 2e-3


@over(level=["O1", "O2", "O4", "O5"], when=["before", "after"])
def test_averages_of_weights_are_those_of_the_masters(level: str, when: str) -> None:
    """One that moves by a hundredth of a difference stands still in 16 bits; inside full_precision() it moves."""
    model = mlp()
    optimizer = preamp.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
    with preamp.prepare(model, optimizer, level=level, scale=256.0 if level in ("O1", "O2") else None) as session:
        if when == "after":
            with session.full_precision(values_only=True):
                average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
        wanted: list[torch.Tensor] = []
        for index in range(20):
            assert not step(session, model, index).skipped
            with session.full_precision(values_only=True):
                average.update_parameters(model)
                now = [p.detach().clone() for p in model.parameters()]
            wanted = now if index == 0 else [old.lerp(new, 0.01) for old, new in zip(wanted, now, strict=True)]
        for mine, theirs in zip(average.module.parameters(), wanted, strict=True):
            assert mine.dtype is torch.float32
            assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7)
        x, _ = batch(99)
        assert average.eval()(x).dtype is torch.float32


FUSED = {
    "SGD": lambda p: preamp.optim.SGD(p, 0.05, momentum=0.5),
    "AdamW": lambda p: preamp.optim.AdamW(p, 1e-2, eps=1e-4),
    "AdamW, side by side": lambda p: preamp.optim.AdamW(p, 1e-2, eps=1e-4),
    "AdamW, split": lambda p: preamp.optim.AdamW(p, 1e-2, eps=1e-4, master="split"),
    "AdamW, 8 bits": lambda p: preamp.optim.AdamW(p, 1e-2, eps=1e-4, states="8bit"),
    "LAMB": lambda p: preamp.optim.LAMB(p, 1e-2, eps=1e-4),
    "NovoGrad": lambda p: preamp.optim.NovoGrad(p, 1e-2, eps=1e-4),
    "Adagrad": lambda p: preamp.optim.Adagrad(p, 1e-2, eps=1e-4),
    "Lion, split": lambda p: preamp.optim.Lion(p, 1e-3, master="split"),
}


@pytest.mark.parametrize(
    ("level", "name"),
    [(level, name) for level in ("O2", "O5") for name in FUSED if (level, name[-5:]) != ("O2", "split")],
)
@pytest.mark.parametrize("looked_at", [(1,), (0, 3), (0, 1, 2, 3, 4)], ids=str)
def test_gradients_looked_at_now_and_then(level: str, name: str, looked_at: tuple[int, ...]) -> None:
    """After unscale_() parameters hold their masters, in other steps not; some, here the first, are always float32."""
    ends = []
    for looks in ((), looked_at):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
        optimizer = FUSED[name](model.parameters())
        with preamp.prepare(model, optimizer, level=level, scale=64.0 if level == "O2" else None) as session:
            for index in range(5):
                backward(session, model, index)
                if index in looks:
                    session.unscale_()
                session.step()
                session.zero_grad()
                masters = session.state_dict()["masters"]
                low = dict(model.named_parameters())
                if "split" not in name:
                    assert all(torch.equal(low[n].detach(), masters[n].to(low[n].dtype)) for n in masters)
            with session.full_precision():
                ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, rtol=0, atol=1e-7) for a, b in zip(*ends, strict=True))


@over(looks=[False, True], kind=[preamp.optim.SGD, preamp.optim.AdamW, preamp.optim.Lion])
def test_masters_of_24_bits_move_by_less_than_their_spacing(looks: bool, kind: Any) -> None:
    """In the mean, by a step of the kernel's and by one of the float32 masters that `unscale_` shows."""
    model = nn.Linear(64, 64)
    nn.init.ones_(model.weight)
    optimizer = kind(model.parameters(), lr=2e-6, master="split24")
    with preamp.prepare(model, optimizer, level="O5") as session:
        for _ in range(50):
            session.backward(model(torch.ones(1, 64)).float().sum())
            if looks:
                session.unscale_()
            session.step()
            session.zero_grad()
        moved = 1 - masters_in(session.state_dict())[0].double().mean()
    assert float(moved) == pytest.approx(50 * 2e-6, rel=0.1)


@over(level=["O2", "O5"], library=[torch.optim, preamp.optim])
def test_weights_swapped_for_a_reading_and_back_are_trained_on(level: str, library: Any) -> None:
    """Masters follow a parameter to other memory, and back to the memory where it was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    optimizer = library.SGD(model.parameters(), 1e-3)
    inputs = torch.randn(4, 8)
    with preamp.prepare(model, optimizer, level=level, scale=8.0) as session:

        def step() -> None:
            with session.autocast():
                loss = model(inputs).float().square().mean()
            session.backward(loss)
            session.step()
            session.zero_grad()

        for _ in range(8):
            step()
        before = [master.clone() for master in session.state_dict()["masters"].values()]
        kept = [p.data for p in model.parameters()]
        for p in model.parameters():
            p.data = torch.ones_like(p.data)
        with session.full_precision(values_only=True):
            assert all(bool((p == 1).all()) for p in model.parameters())
        for p, data in zip(model.parameters(), kept, strict=True):
            p.data = data
        step()
        after = session.state_dict()["masters"].values()
        assert all(float((a - b).abs().max()) < 0.02 for a, b in zip(before, after, strict=True))


@over(level=MASTER_LEVELS, ours=[True, False])
def test_masters_follow_where_groups_take_turns(level: str, ours: bool) -> None:
    """Parameters of two groups lie in other places of the lists than in the model."""
    model = mlp()
    every = list(model.parameters())
    kind = preamp.optim.SGD if ours else torch.optim.SGD
    optimizer = kind([{"params": every[1::2]}, {"params": every[::2]}], 0.0)
    with preamp.prepare(model, optimizer, level=level) as session:
        for index in range(6):
            step(session, model, index)
            with torch.no_grad():
                every[index % len(every)].fill_(0.5 + index)
            one = every[(index + 1) % len(every)]
            one.data = torch.full_like(one.data, 0.25)  # of another address
            masters = session.state_dict()["masters"]
            for name, param in model.named_parameters():
                kept = masters.get(name, param)
                assert torch.equal(kept.to(param.dtype), param), (index, name)


CASTS = {"all": lambda m: m.float(), "by to": lambda m: m.to(torch.float32), "a part": lambda m: m[0].float()}
STEPPED = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-4),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-4, fused=True),
    "preamp": lambda p: preamp.optim.AdamW(p, 1e-2, eps=1e-4),
    "split": lambda p: preamp.optim.AdamW(p, 1e-2, eps=1e-4, master="split"),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(
    ("level", "make"), [(level, make) for level in ("O2", "O5") for make in STEPPED if (level, make) != ("O2", "split")]
)
def test_a_model_cast_to_float32_inside_a_session_is_trained(level: str, make: str, cast: str) -> None:
    def run(cast: Callable[[Any], Any]) -> tuple[list[Tensor], list[Tensor]]:
        model = mlp()
        with preamp.prepare(model, STEPPED[make](model.parameters()), level=level, scale=128.0) as session:
            cast(model)
            with session.full_precision():
                assert same(weights(model), weights(mlp())), "the masters have all bits"
            for index in range(8):
                assert not step(session, model, index).skipped
            with session.full_precision():
                inside = weights(model)
        return inside, weights(model)

    (low, _), (full, closed) = run(lambda model: None), run(CASTS[cast])
    assert same(full, closed) and all(p.dtype is torch.float32 for p in full)
    for one, other, begun in zip(low, full, weights(mlp()), strict=True):
        assert float((other - one).norm()) <= 0.2 * float((one - begun).norm()), "it moves as without the cast"


def wide_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if hasattr(parameter, "grad_dtype"):  # since torch 2.10
            parameter.grad_dtype = torch.float32


BETWEEN = {
    "nothing": lambda session, model: None,
    "a forward pass": lambda session, model: (session.unscale_(), session.autocast()(model)(batch(1)[0])),
    "another pass": lambda session, model: (session.unscale_(), backward(session, model, 1)),
    "a clipped pass": lambda session, model: (session.clip_grad_norm_(1e9), backward(session, model, 1)),
    "edited": lambda session, model: (session.unscale_(), model[0].weight.grad.mul_(2), backward(session, model, 1)),
    "full precision": lambda session, model: in_full(session, model),
}


def in_full(session: preamp.Session, model: nn.Module) -> None:
    with session.full_precision():
        backward(session, model, 1)


@over(level=("O2", "O3", "O5"), make=("SGD", "preamp"), wide=(*CASTS, "grad_dtype"), between=BETWEEN)
@pytest.mark.filterwarnings("ignore:.*without masters")
def test_float32_gradients_of_16_bit_weights_are_stepped_like_others(
    level: str, make: str, wide: str, between: str
) -> None:
    """A cast to float32 during a session, or `grad_dtype`, makes them: they are not taken for copies of gradients."""
    if level == "O3" and wide in CASTS:
        return

    def run(change: Callable[[Any], Any]) -> list[Tensor]:
        model = mlp()
        with preamp.prepare(model, STEPPED[make](model.parameters()), level=level, scale=128.0) as session:
            change(model)
            for index in range(3):
                backward(session, model, index)
                BETWEEN[between](session, model)
                assert not session.step().skipped
                session.zero_grad()
            backward(session, model, 4)
        return [*weights(model), *(parameter.grad.clone() for parameter in model.parameters())]

    plain = run(lambda model: None)
    for one, other in zip(plain, run(CASTS.get(wide, wide_gradients)), strict=True):
        assert one.dtype is other.dtype is torch.float32
        torch.testing.assert_close(other, one, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("master", ["float32", "split", "split24"])
def test_masters_of_an_optimizer_that_has_stepped_by_itself_are_taken_over(master: str) -> None:
    torch.manual_seed(0)
    x, y = batch(0)
    model = nn.Sequential(nn.Linear(x.shape[1], 32), nn.GELU(), nn.Linear(32, int(y.max()) + 1)).bfloat16()
    optimizer = preamp.optim.AdamW(model.parameters(), lr=1e-3, master=master)
    for _ in range(3):
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    own = "master" if master == "float32" else "master_bits"
    kept = {p: optimizer.state[p][own].clone() for p in model.parameters()}
    with torch.no_grad():
        next(model.parameters())[0].fill_(3.0)  # written since: that wins
    with preamp.prepare(model, optimizer, level="O5") as session:
        masters = session.state_dict()["masters"]
        for name, parameter in model.named_parameters():
            ours = masters[name] if master == "float32" else masters[name][1]
            rows = slice(1, None) if name == "0.weight" else slice(None)
            assert torch.equal(ours[rows], kept[parameter][rows]) and kept[parameter].float().abs().sum() > 0
        wide = masters["0.weight"] if master == "float32" else masters["0.weight"][0]
        assert (wide[0] == 3).all()


@pytest.mark.parametrize("masters", [{}, {"master": None}, {"master": None, "rounding": "stochastic"}], ids=str)
@pytest.mark.parametrize("kind", ["AdamW", "NovoGrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:.*rounds to the nearest", "ignore:.*eps=")
def test_states_that_were_there_before_a_session_without_masters(dtype: torch.dtype, kind: str, masters: Any) -> None:
    """They have what a step needs inside and afterwards, also one number for a parameter without dimensions."""
    if kind == "NovoGrad" and "rounding" in masters:
        masters = {}
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(dtype)
    model.scale = nn.Parameter(torch.ones((), dtype=dtype))
    optimizer = getattr(preamp.optim, kind)(model.parameters(), 1e-2, **masters)

    def backward() -> None:
        (model(torch.randn(8, 4, dtype=model.weight.dtype)) * model.scale).float().square().mean().backward()

    backward()
    optimizer.step()
    for _ in range(2):
        with preamp.prepare(model, optimizer, policy="O5,masters=no") as session:
            optimizer.zero_grad()
            backward()
            session.step()
        optimizer.zero_grad()
        backward()
        optimizer.step()
    assert {float(optimizer.state[p]["step"]) for p in model.parameters()} == {5.0}


def test_step_counts_of_torchs_optimizers_stay_float32() -> None:
    """Of a parameter without dimensions, too: in bfloat16 they would stop at 256."""
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
    model(torch.ones(2, 4)).mul(model.scale).sum().backward()
    optimizer.step()
    with preamp.prepare(model, optimizer, level="O3"):
        assert optimizer.state[model.scale]["step"].dtype is torch.float32


@pytest.mark.parametrize("policy", ["O2,scale=8", "O3", "O5", "O5,masters=no"])
@pytest.mark.filterwarnings("ignore:.*rounds to the nearest")
def test_gradients_from_before_a_session_count(policy: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with torch.no_grad():
        model.weight.zero_()
    model(torch.eye(4)).sum().backward()
    with preamp.prepare(model, optimizer, policy=policy) as session:
        with session.autocast():
            loss = model(torch.eye(4)).sum()
        session.backward(loss)
        session.step()
    assert torch.equal(model.weight, torch.full((4, 4), -1.0))


@pytest.mark.parametrize("options", [{}, {"master": "split"}, {"master": "split24"}], ids=str)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_an_optimizer_goes_on_with_the_masters_of_a_session_that_is_closed(kind: str, options: Any) -> None:
    """Of weights that came in bfloat16, and keep it."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16).bfloat16()
    optimizer = getattr(preamp.optim, kind)(model.parameters(), 1e-4, **options)
    with preamp.prepare(model, optimizer, level="O5") as session:
        for _ in range(3):
            with session.autocast():
                loss = model(torch.randn(8, 16)).float().square().mean()
            session.backward(loss)
            session.step()
            session.zero_grad()
        with session.full_precision(values_only=True):
            kept = model.weight.detach().clone()
    state = optimizer.state[model.weight]
    assert model.weight.dtype is torch.bfloat16 and not torch.equal(model.weight.float(), kept)
    model(torch.zeros(8, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(
        state["master"] if "master" in state else join(model.weight.detach(), state["master_bits"]), kept
    )


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch 2.10 or newer")
@over(level=["O2", "O5"], kind=[torch.optim.SGD, preamp.optim.SGD])
def test_float32_gradients_of_a_thousand_micro_batches(level: str, kind: Any) -> None:
    """In 16 bits their sum stands still long before: a micro-batch adds a thousandth."""

    def moved(wide: bool) -> float:
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        scale = 64.0 if level == "O2" else None
        with preamp.prepare(model, kind(model.parameters(), 1.0), level=level, scale=scale) as session:
            for parameter in model.parameters() if wide else ():
                parameter.grad_dtype = torch.float32
            for index in range(1024):
                with session.autocast():
                    loss = model(torch.ones(1, 4)).float().sum() * 2.0**-10
                session.backward(loss, sync=index == 1023)
            session.step()
        return float(model.weight.detach().mean())

    assert moved(wide=True) == -1.0
    if level == "O5":
        assert moved(wide=False) > -0.5

"""What a loop of somebody else's does beside the session: it is right, or an error before harm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import preamp
from preamp.errors import SessionError

from ..rows import over

LEVELS = ("O1", "O2", "O4", "O5")
LIBRARIES = (torch.optim, preamp.optim)


def batch(seed: int) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))


class Parted(nn.Module):
    """A body with a head, and a head beside it that only the second loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.aside = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).float().square().mean()

    def second(self, x: Tensor) -> Tensor:
        return self.aside(self.body(x).detach()).float().square().mean()


def moved(level: str, library: Any, run: Callable[[preamp.Session, Parted], Any]) -> Tensor:
    model = Parted()
    before = [p.detach().clone() for p in model.parameters()]
    with preamp.prepare(model, library.SGD(model.parameters(), lr=0.1), level=level) as session:
        run(session, model)
        session.step()
    return torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])


def check_moved(level: str, library: Any, run: Callable[[preamp.Session, Parted], Any]) -> None:
    """A loop moves the weights as it does in float32."""
    exact = moved("O0", torch.optim, run)
    assert (moved(level, library, run) - exact).norm() < 0.02 * exact.norm()


def forward(session: preamp.Session, model: Parted) -> tuple[Tensor, Tensor]:
    with session.autocast():
        return model(batch(1)), model.second(batch(2))


@over(level=["O1", "O2"], first=[True, False])
def test_a_plain_backward_is_noticed_whatever_part_it_reaches(level: str, first: bool) -> None:
    def run(session: preamp.Session, model: Parted) -> None:
        loss, second = forward(session, model)
        for plain in (first, not first):
            second.backward() if plain else session.backward(loss)

    with pytest.raises(SessionError, match=r"loss.backward\(\)"):
        moved(level, torch.optim, run)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_gradients_of_masters_that_no_optimizer_of_the_session_steps(level: str) -> None:
    model = Parted()
    with preamp.prepare(model, None, level=level) as session:
        with session.autocast():
            loss = model(batch(1))
        with pytest.raises(SessionError, match="prepared without an optimizer"):
            loss.backward()
        with session.full_precision():
            model(batch(1)).backward()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_in_a_hook_before_all_gradients_have_come(level: str) -> None:
    model = Parted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with preamp.prepare(model, optimizer, level=level) as session:
        before = [p.detach().clone() for p in model.parameters()]
        handle = model.head.weight.register_post_accumulate_grad_hook(lambda _: session.step(optimizer) and None)
        with session.autocast():
            loss = model(batch(1))
        with pytest.raises(SessionError, match=r"inside of session.backward\(\), where \d parameters of SGD"):
            session.backward(loss)
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        handle.remove()


@over(make=[torch.jit.script, lambda m: torch.jit.trace(m, batch(1))], whole=[True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules(make: Callable[[nn.Module], Any], whole: bool) -> None:
    for level in ("O0", "O4", "O2", "O3", "O5"):
        model = make(nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)))
        model = model if whole else nn.Sequential(model, nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if level in ("O2", "O3", "O5"):
            with pytest.raises(SessionError, match=r"scripted or traced by torch\.jit"):
                preamp.prepare(model, optimizer, level=level)
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            continue
        with preamp.prepare(model, optimizer, level=level) as session:
            with session.autocast():
                loss = model(batch(1)).float().square().mean()
            session.backward(loss)
            assert not session.step().skipped


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


NO_MORE: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    "weight_norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "parametrizations": (
        nn.utils.parametrizations.weight_norm,
        lambda module: parametrize.remove_parametrizations(module, "weight"),
    ),
    "back to what it was": (
        lambda module: parametrize.register_parametrization(module, "weight", Halved()),
        lambda module: parametrize.remove_parametrizations(module, "weight", leave_parametrized=False),
    ),
    "prune": (
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
        lambda module: prune.remove(module, "weight"),
    ),
}


@over(how=NO_MORE, level=["O1", "O2", "O3", "O4", "O5"])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_reparametrization_that_is_removed(how: str, level: str) -> None:
    put, take = NO_MORE[how]
    if level == "O3" and how == "back to what it was":
        return  # the weight comes back in the dtype that its parametrization gave it
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    parts = model[:2] if how in ("parametrizations", "back to what it was") else model[:1]
    for module in parts:
        put(module)
    session = preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level)
    with session.autocast():
        model(batch(1))
    for module in parts:
        take(module)
    with session.full_precision():
        exact = model(batch(1))
        assert exact.dtype is torch.float32
    with session.autocast():
        seen = model(batch(1)).float()
    assert (seen - exact).norm() < 0.02 * exact.norm()
    session.close()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (model(batch(1)) - exact).norm() < 0.02 * exact.norm()
    assert [type(module) for module in model] == [nn.Linear, nn.LayerNorm, nn.Linear]


@pytest.mark.parametrize("where", ["full", "between"])
@pytest.mark.parametrize("how", ["weight_norm", "parametrizations", "surgery"])
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_made_of_one_that_is_gone_has_memory_of_its_own(level: str, how: str, where: str) -> None:
    """The optimizer still has the one that is gone, which its master is not to win over."""

    def trained(level: str) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session = preamp.prepare(model, optimizer, level=level)
        for step in range(8):
            if step == 2:
                full = session.full_precision(values_only=True) if where == "full" else contextlib.nullcontext()
                with full:
                    if how == "surgery":
                        old, model[1] = model[1], nn.Linear(8, 4)
                        model[1].weight = nn.Parameter(old.weight.data)
                    else:
                        NO_MORE[how][0](model[1])
                known = {p for group in optimizer.param_groups for p in group["params"]}
                optimizer.add_param_group({"params": [p for p in model.parameters() if p not in known]})
            with session.autocast():
                loss = (model(batch(step)).float() - 1).square().mean()
            session.backward(loss)
            session.step()
            session.zero_grad()
        session.close()
        return model(batch(9)).detach()

    exact = trained("O0")
    assert (trained(level) - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_module_that_is_added_gets_what_its_level_says(level: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with preamp.prepare(model, optimizer, level=level) as session:
        model.extend([nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(4, 4).requires_grad_(False)])
        model[2].register_parameter("wide", nn.Parameter(torch.zeros(2, dtype=torch.float64)))
        optimizer.add_param_group({"params": [p for p in model[1:].parameters() if p.requires_grad]})
        before = model[2].weight.detach().float().clone()
        for _ in range(2):
            with session.autocast():
                loss = model(batch(1)).float().square().mean()
            session.backward(loss)
            session.step()
            session.zero_grad()
        low = session.policy.params
        assert [model[at].weight.dtype for at in range(4)] == [low, torch.float32, low, torch.float32]
        assert model[2].wide.dtype is torch.float64
        assert ("2.weight" in session.state_dict()["masters"]) == session.policy.masters
        assert not torch.equal(model[2].weight.detach().float(), before)
        with session.full_precision():
            assert {p.dtype for p in model.parameters()} == {torch.float32, torch.float64}
            model(batch(1))
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.float64}


@over(level=LEVELS, library=LIBRARIES)
def test_gradients_that_nobody_clears_add_up_as_without_a_scale(level: str, library: Any) -> None:
    def run(session: preamp.Session, model: Parted) -> None:
        for seed in range(3):
            if seed:
                session.step()
            with session.autocast():
                loss = model(batch(seed)) + model.second(batch(seed))
            session.backward(loss)

    check_moved(level, library, run)


class Keeping(torch.optim.SGD):
    """As K-FAC, Shampoo and their kin: it keeps something for all parameters beside the states of each."""

    def step(self, closure: Any = None) -> Any:
        self.state["whole"]["steps"] = self.state["whole"].get("steps", 0) + 1
        self.state.setdefault("name", "own")
        self.state.setdefault("basis", torch.zeros(3))
        return super().step(closure)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_an_optimizer_that_keeps_states_under_names(level: str, tmp_path: Path) -> None:
    model = Parted()
    optimizer = Keeping(model.parameters(), lr=0.1, momentum=0.9)
    with preamp.prepare(model, optimizer, level=level) as session:
        for seed in range(2):
            with session.autocast():
                loss = model(batch(seed))
            session.backward(loss)
            session.step()
            session.zero_grad()
        moments = sum(s["momentum_buffer"].numel() for p, s in optimizer.state.items() if isinstance(p, Tensor))
        assert session.memory().bytes_of("states") == (2 if level == "O3" else 4) * moments + 12
        file = tmp_path / "run.pt"
        preamp.checkpoint.save(file, model=model, optimizer=optimizer, session=session)
        preamp.checkpoint.load(file, model=model, optimizer=optimizer, session=session)
    assert optimizer.state["name"] == "own" and optimizer.state["whole"] == {"steps": 2}

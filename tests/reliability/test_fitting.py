"""States of optimizers that are not those of the parameters they would be loaded for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import preamp
from preamp import checkpoint
from preamp.compat.apex import optimizers as apex_optimizers
from preamp.errors import CheckpointError, OptimizerError

from ..releases import TORCH
from ..rows import check_rows, over


class Old(nn.Module):
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(8, width)
        self.b = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class New(Old):
    """The same two, made in another order."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self._modules = dict(reversed(self._modules.items()))  # type: ignore[assignment]


def of(kind: str) -> Callable[[Any], Any]:
    library, name = kind.split(".")
    options: dict[str, Any] = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    where = {"torch": torch.optim, "preamp": preamp.optim, "apex": apex_optimizers}[library]
    return lambda params: getattr(where, name)(params, lr=1e-3, **options)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    torch.manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 8)).pow(2).mean().backward()
        optimizer.step()


TORCHS = ["Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"]
TORCHS += ["ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
OURS = ("Adagrad", "Adam", "AdamW", "LAMB", "Lion", "NovoGrad", "SGD")
KINDS = [*(f"torch.{name}" for name in TORCHS), *(f"preamp.{name}" for name in OURS)]


@pytest.mark.parametrize("width", [32, 4000])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_in_another_order(tmp_path: Path, kind: str, width: int) -> None:
    model = Old(width)
    optimizer = of(kind)(model.parameters())
    train(model, optimizer)
    checkpoint.save(tmp_path / "a.pt", model=model, optimizer=optimizer)
    other = New(width)
    fresh = of(kind)(other.parameters())
    before = copy.deepcopy([other.state_dict(), fresh.state_dict()])
    with pytest.raises(CheckpointError, match=r"nothing was loaded.*order"):
        checkpoint.load(tmp_path / "a.pt", model=other, optimizer=fresh)
    assert str(before) == str([other.state_dict(), fresh.state_dict()])
    same = Old(width)
    again = of(kind)(same.parameters())
    checkpoint.load(tmp_path / "a.pt", model=same, optimizer=again)
    train(same, again)
    train(model, optimizer)
    assert all(map(torch.equal, same.parameters(), model.parameters()))


@pytest.mark.parametrize("cut", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("way", ["save", "save_sharded"])
@pytest.mark.parametrize("kind", ["preamp.AdamW", "preamp.SGD", "preamp.Lion", "torch.AdamW", "torch.SGD"])
def test_layers_of_one_shape_in_another_order(tmp_path: Path, kind: str, way: str, cut: bool) -> None:
    """Shapes do not tell it: a file refuses them, and a sharded checkpoint finds them by their names."""

    def made(order: Callable[[Any], Any]) -> tuple[nn.Sequential, Optimizer]:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        params = list(order(model.parameters()))
        return model, of(kind)([{"params": params[:2], "lr": 0.5}, {"params": params[2:]}] if cut else params)

    model, optimizer = made(list)
    train(model, optimizer)
    getattr(checkpoint, way)(tmp_path / "a", model, optimizer=optimizer)
    other, fresh = made(lambda params: reversed(list(params)))
    train(other, fresh, 1)
    before = copy.deepcopy([other.state_dict(), fresh.state_dict()])
    if way == "save" or cut:
        told = r"Give the optimizer its parameters in the order" if way == "save" else "Make the groups as they were"
        with pytest.raises(CheckpointError, match=told):
            getattr(checkpoint, way.replace("save", "load"))(tmp_path / "a", model=other, optimizer=fresh)
        assert str(before) == str([other.state_dict(), fresh.state_dict()])
        return
    checkpoint.load_sharded(tmp_path / "a", other, optimizer=fresh)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        states = fresh.state[mine], optimizer.state[theirs]
        assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


class Odd(Optimizer):
    """An optimizer of somebody's own that keeps what it likes."""

    def __init__(self, params: Any, make: Callable[[Tensor], Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.make = make

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing but its states."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["exp_avg"] = self.make(p)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.zeros(()), lambda p: torch.zeros(3, *p.shape[1:]), lambda p: torch.zeros(p.numel()),
        lambda p: [torch.zeros(2), {"k": 1}], lambda p: p.new_zeros(2, *p.shape), lambda p: torch.zeros(7), lambda p: 5,
    ],
    ids=["scalar", "projected", "flat", "nested", "two of them", "alike for all", "number"],
)  # fmt: skip
def test_odd_states_of_other_optimizers_load(tmp_path: Path, make: Callable[[Tensor], Any]) -> None:
    model = Old(32)
    optimizer = Odd(model.parameters(), make)
    optimizer.step()
    checkpoint.save(tmp_path / "a.pt", model=model, optimizer=optimizer)
    other = Old(32)
    fresh = Odd(other.parameters(), make)
    checkpoint.load(tmp_path / "a.pt", model=other, optimizer=fresh)
    assert len(fresh.state) == 4


@over(states=["float32", "8bit"], master=["float32", "split", "split24"])
def test_states_in_8_bits_and_masters(states: str, master: str) -> None:
    def made(model: nn.Module) -> Any:
        return preamp.optim.AdamW(model.parameters(), 1e-3, states=states, master=master)

    model = Old(800).bfloat16()
    optimizer = made(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = optimizer.state_dict()
    for load_as in ("float32", "8bit"):
        twin = Old(800).bfloat16()
        preamp.optim.AdamW(twin.parameters(), 1e-3, states=load_as, master=master).load_state_dict(saved)
        with pytest.raises(OptimizerError, match="order"):
            other = New(800).bfloat16()
            preamp.optim.AdamW(other.parameters(), 1e-3, states=load_as, master=master).load_state_dict(saved)
    for name in saved["state"][0].keys() - {"step"}:
        cut = copy.deepcopy(saved)
        cut["state"][0][name] = cut["state"][0][name].flatten()[:3]
        with pytest.raises(OptimizerError, match=name):
            optimizer.load_state_dict(cut)
    cut = copy.deepcopy(saved)
    cut["state"][0]["step"] = torch.ones(3)
    with pytest.raises(OptimizerError, match="step"):
        optimizer.load_state_dict(cut)


def coded() -> tuple[nn.Module, Any]:
    """A trained layer, and an optimizer whose moments for it are in 8 bits."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = preamp.optim.AdamW(model.parameters(), states="8bit")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).pow(2).mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "kind", ["torch.AdamW", "torch.Adam", "preamp.AdamW", "preamp.LAMB", "preamp.Lion", "apex.FusedAdam"]
)
def test_moments_in_8_bits_are_never_taken_for_moments(tmp_path: Path, kind: str) -> None:
    model, optimizer = coded()
    exact = preamp.optim.AdamW(model.parameters())
    exact.load_state_dict(optimizer.state_dict())
    checkpoint.save(tmp_path / "a.pt", model=model, optimizer=optimizer)
    other = of(kind)(model.parameters())
    checkpoint.load(tmp_path / "a.pt", optimizer=other)
    for name in ("exp_avg", "exp_avg_sq") if "Lion" not in kind else ("exp_avg",):
        assert torch.equal(other.state[model.weight][name], exact.state[model.weight][name])
    assert not {"exp_avg_8bit", "exp_avg_scale"} & other.state[model.weight].keys()


def test_codes_have_no_names_that_others_know() -> None:
    model, optimizer = coded()
    assert not {"exp_avg", "exp_avg_sq"} & optimizer.state[model.weight].keys()
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        other.step()
    other.load_state_dict(preamp.optim.float32_states(optimizer.state_dict()))
    other.step()


@pytest.mark.parametrize("kind", ["torch.AdamW", "preamp.AdamW", "preamp.LAMB"])
@pytest.mark.parametrize("name", ["exp_avg_8bit", "exp_avg_sq_scale"])
@pytest.mark.parametrize("bad", [None, torch.zeros(3), "x"], ids=["none", "short", "text"])
def test_codes_that_fit_no_scales(tmp_path: Path, kind: str, name: str, bad: Any) -> None:
    model, optimizer = coded()
    saved = optimizer.state_dict()
    saved["state"][0][name] = bad
    checkpoint.save(tmp_path / "a.pt", model=model, optimizer=Given(saved))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=name):
        checkpoint.load(tmp_path / "a.pt", optimizer=of(kind)(model.parameters()))


class Given:
    """Has a state_dict to save."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state


def places(value: Any, at: tuple[Any, ...] = ()) -> Any:
    """The way to each part of nested containers."""
    yield at
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        yield from places(item, (*at, key))


def put(value: Any, at: tuple[Any, ...], bad: Any) -> Any:
    changed = copy.deepcopy({"": value})
    inner: Any = changed
    for key in ("", *at)[:-1]:
        inner = inner[key]
    inner[("", *at)[-1]] = bad
    return changed[""]


def taken(session: preamp.Session, model: nn.Linear) -> None:
    """A step."""
    with session.autocast():
        loss = model(torch.ones(2, model.in_features)).float().sum()
    session.backward(loss)
    session.step()
    session.zero_grad()


@pytest.mark.parametrize("kind", ["torch.AdamW", "preamp.AdamW"])
def test_parts_of_a_wrong_kind(tmp_path: Path, kind: str) -> None:
    """In any place of a file that is whole: refused, and nothing has changed; what is not refused can be stepped."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = of(kind)(model.parameters())
    session = preamp.prepare(model, optimizer, level="O5")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "session": session, "schedule": schedule}

    taken(session, model)
    schedule.step()
    states = {  # "amp" is the name that a session's state has in a file
        name.replace("session", "amp"): Given(copy.deepcopy(each.state_dict())) for name, each in objects.items()
    }
    checkpoint.save(tmp_path / "whole.pt", **states)  # type: ignore[arg-type]
    refused = 0
    for name, given in states.items():
        for at in places(given.state):
            for bad in ("x", [0.5], {"a": 1}, torch.full((7,), float("nan"))):
                changed = {**states, name: Given(put(given.state, at, bad))}
                checkpoint.save(tmp_path / "a.pt", **changed)  # type: ignore[arg-type]
                before = str([each.state_dict() for each in objects.values()])
                try:
                    checkpoint.load(tmp_path / "a.pt", **objects)
                except preamp.PreampError:
                    refused += 1
                    assert before == str([each.state_dict() for each in objects.values()])
                else:
                    taken(session, model)
                    schedule.step()
                    checkpoint.load(tmp_path / "whole.pt", **objects)
    assert refused > 100
    session.close()


def renamed(state: Any) -> Any:
    return {**state, "state": {"x": state["state"][0], **{n: row for n, row in state["state"].items() if n}}}


def with_steps(count: Any) -> Callable[[Any], Any]:
    return lambda state: {**state, "state": {n: {**row, "step": count} for n, row in state["state"].items()}}


def with_moment(change: Callable[[Tensor], Any], name: str = "") -> Callable[[Any], Any]:
    """The first moment, or what is said, of the first parameter."""

    def changed(state: Any) -> Any:
        row = dict(state["state"][0])
        which = name or next(each for each in row if each != "step")
        state["state"][0] = {**row, which: change(row[which])}
        return state

    return changed


def with_option(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda state: {**state, "param_groups": [{**state["param_groups"][0], name: value}]}


UNFIT: list[tuple[str, Callable[[Any], Any]]] = [
    ("a name for a parameter", renamed), ("a number for a state", lambda state: {**state, "state": {"a": 1}}),
    ("a state too many", lambda state: {**state, "state": {**state["state"], 7: {}}}),
    *((f"step {count}", with_steps(count))
      for count in (-1, torch.tensor(-1.0), float("nan"), torch.tensor(torch.inf))),
    *((f"moment {change}", with_moment(change))
      for change in (Tensor.to_sparse, Tensor.long, Tensor.bool, lambda t: t + 0j, lambda t: t.to("meta"))),
    *((f"step by {change}", with_moment(change, "step"))
      for change in (lambda t: t + 1j, Tensor.to_sparse, lambda t: t.to("meta"))),
    *((f"lr {lr}", with_option("lr", lr)) for lr in (-1.0, float("nan"), float("inf"), torch.tensor(-1.0))),
    ("a decay", with_option("weight_decay", float("nan"))),
]  # fmt: skip
BETAS = ("betas", with_option("betas", (float("nan"), 0.9)))


@pytest.mark.parametrize(("level", "kind"), [
    ("O0", "torch.AdamW"), ("O4", "torch.AdamW"), ("O5", "torch.Adagrad"), ("O5", "preamp.AdamW"),
    ("O4", "preamp.LAMB"),
])  # fmt: skip
def test_moments_and_options_that_no_step_can_be_made_with(tmp_path: Path, kind: str, level: str) -> None:
    """And states of no parameter. Nothing is loaded, and a step can be made with what was there."""
    model = nn.Linear(4, 4)
    optimizer = of(kind)(model.parameters())
    session = preamp.prepare(model, optimizer, level=level)
    taken(session, model)

    def refused(_: str, change: Callable[[Any], Any]) -> None:
        given: Any = Given(change(copy.deepcopy(optimizer.state_dict())))
        checkpoint.save(tmp_path / "a.pt", model=model, optimizer=given, session=session)
        before = str([model.state_dict(), optimizer.state_dict(), session.state_dict()])
        with pytest.raises(CheckpointError, match="nothing was loaded"):
            checkpoint.load(tmp_path / "a.pt", model=model, optimizer=optimizer, session=session)
        assert before == str([model.state_dict(), optimizer.state_dict(), session.state_dict()])

    check_rows([*UNFIT, *([BETAS] if "Adagrad" not in kind else [])], refused)
    taken(session, model)
    session.close()
    assert all(p.isfinite().all() for p in model.parameters())


def test_sparse_momentum_of_sparse_gradients_loads(tmp_path: Path) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert optimizer.state[model.weight]["momentum_buffer"].is_sparse
    checkpoint.save(tmp_path / "a.pt", model=model, optimizer=optimizer)
    checkpoint.load(tmp_path / "a.pt", model=model, optimizer=optimizer)
    optimizer.step()


MOMENTS = ("Adam", "AdamW", "NAdam", "RAdam")
TAKEN: dict[str, tuple[str, ...]] = {
    "Adam": MOMENTS, "AdamW": MOMENTS, "LAMB": (*MOMENTS, "LAMB"), "Lion": (*MOMENTS, "Adamax", "NovoGrad", "Lion"),
    "torch.Adam": (*MOMENTS, "LAMB"), "torch.Adagrad": ("Adagrad",),
}  # fmt: skip
"""What has the states that an optimizer steps with; of the others it is the one of the same name."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The file of an optimizer of a kind after so many steps, which is written once."""
    folder = tmp_path_factory.mktemp("files")

    def file(kind: str, steps: int) -> Path:
        path, model = folder / f"{kind} {steps}.pt", Old(4)
        if not path.exists():
            optimizer = of(kind)(model.parameters())
            train(model, optimizer, steps)
            checkpoint.save(path, model=model, optimizer=optimizer)
        return path

    return file


@pytest.mark.parametrize("steps", [3, 0], ids=["stepped", "new"])
@pytest.mark.parametrize(
    "wanted", [kind for kind in KINDS if "preamp" in kind] + ["preamp.SGD0", "torch.Adam", "torch.Adagrad"]
)
def test_states_of_another_optimizer(files: Callable[[str, int], Path], wanted: str, steps: int) -> None:
    """Refused by optimizers of preamp as by torch's; the same algorithm's of the other library are taken."""
    name = wanted.partition(".")[2].rstrip("0")
    taken = TAKEN.get(wanted, TAKEN.get(name, (name,)))
    for saved in KINDS:
        other = Old(4)
        plain = wanted.endswith("SGD0")
        fresh = preamp.optim.SGD(other.parameters(), 0.1) if plain else of(wanted)(other.parameters())
        before = str([other.state_dict(), fresh.state_dict()])
        if saved.partition(".")[2] not in taken:
            try:
                checkpoint.load(files(saved, steps), model=other, optimizer=fresh)
            except CheckpointError:
                assert before == str([other.state_dict(), fresh.state_dict()])
            else:
                assert not steps, f"{saved} into {wanted}"
        else:
            checkpoint.load(files(saved, steps), model=other, optimizer=fresh)
            if (wanted, steps) != ("torch.Adagrad", 0) or TORCH >= (2, 12):  # older ones need their constructor's sums
                train(other, fresh)


def test_an_optimizer_without_states_takes_layers_in_any_order(tmp_path: Path) -> None:
    model, other = Old(8), New(8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer)
    checkpoint.save(tmp_path / "a.pt", model=model, optimizer=optimizer)
    checkpoint.load(tmp_path / "a.pt", model=other, optimizer=torch.optim.SGD(other.parameters(), 0.1))
    assert all(map(torch.equal, model.state_dict().values(), map(other.state_dict().__getitem__, model.state_dict())))


def test_states_without_step_counts_are_no_torchs(tmp_path: Path) -> None:
    """Apex counts steps in the group."""
    model = Old(4)
    optimizer = of("apex.FusedAdam")(model.parameters())
    train(model, optimizer)
    checkpoint.save(tmp_path / "a.pt", model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match=r"AdamW needs step; preamp\.optim takes"):
        checkpoint.load(tmp_path / "a.pt", optimizer=of("torch.AdamW")(model.parameters()))
    checkpoint.load(tmp_path / "a.pt", optimizer=of("preamp.AdamW")(model.parameters()))
    other = of("preamp.AdamW")(model.parameters())
    train(model, other, 1)
    checkpoint.save_sharded(tmp_path / "b", model, optimizer=other)
    with pytest.raises(CheckpointError, match=r"param_groups\.0\.step"):
        checkpoint.load_sharded(tmp_path / "b", model, optimizer=optimizer)


@pytest.mark.parametrize("name", ["several", "", "a.b", "amp", "digest", "self", "state", "model.weight", "path "])
def test_what_is_saved_under_a_name_is_loaded(tmp_path: Path, name: str) -> None:
    model = nn.Linear(2, 2)
    schedules = [torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), n) for n in (3, 4)]
    checkpoint.save(tmp_path / "a.pt", model=model, **{name: schedules[0]})
    checkpoint.load(tmp_path / "a.pt", model=model, **{name: schedules[1]})
    assert schedules[1].step_size == 3


@pytest.mark.parametrize("name", ["format", "model:0"])
def test_names_that_cannot_be_loaded_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        checkpoint.save(tmp_path / "a.pt", model=[nn.Linear(2, 2), nn.Linear(2, 2)], **{name: 1})


def test_lists_have_the_names_that_prepare_gives_them(tmp_path: Path) -> None:
    models = [nn.Linear(2, 2) for _ in range(3)]
    optimizers = [torch.optim.AdamW(model.parameters(), 0.1 + number) for number, model in enumerate(models)]
    session = preamp.prepare(models, optimizers, level="O0")
    assert list(session.optimizers) == ["0", "1", "2"]
    checkpoint.save(tmp_path / "a.pt", model=models, optimizer=tuple(optimizers))
    fresh = [nn.Linear(2, 2) for _ in range(3)]
    again = [torch.optim.AdamW(model.parameters()) for model in fresh]
    checkpoint.load(tmp_path / "a.pt", model=fresh, optimizer=again)
    assert all(torch.equal(one.weight, other.weight) for one, other in zip(models, fresh, strict=True))
    assert [each.param_groups[0]["lr"] for each in again] == [0.1, 1.1, 2.1]
    checkpoint.load(tmp_path / "a.pt", model=session.models, optimizer=session.optimizers)
    with pytest.raises(CheckpointError, match=r"has no 'optimizer:3'; it has .*optimizer:2"):
        checkpoint.load(tmp_path / "a.pt", optimizer=[*again, again[0]])
    checkpoint.save(tmp_path / "one.pt", model=models[:1], optimizer=optimizers[:1])
    checkpoint.load(tmp_path / "one.pt", model=fresh[2], optimizer=again[2:])
    assert torch.equal(models[0].weight, fresh[2].weight)

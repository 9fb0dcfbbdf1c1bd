"""What is saved in one form of masters and moments goes on in every other, and is as large as what it holds."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp import checkpoint
from preamp.checkpoint._file import read, write
from preamp.errors import CheckpointError, StateError
from preamp.kernels import join, split
from preamp.ledger import whole
from preamp.tree import tensors

BY_CHANCE: dict[str, Any] = {"master": None, "rounding": "stochastic"}
FORMS: dict[str, tuple[str | None, dict[str, Any] | None]] = {
    "torch alone": (None, None), "torch, O4": ("O4", None), "torch, O5": ("O5", None), "float32": ("O5", {}),
    "split": ("O5", {"master": "split"}), "split24": ("O5", {"master": "split24"}),
    "none": ("O5,masters=no", BY_CHANCE),
}  # fmt: skip
"""The policy, None for no session, and the options of preamp's AdamW, None for torch's."""
FORMS |= {
    f"{name}, 8 bits": (policy, {**options, "states": "8bit"})
    for name, (policy, options) in FORMS.items()
    if options is not None
}
BYTES = {"torch, O5": 12, "float32": 12, "split": 12, "split24": 11, "none": 10}
BYTES |= {f"{name}, 8 bits": size - 6 + 2 / 64 for name, size in BYTES.items() if name != "torch, O5"}


class Run:
    """A model, its optimizer, and a session unless it trains alone."""

    def __init__(self, form: str, width: int = 64) -> None:
        torch.manual_seed(0)
        policy, options = FORMS[form]
        self.model = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width))
        kind: Any = torch.optim.AdamW if options is None else preamp.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=1e-2, eps=1e-4, **options or {})
        self.session = None if policy is None else preamp.prepare(self.model, self.optimizer, policy=policy)
        self.policy, self.width, self.steps = policy, width, 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            torch.manual_seed(100 + self.steps)
            with nullcontext() if self.session is None else self.session.autocast():
                loss = self.model(torch.randn(8, self.width)).float().square().mean()
            loss.backward() if self.session is None else self.session.backward(loss)
            self.optimizer.step() if self.session is None else self.session.step()
            self.optimizer.zero_grad()
            self.steps += 1

    def parts(self, other: Run | None = None) -> dict[str, Any]:
        """What to save, or to load of `other`: with the session, if that has one of the same policy."""
        alike = other is None or other.policy == self.policy
        with_session = {"session": self.session} if self.session is not None and alike else {}
        return {"model": self.model, "optimizer": self.optimizer, **with_session}

    def values(self) -> list[Tensor]:
        """The weights in float32."""
        if self.session is None:
            return [p.detach().clone() for p in self.model.parameters()]
        with self.session.full_precision(values_only=True):
            return [p.detach().clone() for p in self.model.parameters()]

    def moments(self) -> list[Tensor]:
        states = preamp.optim.float32_states(self.optimizer.state_dict())["state"]
        return [states[number][name] for number in sorted(states) for name in ("exp_avg", "exp_avg_sq")]


@pytest.fixture
def made() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(form: str, width: int = 64) -> Run:
        runs.append(Run(form, width))
        return runs[-1]

    yield make
    for run in runs:
        if run.session is not None:
            run.session.close()


def rounded(value: Tensor, form: str) -> Tensor:
    """A weight as a form keeps it."""
    if form.startswith("none"):
        return value.to(torch.bfloat16).float()
    return join(*split(value, torch.int8)) if form.startswith("split24") else value


@pytest.mark.parametrize("way", ["save", "save_sharded"])
@pytest.mark.parametrize("theirs", FORMS)
@pytest.mark.parametrize("mine", FORMS)
@pytest.mark.filterwarnings("ignore:.*counts of steps begin anew")
def test_each_form_is_read_as_each_other(
    tmp_path: Path, made: Callable[..., Run], mine: str, theirs: str, way: str
) -> None:
    source = made(mine)
    source.train(3)
    wanted, moments = source.values(), source.moments()
    target = made(theirs)
    target.train(1)
    if way == "save":
        checkpoint.save(tmp_path / "a", **source.parts())
        checkpoint.load(tmp_path / "a", **target.parts(source))
    else:
        checkpoint.save_sharded(tmp_path / "a", **source.parts())
        checkpoint.load_sharded(tmp_path / "a", **target.parts(source))
    norms = [isinstance(module, nn.LayerNorm) for module in target.model for _ in module.parameters()]
    for value, kept, norm in zip(target.values(), wanted, norms, strict=True):
        assert torch.equal(value, kept if norm else rounded(kept, theirs))
    for value, kept in zip(target.moments(), moments, strict=True):
        assert torch.allclose(value, kept, rtol=0.0626, atol=float(kept.abs().max()) * 1e-4)
        assert torch.equal(value, kept) or ("8 bits" in theirs and "8 bits" not in mine)
    target.train(1)
    assert all(bool(value.isfinite().all()) for value in target.values())


@pytest.mark.parametrize("way", ["save", "save_async", "save_sharded", "torch.save"])
@pytest.mark.parametrize("form", FORMS)
def test_the_same_form_goes_on_bit_for_bit(tmp_path: Path, made: Callable[..., Run], form: str, way: str) -> None:
    source = made(form)
    source.train(3)
    target = made(form)
    target.steps = 3
    if way == "torch.save":
        names = source.parts()
        torch.save({name: part.state_dict() for name, part in names.items()}, tmp_path / "a")
        saved = torch.load(tmp_path / "a", weights_only=True)
        for name, part in target.parts().items():
            part.load_state_dict(saved[name])
    elif way == "save_sharded":
        checkpoint.save_sharded(tmp_path / "a", **source.parts())
        checkpoint.load_sharded(tmp_path / "a", **target.parts())
    else:
        saving = getattr(checkpoint, way)(tmp_path / "a", **source.parts())
        saving is None or saving.result()
        checkpoint.load(tmp_path / "a", **target.parts())
    for run in (source, target):
        run.train(3)
    ends = [[*run.values(), *run.moments(), *run.model.parameters()] for run in (source, target)]
    assert all(map(torch.equal, *ends))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("way", ["save", "save_sharded", "torch.save"])
@pytest.mark.parametrize("form", BYTES)
def test_the_file_is_as_large_as_what_it_holds(tmp_path: Path, made: Callable[..., Run], form: str, way: str) -> None:
    """Bytes a parameter, of weight, master and moments."""
    run = made(form, 512)
    run.train(1)
    if way == "torch.save":
        torch.save({name: part.state_dict() for name, part in run.parts().items()}, tmp_path / "a")
    else:
        getattr(checkpoint, way)(tmp_path / "a", **run.parts())
    wanted = BYTES[form] + (2 if way == "torch.save" and form.partition(",")[0] in ("torch", "float32") else 0)
    found = size_of(tmp_path) / sum(p.numel() for p in run.model.parameters())
    assert wanted < found < wanted + 0.2  # biases and norms are float32, and so are their moments


def test_the_table_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*?(float32 masters|master=\"\w+\"|masters=no).* \| ([\d.]+) \| ([\d.]+) \|$", page, re.M)
    forms = {
        "float32 masters": "float32",
        'master="split"': "split",
        'master="split24"': "split24",
        "masters=no": "none",
    }
    assert [name for name, _, _ in rows] == list(forms)
    for name, wide, coded in rows:
        assert (wide, coded) == (str(BYTES[forms[name]]), f"{BYTES[forms[name] + ', 8 bits']:.2f}")


def test_a_save_allocates_no_masters(made: Callable[..., Run]) -> None:
    run = made("split24")
    state = run.session.state_dict()["masters"]
    weight, bits = state["0.weight"]
    assert weight.data_ptr() == run.model[0].weight.data_ptr()
    assert (weight.dtype, bits.dtype) == (torch.bfloat16, torch.int8)


@pytest.mark.parametrize("form", ["split", "split24"])
def test_what_torch_reads_of_the_file(tmp_path: Path, made: Callable[..., Run], form: str) -> None:
    """The weights that the model computes with, under their names, and the bits beside them."""
    run = made(form)
    run.train(2)
    checkpoint.save(tmp_path / "a", **run.parts())
    content = torch.load(tmp_path / "a", weights_only=True)
    run.model.load_state_dict(content["model"])
    bits = content["bits"]["model"]
    assert bits.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    state = checkpoint.load(tmp_path / "a")
    assert "bits" not in state
    for value, name in zip(run.values(), dict(run.model.named_parameters()), strict=True):
        assert torch.equal(state["model"][name], value)
        assert name not in bits or torch.equal(join(content["model"][name], bits[name]), value)


def test_values_written_in_float32_are_saved_there(tmp_path: Path, made: Callable[..., Run]) -> None:
    run = made("split")
    run.train(1)
    with torch.no_grad(), run.session.full_precision(values_only=True):
        run.model[0].weight.mul_(1.001)
        wanted = run.model[0].weight.detach().clone()
        checkpoint.save(tmp_path / "a", **run.parts())
        kept = run.session.state_dict()["masters"]["0.weight"]
    assert torch.equal(checkpoint.load(tmp_path / "a")["model"]["0.weight"], wanted)
    assert torch.equal(whole("0.weight", kept), wanted)


def broken(bits: dict[str, Tensor]) -> Iterator[Any]:
    weight = bits["0.weight"]
    yield {**bits, "0.weight": weight.float()}
    yield {**bits, "0.weight": weight[:1]}
    yield {**bits, "0.weight": "bits"}
    yield {**bits, "other": weight}
    yield {**bits, 3: weight}
    yield {**bits, "1.weight": torch.zeros(64, dtype=torch.int8)}  # of a norm, which is float32
    yield [weight]
    yield None


def test_bits_that_are_none_of_the_models_are_told(tmp_path: Path, made: Callable[..., Run]) -> None:
    run = made("split24")
    run.train(1)
    checkpoint.save(tmp_path / "a", **run.parts())
    content, before = read(tmp_path / "a"), run.values()
    changed = [{"model": each} for each in broken(content["bits"]["model"])]
    for bits in (*changed, {"other": content["bits"]["model"]}, [1], 3):
        write(tmp_path / "b", {**content, "bits": bits})
        with pytest.raises(CheckpointError, match="bits"):
            checkpoint.load(tmp_path / "b", **run.parts())
    assert all(map(torch.equal, before, run.values()))
    with pytest.raises(CheckpointError, match="'bits' is a name"):
        checkpoint.save(tmp_path / "b", **run.parts(), bits=3)


@pytest.mark.parametrize("form", ["float32", "split", "split24"])
def test_a_master_that_is_none_is_told(made: Callable[..., Run], form: str) -> None:
    run = made(form)
    run.train(1)
    good, before = run.session.state_dict(), run.values()
    weight, bits = split(torch.randn(64, 64), torch.int8)
    wrong = [(weight,), (weight, bits, bits), (weight, bits[:1]), (weight.float(), bits), (weight, bits.float())]
    wrong += [(bits, weight), (), None, "x", bits, weight[:1], (weight[:1], bits[:1]), weight.to_sparse()]
    for kept in wrong:
        with pytest.raises(StateError, match=r"0\.weight"):
            run.session.load_state_dict({**good, "masters": {**good["masters"], "0.weight": kept}})
    assert all(map(torch.equal, before, run.values()))


@pytest.mark.parametrize(("mine", "theirs"), list(itertools.product(["float32", "split", "split24"], repeat=2)))
def test_states_of_one_session_are_states_of_another(made: Callable[..., Run], mine: str, theirs: str) -> None:
    """In any order, in the same form; in another one after the model's."""
    source, target = made(mine), made(theirs)
    source.train(3)
    wanted = source.values()
    saved = {name: copy.deepcopy(part.state_dict()) for name, part in source.parts().items()}
    for order in [("model", "optimizer", "session"), *([("session", "optimizer", "model")] if mine == theirs else [])]:
        for name in order:
            target.parts()[name].load_state_dict(saved[name])
        norms = [isinstance(module, nn.LayerNorm) for module in target.model for _ in module.parameters()]
        for value, kept, norm in zip(target.values(), wanted, norms, strict=True):
            assert torch.equal(value, kept if norm else rounded(kept, theirs))
        target.train(1)


def test_a_session_is_saved_in_8_bits_with_few_tensors_of_float32(made: Callable[..., Run]) -> None:
    run = made("split24, 8 bits", 512)
    run.train(1)
    wide = [t for part in run.parts().values() for t in tensors(part.state_dict()) if t.dtype is torch.float32]
    assert sum(t.numel() for t in wide) < 0.05 * sum(p.numel() for p in run.model.parameters())


@pytest.mark.parametrize("way", ["save", "save_sharded"])
@pytest.mark.parametrize("theirs", [{}, {"master": "split"}, {"master": "split24", "states": "8bit"}], ids=str)
@pytest.mark.parametrize("mine", [{}, {"master": "split"}, {"master": "split24", "states": "8bit"}], ids=str)
def test_masters_that_an_optimizer_keeps_itself(tmp_path: Path, mine: Any, theirs: Any, way: str) -> None:
    """Of bfloat16 weights without a session."""
    ends = []
    for options in (mine, theirs):
        torch.manual_seed(len(ends))
        weight = nn.Linear(64, 64).bfloat16()
        optimizer = preamp.optim.AdamW(weight.parameters(), 1e-2, **options)
        for _ in range(2):
            weight(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
        if ends:
            load = checkpoint.load if way == "save" else checkpoint.load_sharded
            load(tmp_path / "a", model=weight, optimizer=optimizer)
        else:
            getattr(checkpoint, way)(tmp_path / "a", model=weight, optimizer=optimizer)
        state = optimizer.state[weight.weight]
        ends.append(state["master"] if "master" in state else join(weight.weight.detach(), state["master_bits"]))
    assert torch.equal(ends[1], join(*split(ends[0], torch.int8)) if "8bit" in theirs.values() else ends[0])


@pytest.mark.parametrize("way", ["save", "save_sharded", "load_state_dict"])
@pytest.mark.parametrize("theirs", [{}, {"master": "split"}, {"master": "split24", "states": "8bit"}], ids=str)
@pytest.mark.parametrize("mine", [{}, {"master": "split"}, {"master": "split24", "states": "8bit"}], ids=str)
@pytest.mark.filterwarnings("ignore:.*16 bits, and their float32 masters with them")
def test_a_session_takes_masters_that_an_optimizer_has_kept_itself(
    tmp_path: Path, mine: Any, theirs: Any, way: str
) -> None:
    torch.manual_seed(0)
    weight, model = nn.Linear(64, 64).bfloat16(), nn.Linear(64, 64)
    alone = preamp.optim.AdamW(weight.parameters(), 1e-2, **mine)
    for _ in range(3):
        weight(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean().backward()
        alone.step()
    state = alone.state[weight.weight]
    kept = state["master"] if "master" in state else join(weight.weight.detach(), state["master_bits"])
    optimizer = preamp.optim.AdamW(model.parameters(), 1e-2, **theirs)
    with preamp.prepare(model, optimizer, level="O5") as session:
        if way == "load_state_dict":
            model.load_state_dict(weight.state_dict())
            optimizer.load_state_dict(alone.state_dict())
        else:
            getattr(checkpoint, way)(tmp_path / "a", weight, optimizer=alone)
            getattr(checkpoint, way.replace("save", "load"))(tmp_path / "a", model, optimizer=optimizer)
        with session.full_precision(values_only=True):
            assert torch.equal(model.weight, rounded(kept, str(theirs.get("master"))))
    assert not torch.equal(kept, weight.weight.float())


@pytest.mark.parametrize("mine", ["float32", "split", "split24"])
def test_weights_written_after_masters_were_loaded(mine: str) -> None:
    """As by a model's state that is loaded after its optimizer's: no step goes on from masters of other weights."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64, dtype=torch.bfloat16))
    optimizer = preamp.optim.AdamW([weight], 1e-3, master=mine)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    other = nn.Parameter(torch.randn(64, 64, dtype=torch.bfloat16))
    fresh = preamp.optim.AdamW([other], 1e-3)
    fresh.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        other.copy_(weight)
    other.grad = torch.zeros_like(other)
    fresh.step()
    torch.testing.assert_close(fresh.state[other]["master"], weight.detach().float(), rtol=2**-7, atol=2e-3)


class OfItsOwn(nn.Module):
    """A model whose `state_dict` takes no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"weight": self.layer.weight.detach().clone()}

    def load_state_dict(self, state: Any) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.layer.weight.copy_(state["weight"])


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_model_with_a_state_of_its_own(level: str, tmp_path: Path) -> None:
    model = OfItsOwn()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level) as session:
        with session.full_precision(values_only=True):
            wanted = model.layer.weight.detach().clone()
        preamp.checkpoint.save(tmp_path / "own.pt", model, optimizer=optimizer, session=session)
        with torch.no_grad():
            model.layer.weight.zero_()
        saved = preamp.checkpoint.load(tmp_path / "own.pt", model, optimizer=optimizer, session=session)
        assert torch.equal(saved["model"]["weight"], wanted)
    assert torch.equal(model.layer.weight, wanted)

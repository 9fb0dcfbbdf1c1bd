"""What no optimizer steps is left as it is: frozen bases, adapters on them, codebooks, moving averages, teachers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp

from ..rows import over

LEVELS = ("O0", "O1", "O2", "O4", "O5", "O5,masters=no")
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-4),
    "preamp": lambda p: preamp.optim.AdamW(p, 1e-2, eps=1e-4),
}
pytestmark = pytest.mark.filterwarnings("ignore::preamp.errors.PreampWarning")  # of masters=no, and of scales


class Adapted(nn.Module):
    """A frozen layer of any dtype with a low-rank adapter in float32."""

    def __init__(self, width: int = 64, rank: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=dtype).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.base.weight.dtype) if not torch.is_autocast_enabled("cpu") else x
        return x + self.base(wide) + self.up(self.down(x))


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), Adapted(dtype=dtype), nn.LayerNorm(64), Adapted(dtype=dtype), nn.Linear(64, 4)
    )


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def train(session: preamp.Session, model: nn.Module, steps: int, seed: int = 0) -> float:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(32, 16, generator=generator)
        with session.autocast():
            loss = (model(x).float() - x[:, :4]).square().mean()
        session.backward(loss)
        session.clip_grad_norm_(1.0)
        session.step()
        session.zero_grad()
    return loss.item()


@pytest.mark.parametrize(("base", "given", "maker"), [
    (torch.float32, "all", "torch"), (torch.bfloat16, "all", "preamp"), (torch.bfloat16, "trainable", "torch"),
    (torch.float16, "trainable", "preamp"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("level", LEVELS)
def test_frozen_weights_keep_dtype_memory_and_value(level: str, maker: str, given: str, base: torch.dtype) -> None:
    """Also where the optimizer was given all parameters, of which it steps those that want gradients."""
    model = model_of(base)
    before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in frozen(model).items()}
    optimizer = MAKERS[maker](model.parameters() if given == "all" else trainable(model))
    with preamp.prepare(model, optimizer, policy=level) as session:
        first, last = train(session, model, 1), train(session, model, 20)
        assert last < first
        assert not any(name in session.state_dict()["masters"] for name in before)
        with session.full_precision():
            wide = model(torch.ones(2, 16))
            assert wide.dtype is torch.float32
        with session.full_precision(values_only=True):
            assert all(p.dtype is base and p.data_ptr() == at for p, at, _ in before.values())  # none in float32 beside
            assert all(p.dtype is torch.float32 for p in trainable(model))
            with session.full_precision():  # of code that runs the model
                assert torch.equal(model(torch.ones(2, 16)), wide)
        for name, (p, address, value) in before.items():
            now = dict(model.named_parameters())[name]
            assert now is p and now.dtype is base and now.data_ptr() == address and torch.equal(now, value), name
        size = session.memory()
        assert size.bytes_of("masters") <= 4 * sum(p.numel() for p in trainable(model))
    assert all(p.dtype is base and p.data_ptr() == address for p, address, _ in before.values())


@pytest.mark.parametrize(("base", "norm"), [
    (torch.float32, nn.BatchNorm1d), (torch.bfloat16, nn.LayerNorm), (torch.bfloat16, nn.BatchNorm1d),
    (torch.float16, nn.BatchNorm1d), (torch.float16, lambda width: nn.GroupNorm(2, width)),
])  # fmt: skip
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_norms_of_a_frozen_base(level: str, norm: Callable[[int], nn.Module], base: torch.dtype) -> None:
    """Whose weights may have the other 16-bit dtype; and which are unfrozen later."""
    torch.manual_seed(0)
    frozen_part = nn.Sequential(nn.Linear(16, 8), norm(8), nn.GELU(), nn.Linear(8, 8)).to(base).requires_grad_(False)
    model = nn.Sequential(frozen_part, nn.Linear(8, 4))
    dtypes = {name: t.dtype for name, t in frozen_part.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level=level, **({"scale": 64.0} if level in ("O1", "O2") else {})) as session:
        first = train(session, model, 1)
        assert train(session, model, 20) < first
        assert {name: t.dtype for name, t in frozen_part.state_dict().items()} == dtypes
        with session.full_precision(), torch.no_grad():
            assert model(torch.ones(4, 16)).dtype is torch.float32
            assert not any(t.dtype in (torch.float16, torch.bfloat16) for t in model.buffers())
            frozen_part[1].register_buffer("late", torch.ones(2, dtype=base))
        with session.full_precision(values_only=True):
            frozen_part[1].late.add_(1)
        assert frozen_part[1].late.dtype is base and frozen_part[1].late.tolist() == [2.0, 2.0]
        del frozen_part[1].late
        assert {name: t.dtype for name, t in frozen_part.state_dict().items()} == dtypes
        frozen_part.requires_grad_(True)
        assert train(session, model, 2) < 10


@over(how=["unfrozen", "added"], level=LEVELS, base=[torch.float32, torch.bfloat16], maker=MAKERS)
def test_a_parameter_that_joins_gets_what_its_level_says(how: str, level: str, base: torch.dtype, maker: str) -> None:
    model = model_of(base)
    late = model[1].base.weight
    optimizer = MAKERS[maker](list(model.parameters()) if how == "unfrozen" else trainable(model))
    with preamp.prepare(model, optimizer, policy=level) as session:
        train(session, model, 2)
        before = late.detach().float().clone()
        layer = model[1].base.requires_grad_(True)
        if how == "added":
            optimizer.add_param_group({"params": list(layer.parameters())})
        train(session, model, 3)
        low = {"O2": torch.float16, "O5": torch.bfloat16}.get(level[:2], torch.float32)
        assert late.dtype is low
        assert ("1.base.weight" in session.state_dict()["masters"]) is (low is not torch.float32 and "no" not in level)
        assert not torch.equal(late.float(), before)
        with session.full_precision():
            assert late.dtype is torch.float32
    assert model[3].base.weight.dtype is base
    assert late.dtype is torch.float32 or base is not torch.float32


@pytest.mark.parametrize("master", ["float32", "split", "split24"])
def test_a_norm_that_joins_stays_float32_without_a_master(master: str) -> None:
    model = model_of()
    norm = model[2].requires_grad_(False)
    optimizer = preamp.optim.AdamW(model.parameters(), 1e-2, master=master)
    with preamp.prepare(model, optimizer, level="O5") as session:
        train(session, model, 2)
        norm.requires_grad_(True)
        train(session, model, 2)
        assert norm.weight.dtype is torch.float32 and not torch.equal(norm.weight, torch.ones(64))
        assert "2.weight" not in session.state_dict()["masters"]


def test_joined_weights_train_as_float32_would() -> None:
    ends = []
    for level in ("O0", "O5"):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        with preamp.prepare(model, optimizer, level=level) as session:
            train(session, model, 3)
            model[1].base.weight.requires_grad_(True)
            train(session, model, 30)
            with session.full_precision():
                ends.append(model[1].base.weight.detach().clone())
    start = model_of()[1].base.weight.detach()
    assert (ends[1] - ends[0]).norm() <= 0.1 * (ends[0] - start).norm()


@pytest.mark.parametrize("how", ["added", "optimizer's own"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_the_gradient_that_a_weight_has_as_it_joins_counts(level: str, how: str) -> None:
    """Of a micro-batch before, as in plain torch."""
    moved = []
    for chosen in ("O0", level):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        with preamp.prepare(model, optimizer, level=chosen) as session:
            for part in range(2):
                with session.autocast():
                    loss = model(torch.ones(2, 16)).float().square().mean()
                session.backward(loss)
                if part == 0 and how == "added":
                    optimizer.add_param_group({"params": list(model[0].parameters())})
                elif part == 0:
                    optimizer.param_groups[0]["params"].extend(model[0].parameters())
            before = model[0].weight.detach().float().clone()
            session.step()
            moved.append(model[0].weight.detach().float() - before)
    assert (moved[1] - moved[0]).norm() < 0.1 * moved[0].norm()


class Quantizer(nn.Module):
    """A codebook that is a moving average, written in the forward pass by two ways that leave no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.zeros(8, 16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.book.data.mul_(0.9).add_(x.detach().float()[:8], alpha=0.1)
            self.book[0] = 1.0
        nearest = torch.cdist(x.detach().float(), self.book).argmin(1)
        return x + (self.book[nearest] - x).detach()


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_a_codebook_written_in_the_forward_pass(level: str) -> None:
    books = []
    for policy in ("O0", level):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), Quantizer(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(trainable(model), 1e-3)
        with preamp.prepare(model, optimizer, level=policy) as session:
            train(session, model, 5)
            seen = model[1].book.clone()
            with session.full_precision():
                assert torch.equal(model[1].book, seen)
            assert torch.equal(model[1].book, seen)
            assert torch.equal(model.state_dict()["1.book"], seen)
        assert model[1].book.dtype is torch.float32 and torch.equal(model[1].book, seen)
        books.append(seen)
    assert (books[1] - books[0]).norm() <= 0.02 * books[0].norm()


@pytest.mark.parametrize("level", ["O2", "O4", "O5"])
def test_a_momentum_encoder_inside_the_model_moves(level: str) -> None:
    def run(policy: str) -> Tensor:
        torch.manual_seed(0)
        student = nn.Linear(16, 4)
        model = nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student).requires_grad_(False)})
        teacher = model["teacher"]
        with preamp.prepare(model, torch.optim.SGD(student.parameters(), 0.1), level=policy) as session:
            for step in range(100):
                x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))
                with session.autocast():
                    with torch.no_grad():
                        teacher.weight.mul_(0.999).add_(student.weight, alpha=0.001)
                    loss = (student(x).float() - teacher(x).float() - 1).square().mean()
                session.backward(loss)
                session.step()
                session.zero_grad()
            return teacher.weight.detach().clone()

    torch.manual_seed(0)
    start, wanted = nn.Linear(16, 4).weight.detach(), run("O0")
    assert (run(level) - wanted).norm() <= 0.05 * (wanted - start).norm()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_model_beside_that_nothing_steps(level: str) -> None:
    """A teacher among the session's models, called inside and outside of a region."""
    student, teacher = model_of(), model_of().requires_grad_(False)
    weights = [p.detach().clone() for p in teacher.parameters()]
    models = {"student": student, "teacher": teacher}
    with preamp.prepare(models, torch.optim.SGD(trainable(student), 0.05), level=level) as session:
        x = torch.randn(8, 16)
        with session.autocast():
            loss = (student(x) - teacher(x)).float().square().mean()
        session.backward(loss)
        session.step()
        assert teacher(x).isfinite().all()
        assert all(p.dtype is torch.float32 for p in teacher.parameters())
    assert all(map(torch.equal, teacher.parameters(), weights))


@pytest.mark.parametrize("frozen_first", [False, True])
def test_a_weight_of_two_models_keeps_its_first_master(frozen_first: bool) -> None:
    """The second model finds it in 16 bits, and must not take what was rounded for the float32 value."""
    torch.manual_seed(0)
    one, two = (nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)) for _ in range(2))
    two[0].weight = one[0].weight.requires_grad_(not frozen_first)
    wide = one[0].weight.detach().clone()
    optimizer = preamp.optim.SGD([*one.parameters(), two[0].bias, *two[1].parameters()], 0.0)
    with preamp.prepare({"one": one, "two": two}, optimizer, level="O5") as session:
        one[0].weight.requires_grad_(True)
        with session.autocast():
            loss = (one(torch.ones(2, 16)) + two(torch.ones(2, 16))).float().sum()
        session.backward(loss)
        session.step()
        assert torch.equal(session.state_dict()["masters"]["one:0.weight"], wide)
    assert torch.equal(one[0].weight, wide)

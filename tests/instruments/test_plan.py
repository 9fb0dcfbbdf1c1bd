"""The plan against counted bytes of small runs at every level, and its arithmetic. Two ranks: `test_plan_ranks`."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import preamp
from preamp.errors import PreampError, PreampWarning
from preamp.ledger import shadows_work
from preamp.plan import MemoryPlan, plan

SHADOWS = shadows_work("cpu", torch.bfloat16)
needs_shadows = pytest.mark.skipif(not SHADOWS, reason="this torch has no Tensor.grad_dtype (it came with 2.10)")
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5", "O5,masters=no", "O2,norms=fp16")
OPTIMIZERS: dict[str, Any] = {
    "adam": preamp.optim.Adam, "adamw": preamp.optim.AdamW, "sgd": preamp.optim.SGD, "sgd-momentum": preamp.optim.SGD,
    "adagrad": preamp.optim.Adagrad, "lamb": preamp.optim.LAMB, "novograd": preamp.optim.NovoGrad,
    "lion": preamp.optim.Lion,
    "torch.adam": torch.optim.Adam, "torch.adamw": torch.optim.AdamW, "torch.sgd": torch.optim.SGD,
    "torch.sgd-momentum": torch.optim.SGD, "torch.adagrad": torch.optim.Adagrad,
}  # fmt: skip


def build() -> nn.Sequential:
    """Two tensors of 4096 elements or more, one of them no multiple of 256; norms with and without buffers."""
    return nn.Sequential(
        nn.Linear(64, 65), nn.LayerNorm(65), nn.GELU(), nn.Linear(65, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)
    )  # fmt: skip


def held(tensors: Any) -> int:
    """Bytes of tensors that are there, storages once; 0-d ones (counts of steps, NovoGrad's norms) are not planned."""
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None and t.dim()}
    return sum(kept.values())


class Casts(TorchDispatchMode):
    """16-bit copies made of some tensors."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._places, self.bytes = {t.data_ptr() for t in tensors}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self._places and made.itemsize == 2:
            self.bytes += made.nbytes
        return made


def trained(model: nn.Module, name: str, level: str, *, shadow: bool = False, **options: Any) -> dict[str, int]:
    """Bytes by kind in the second step of a run."""
    if name.endswith("-momentum"):
        options["momentum"] = 0.9
    optimizer = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad], lr=1e-3, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PreampWarning)  # of epsilons
        session = preamp.prepare(model, optimizer, policy=level, shadow=shadow, scale=1.0)
    mastered = [p for p in model.parameters() if p in session._masters and not shadow]
    wide: list[int] = []
    # of all optimizers: to a hook of its own one of preamp.optim would show true gradients, in float32
    hook = register_optimizer_step_pre_hook(
        lambda *_: wide.append(sum(p.grad.nbytes for p in mastered if p.grad is not None and p.grad.itemsize == 4))
    )
    with session, hook:
        for _ in range(2):
            session.zero_grad()
            with Casts(model.parameters()) as casts, session.autocast():
                loss = model(torch.randn(8, 64)).float().square().mean()
            session.backward(loss)
            gradients = held(p.grad for p in model.parameters())
            session.step()
        masters, parameters = session._masters, list(model.parameters())
        wide_buffers = [full for conversion in session._conversions for _, _, full, _ in conversion._buffers]
        counts = sum(b.nbytes for b in model.buffers() if not b.dim())  # BatchNorm's, of batches
        return {
            "parameters": held(parameters),
            "gradients": gradients,
            "masters": held(map(masters.stored, mastered)),
            "states": held(t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)),
            "shadows": held(masters.leaves_of(parameters).stored() if masters.shadows else []),
            "buffers": held([*model.buffers(), *wide_buffers]) + counts,
            "cast weights": casts.bytes,
            "float32 gradients": wide[-1],
        }


def planned(given: MemoryPlan) -> dict[str, int]:
    kinds = ("parameters", "gradients", "masters", "states", "shadows", "buffers", "cast weights", "float32 gradients")
    return {kind: given.bytes_of(kind) for kind in kinds}


def attempt(level: str, name: str, **options: Any) -> bool:
    """Whether there is such a run; if so, every kind is planned to the byte."""
    own = {key: value for key, value in options.items() if name in ("adam", "adamw") or key == "shadow"}
    torch.manual_seed(0)
    try:
        paper = plan(build(), level=level, optimizer=name, **options)
    except PreampError:
        with pytest.raises((PreampError, TypeError)):  # TypeError: torch's optimizers know no such argument
            trained(build(), name, level, **options)
        return False
    assert planned(paper) == trained(build(), name, level, **own), (level, name, options)
    return True


@pytest.mark.parametrize("level", LEVELS)
def test_a_plan_is_what_a_run_holds_or_both_refuse(level: str) -> None:
    taken = 0
    for name, states, shadow in itertools.product(OPTIMIZERS, ("float32", "8bit"), (False, True)):
        options: dict[str, Any] = {"states": states} if states == "8bit" else {}
        taken += attempt(level, name, **options, **({"shadow": True} if shadow else {}))
    shadows = SHADOWS and level in ("O1", "O4")
    assert taken == (13 + 2) + (8 + 2 if shadows else 0)


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("states", ["float32", "8bit"])
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "torch.adamw"])
def test_split_masters_are_planned_or_refused(level: str, states: str, name: str) -> None:
    options = {"master": "split", **({"states": "8bit"} if states == "8bit" else {})}
    assert attempt(level, name, **options) == (level == "O5" and name.startswith("adam"))


@pytest.mark.parametrize("states", ["float32", "8bit"])
def test_stochastic_rounding_has_wide_states(states: str) -> None:
    real = {"master": None, "rounding": "stochastic", "states": states}
    paper = plan(build(), level="O5,masters=no", master="none", rounding="stochastic", states=states)
    assert planned(paper) == trained(build(), "adamw", "O5,masters=no", **real)


@pytest.mark.parametrize("level", ["O0", "O4; 3 -> full", "O5", "O5; 0 -> full", "O2; 3 -> bf16"])
def test_frozen_weights_and_rules_for_modules(level: str) -> None:
    models = build(), build()
    for model in models:
        model[0].requires_grad_(False)
    assert planned(plan(models[0], level=level)) == trained(models[1], "adamw", level)


def test_a_model_is_only_looked_at() -> None:
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    plan(model, level="O5", master="split", states="8bit")
    assert torch.equal(torch.get_rng_state(), state)
    assert {type(module) for module in model} == {nn.Linear, nn.LayerNorm, nn.GELU, nn.BatchNorm1d}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.device("meta"):
        shapes = build()
    assert plan(shapes, level="O5").rows == plan(model, level="O5").rows


class Attention(nn.Module):
    """An embedding that is the head too, weights that regions cast and shadows leave out, a buffer of no norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(100, 64), nn.RMSNorm(64), nn.Linear(64, 100, bias=False)
        self.places = nn.Embedding(100, 64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.zeros(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        words = x.abs().long().clamp(0, 99)
        given = self.embedding(words) + self.places(words)
        mixed: Tensor = self.head(self.norm(given + self.attention(given, given, given, need_weights=False)[0]))
        return mixed


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", pytest.param("O4 shadow", marks=needs_shadows), "O5"])
def test_shared_weights_attention_and_buffers(level: str) -> None:
    shadow = {"shadow": True} if "shadow" in level else {}
    seen = trained(Attention(), "adamw", level.split()[0], **shadow)
    assert planned(plan(Attention(), level=level.split()[0], **shadow)) == seen


# -- numbers


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"level": "O0"}, 16),
        ({"level": "O2"}, 2 + 2 + 4 + 8),
        ({"level": "O4"}, 16),
        pytest.param({"level": "O4", "shadow": True}, 4 + 2 + 8 + 2, marks=needs_shadows),
        ({"level": "O5", "master": "split"}, 14),
        ({"level": "O5", "master": "split", "states": "8bit"}, 8 + 2 / 64),
        ({"level": "O5", "states": "8bit"}, 10 + 2 / 64),
        ({"level": "O5", "optimizer": "sgd"}, 8),
        ({"level": "O5", "optimizer": "novograd"}, 12),
        ({"level": "O5", "optimizer": "lion"}, 12),
        ({"level": "O5", "optimizer": "lion", "master": "split"}, 10),
        ({"level": "O5,masters=no", "optimizer": "lion", "master": "none", "rounding": "stochastic"}, 8),
        ({"level": "O5,masters=no", "rounding": "stochastic", "states": "8bit"}, 6 + 2 / 64),
        ({"level": "O5", "world": 64, "shard": "fsdp2"}, 16 / 64),
        ({"level": "O5", "world": 64, "shard": "ddp"}, 16 + 2),
        ({"level": "O5", "world": 64, "shard": "zero1", "bucket_view": True}, 2 + 2 + 12 / 64),
    ],
)
def test_bytes_a_parameter(asked: dict[str, Any], wanted: float) -> None:
    count = 64 * 256 * 1_000
    assert plan(count, **asked).total == wanted * count


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 10**13), world=st.integers(1, 4096),
    shard=st.sampled_from(["ddp", "fsdp2", "zero1"]), level=st.sampled_from(["O0", "O1", "O4", "O5"]),
)  # fmt: skip
def test_ranks_together_hold_everything_and_little_more(count: int, world: int, shard: str, level: str) -> None:
    one = plan(count, level=level, shard=shard)
    many = plan(count, level=level, shard=shard, world=world)
    for kind in ("parameters", "gradients", "masters", "states"):
        whole = shard == "ddp" or (shard == "zero1" and kind in ("parameters", "gradients"))
        together = many.bytes_of(kind) * (1 if whole else world)
        assert one.bytes_of(kind) <= together <= one.bytes_of(kind) + 8 * world
    assert (many.sent == 0) == (world == 1) and one.sent == 0
    assert many.peak >= many.total


def test_collectives_are_rings() -> None:
    paper = plan(6400, level="O5", world=64, shard="fsdp2")
    gathered = 63 / 64 * 6400 * 2
    assert paper.sent == 2 * gathered + 63 / 64 * 6400 * 4
    assert plan(6400, level="O5", world=64, shard="fsdp2", reshard=False).sent == paper.sent - gathered
    assert plan(6400, level="O5", world=64, shard="fsdp2", reduce="bf16").sent == 3 * gathered
    assert plan(6400, level="O5", world=64, shard="ddp").sent == 2 * gathered
    assert plan(6400, level="O0", world=64, shard="ddp").sent == 4 * gathered
    assert plan(6400, level="O5", world=64, shard="zero1").sent == 3 * gathered


def test_norms_of_a_number_keep_float32() -> None:
    mixed = plan(10_000, level="O5", norm_share=0.01, states="8bit")
    assert mixed.bytes_of("parameters") == 9900 * 2 + 100 * 4
    assert mixed.bytes_of("masters") == 9900 * 4
    assert mixed.bytes_of("states") == 9900 * 2 + 2 * math.ceil(9900 / 256) * 4 + 100 * 8


@pytest.mark.parametrize(
    ("written", "count"),
    [
        ("7B", 7 * 10**9), ("350M", 350 * 10**6), ("7e9", 7 * 10**9), (7e9, 7 * 10**9), ("1.5b", 15 * 10**8), (1, 1),
        (" 125 k", 125_000), ("1_000", 1000),
    ],
)  # fmt: skip
def test_numbers_as_people_write_them(written: Any, count: int) -> None:
    assert plan(written).count == count

"""Weights that are computed in each forward pass: parametrizations, and the hooks that came before them, and masks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import preamp

from ..rows import over


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu()


MAKERS: dict[str, Callable[[nn.Module], object]] = {
    "weight norm": parametrizations.weight_norm,
    "weight norm, by hooks": lambda layer: nn.utils.weight_norm(layer),
    "spectral norm": parametrizations.spectral_norm,
    "spectral norm, by hooks": lambda layer: nn.utils.spectral_norm(layer),
    "orthogonal": parametrizations.orthogonal,
    "orthogonal, matrix_exp": lambda layer: parametrizations.orthogonal(layer, "weight", "matrix_exp"),
    "orthogonal, cayley": lambda layer: parametrizations.orthogonal(layer, "weight", "cayley"),
    "symmetric": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}
PARAMETRIZED = [name for name in MAKERS if "hooks" not in name and name != "pruned"]
pytestmark = pytest.mark.filterwarnings("ignore:.*(weight_norm|spectral_norm):FutureWarning")


def build(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    MAKERS[name](model[2])
    return model


@functools.cache
def in_float32(name: str) -> list[float]:
    return trained(build(name), "O0")[0]


def trained(model: Any, level: str, steps: int = 15) -> tuple[list[float], torch.Tensor]:
    """Losses, and what the model says in float32 at the end."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, eps=1e-4)
    losses = []
    with preamp.prepare(
        model, optimizer, level=level, scale=1024.0 if level in ("O1", "O2", "O3") else None
    ) as session:
        for step in range(steps):
            torch.manual_seed(step)
            x = torch.randn(16, 8)
            with session.autocast():
                loss = F.mse_loss(model(x).float(), (x[:, :4] * 2).tanh())
            session.backward(loss)
            assert not session.step().skipped
            session.zero_grad()
            losses.append(float(loss.detach()))
        model.eval()
        with session.full_precision():
            said = model(x).detach()
    return losses, said


@pytest.mark.parametrize(
    ("level", "name"), [(level, name) for i, name in enumerate(MAKERS) for level in (("O1", "O5"), ("O2", "O4"))[i % 2]]
)
def test_they_train_as_in_float32_and_are_given_back(name: str, level: str) -> None:
    wanted = in_float32(name)
    model = build(name)
    losses, said = trained(model, level)
    assert losses == pytest.approx(wanted, rel=0.1)
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32}
    x = torch.manual_seed(14) and torch.randn(16, 8)
    assert torch.equal(model(x), said)
    again = build(name).eval()
    again.load_state_dict(model.state_dict())
    assert torch.allclose(again(x), said, atol=1e-5)


@over(name=PARAMETRIZED, level=["O2", "O3", "O5"])
def test_a_parametrization_computes_in_float32_and_its_weight_is_rounded_once(name: str, level: str) -> None:
    model = build(name).eval()
    wanted = model[2].weight.detach().clone()
    low = preamp.policy(level).params
    with preamp.prepare(model, None, level=level) as session, session.autocast():
        weight = model[2].weight
        assert weight.dtype is low
        assert torch.equal(weight, wanted.to(low))
        assert {p.dtype for p in model[2].parametrizations.parameters()} == {torch.float32}
        assert model[2].bias.dtype is low
    assert torch.equal(model[2].weight, wanted)


def test_a_rule_of_the_users_goes_before() -> None:
    model = build("weight norm")
    with preamp.prepare(model, None, level="O5", modules={r"2\.parametrizations\..*": "low"}):
        assert {p.dtype for p in model[2].parametrizations.parameters()} == {torch.bfloat16}


def test_parametrizations_are_taken_off_after_training() -> None:
    model = build("orthogonal")
    trained(model, "O5", 2)
    parametrize.remove_parametrizations(model[2], "weight")
    weight = model[2].weight.detach()
    assert torch.allclose(weight @ weight.mT, torch.eye(32), atol=1e-5)
    assert type(model[2]) is nn.Linear


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O2", "O4", "O5"])
def test_compiled_whole(level: str) -> None:
    model = build("weight norm")
    losses, _ = trained(build("weight norm"), level, 3)
    compiled, _ = trained(torch.compile(model, backend="aot_eager", fullgraph=True), level, 3)
    assert compiled == pytest.approx(losses, rel=1e-2)

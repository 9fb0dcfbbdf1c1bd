"""Norms that are not torch's: recognised, and kept in float32 where the level says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.errors import SessionError
from preamp.modules import is_norm

from ..rows import over


class HandWritten(nn.Module):
    """As in a hundred repositories: the variance of the input, and a weight behind it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(x.dtype)


class RMSNorm(HandWritten):
    pass


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


class ResponseNorm(nn.Module):
    """ConvNeXt V2's, of channels-first images."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.zeros(1, 1, 1, size)), nn.Parameter(torch.zeros(1, 1, 1, size))


class FrozenBN(nn.Module):
    """A detector's, whose name does not say it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)  # type: ignore


class LayerScale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((size,), 1e-5))


class NormedLinear(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size))


def llama(size: int) -> nn.Module:
    modeling: Any = pytest.importorskip("transformers.models.llama.modeling_llama")
    return modeling.LlamaRMSNorm(size)  # type: ignore[no-any-return]


def t5(size: int) -> nn.Module:
    modeling: Any = pytest.importorskip("transformers.models.t5.modeling_t5")
    return modeling.T5LayerNorm(size)  # type: ignore[no-any-return]


def test_what_is_one() -> None:
    for make in (RMSNorm, LayerNorm2d, ResponseNorm, FrozenBN, llama, t5, nn.RMSNorm, nn.BatchNorm1d, nn.SyncBatchNorm):
        assert is_norm(make(8)), make
    for module in (HandWritten(8), LayerScale(8), NormedLinear(8), nn.Linear(8, 8), nn.PReLU(8), nn.ReLU()):
        assert not is_norm(module), module


@over(level=["O2", "O5"], make=[RMSNorm, FrozenBN, llama, t5])
def test_they_keep_float32_weights_and_compute_in_float32(level: str, make: Any) -> None:
    torch.manual_seed(0)
    norm, x = make(32), torch.randn(4, 32)
    model = nn.Sequential(nn.Linear(32, 32), norm, nn.Linear(32, 4))
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        expected = model(x)
    seen: list[torch.dtype] = []
    norm.register_forward_hook(lambda module, given, result: seen.extend([given[0].dtype, result.dtype]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level=level, scale=4.0) as session:
        low = session.policy.params
        assert (norm.weight.dtype, model[0].weight.dtype) == (torch.float32, low)
        for _ in range(2):
            with session.autocast():
                loss = (model(x).float() - expected).square().mean()
            session.backward(loss)
            session.step()
            session.zero_grad()
        assert loss < 1e-3 and set(seen) == {low}, "16-bit activations come in and go out"
        exact = torch.randn(4, 32).to(low)
        with session.autocast():
            result = norm(exact)
        with session.full_precision(), torch.no_grad():
            reference = norm(exact.float())
        assert torch.equal(result, reference.to(low)), "rounded once"


def test_low_norms_are_low_if_the_policy_says_so() -> None:
    model = nn.Sequential(nn.Linear(8, 8), RMSNorm(8))
    with preamp.prepare(model, None, policy="params=bf16,compute=bf16,norms=bf16"):
        assert model[1].weight.dtype is torch.bfloat16


def test_layers_of_keras_are_refused_before_anything_is_changed() -> None:
    """On torch they are modules that hold a ParameterDict, and none of their norms is recognised."""
    kind = type("BatchNormalization", (nn.Module,), {"__module__": "keras.src.layers.normalization"})
    model = nn.Sequential(nn.Linear(4, 4), kind())
    model[1]._torch_params = nn.ParameterDict({"gamma": torch.ones(4), "beta": torch.zeros(4)})
    for level in ("O2", "O3", "O5"):
        with pytest.raises(SessionError, match=r"1 is a layer of Keras.*take level='O1' or 'O4'"):
            preamp.prepare(model, None, level=level)
        assert model[0].weight.dtype is torch.float32
    for level in ("O0", "O1", "O4"):
        preamp.prepare(model, None, level=level).close()

"""Quantization-aware training in sessions: torch.ao's modules and the operators under them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

import preamp

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*reduce_range.*:UserWarning")
LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


def learnable() -> Any:
    observer = quantization.MovingAverageMinMaxObserver
    activation = {"quant_min": 0, "quant_max": 255, "dtype": torch.quint8, "qscheme": torch.per_tensor_affine}
    weight = {"quant_min": -128, "quant_max": 127, "dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric}
    made = [_LearnableFakeQuantize.with_args(observer=observer, **each) for each in (activation, weight)]
    return quantization.QConfig(*made)


CONFIGS = {
    "fused": lambda: quantization.get_default_qat_qconfig("fbgemm", version=1),
    "apart": lambda: quantization.get_default_qat_qconfig("fbgemm", version=0),
    "learnable": learnable,
}


def network(config: str, *, fuse: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        quantization.QuantStub(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2),
        quantization.DeQuantStub(),
    ).train()  # fmt: skip
    if fuse:
        quantization.fuse_modules_qat(model, [["1", "2", "3"]], inplace=True)
    model.qconfig = CONFIGS[config]()  # type: ignore[assignment]
    quantization.prepare_qat(model, inplace=True)
    return model


@pytest.mark.parametrize("fuse", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("config", CONFIGS)
def test_training(config: str, fuse: bool) -> None:
    def losses(level: str) -> list[float]:
        model = network(config, fuse=fuse)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        seen = []
        with preamp.prepare(model, optimizer, level=level, scale=1.0) as session:
            for step in range(3):
                torch.manual_seed(step)
                with session.autocast():
                    loss = (model(torch.randn(4, 3, 4, 4)).float() - 1).square().mean()
                session.backward(loss)
                assert not session.step().skipped
                session.zero_grad()
                seen.append(float(loss.detach()))
            observed = model.get_submodule("0.activation_post_process")
            assert observed.scale.dtype is torch.float32 and float(observed.scale.detach()) not in (0.0, 1.0)
        return seen

    wanted = pytest.approx(losses("O0"), rel=0.1)
    for level in LEVELS[1:]:
        assert losses(level) == wanted, level


def test_what_is_written_is_not_cast() -> None:
    """Statistics in 16 bits are an error, as in torch, and not left as they are."""
    numbers = [torch.zeros(1, dtype=torch.bfloat16) for _ in range(2)]
    on = torch.ones(1, dtype=torch.long)
    x: Tensor = torch.randn(4, dtype=torch.bfloat16)

    def fused(*numbers: Tensor) -> Tensor:
        scale, zero = torch.ones(1), torch.zeros(1, dtype=torch.int)
        return torch.fused_moving_avg_obs_fake_quant(x, on, on, *numbers, scale, zero, 0.01, 0, 255, -1)

    with preamp.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError):
            fused(*numbers)
        wide = [number.float() for number in numbers]
        assert fused(*wide).dtype is torch.float32 and float(wide[1]) != 0

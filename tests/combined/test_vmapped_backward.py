"""Many backward passes at once, through one forward pass: Jacobians by vmap over `torch.autograd.grad`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from benchmarks.race import without_rules
from torch import Tensor, nn

import preamp

from ..rows import check_rows

pytestmark = pytest.mark.filterwarnings("ignore:SGD steps fp16 weights without masters")

NORMS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "LayerNorm": (lambda: nn.LayerNorm([4, 6]), True),
    "LayerNorm, last": (lambda: nn.LayerNorm(6), True),
    "LayerNorm, no weight": (lambda: nn.LayerNorm(6, elementwise_affine=False), True),
    "RMSNorm": (lambda: nn.RMSNorm(6), True),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), True),
    "GroupNorm, no weight": (lambda: nn.GroupNorm(2, 4, affine=False), True),
    "InstanceNorm": (lambda: nn.InstanceNorm1d(4, affine=True), True),
    "BatchNorm": (lambda: nn.BatchNorm1d(4), True),
    "BatchNorm, no weight": (lambda: nn.BatchNorm1d(4, affine=False), True),
    "BatchNorm, in use": (lambda: nn.BatchNorm1d(4), False),
}


LEVELS = {
    **{level: {"level": level} for level in ("O0", "O1", "O2", "O4", "O5")},
    "O3 with float32 norms": {"policy": preamp.policy("O3").replace(norms=torch.float32)},
}


def jacobians(norm: str, level: str, way: str) -> list[Tensor]:
    make, trains = NORMS[norm]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), make(), nn.Linear(6, 2)).train(trains)
    for module in model:
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean, module.running_var = torch.randn(4) / 4, torch.rand(4) + 0.5
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(3, 4, 6)
    with preamp.prepare(model, optimizer, **LEVELS[level]) as session:
        params = [p for p in model.parameters() if p.requires_grad]
        with session.autocast():
            out = model(x).float().square().sum((1, 2))

        def pulled(v: Tensor) -> Any:
            return torch.autograd.grad(out, params, v, retain_graph=True)

        if way == "vmap":
            found = torch.vmap(pulled)(torch.eye(3))
        elif way == "is_grads_batched":
            found = torch.autograd.grad(out, params, torch.eye(3), retain_graph=True, is_grads_batched=True)
        else:
            found = [torch.stack(rows) for rows in zip(*map(pulled, torch.eye(3)), strict=True)]
        assert [each.dtype for each in found] == [p.dtype for p in params]
        return [each.float() for each in found]


@pytest.mark.parametrize("norm", NORMS)
def test_as_one_after_the_other_and_as_in_float32(norm: str) -> None:
    wanted = jacobians(norm, "O0", "loop")

    def check(level: str) -> None:
        one_by_one = jacobians(norm, level, "loop")
        for way in ("vmap", "is_grads_batched"):
            for ours, theirs, exact in zip(jacobians(norm, level, way), one_by_one, wanted, strict=True):
                size = float(exact.abs().max())
                assert float((ours - exact).abs().max()) <= 0.05 * size + 1e-5, way
                assert float((ours - theirs).abs().max()) <= 0.02 * size + 1e-5, way

    check_rows([level for level in LEVELS if level != "O0"], check)


@pytest.mark.parametrize("norm", NORMS)
def test_float32_norms_while_rules_are_installed(norm: str) -> None:
    with preamp.autocast("cpu", dtype=torch.bfloat16):
        pass
    for ours, theirs in zip(jacobians(norm, "O0", "vmap"), jacobians(norm, "O0", "loop"), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("norm", NORMS)
def test_second_derivatives_while_rules_are_installed(norm: str) -> None:
    """Mean and deviation are functions of the input, also where a rule of vmap is differentiated once more."""
    make, trains = NORMS[norm]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), make(), nn.Tanh(), nn.Linear(6, 2)).train(trains)
    if trains:
        torch.func.replace_all_batch_norm_modules_(model)
    x = torch.randn(2, 4, 6)

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum()

    wanted = torch.autograd.functional.hessian(loss, x)
    with preamp.autocast("cpu", dtype=torch.bfloat16):
        pass
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(loss))(x), wanted, rtol=1e-4, atol=1e-5)


@contextmanager
def region() -> Iterator[None]:
    with preamp.autocast("cpu", dtype=torch.bfloat16):
        yield
    preamp.autocast.uninstall()


@contextmanager
def session_without_regions() -> Iterator[None]:
    model = nn.Linear(2, 2)
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level="O3"):
        yield


def batched() -> list[str]:
    dump = torch._C._dispatch_dump("aten::native_layer_norm_backward")
    return [line for line in dump.splitlines() if "FuncTorchBatched:" in line]


@pytest.mark.parametrize("held", [region, session_without_regions])
def test_torchs_rules_come_back(held: Any) -> None:
    preamp.autocast.uninstall()
    before = batched()
    with held():
        assert batched() != before
        with without_rules():
            assert batched() == before
    assert before and batched() == before


def test_libraries_of_devices() -> None:
    """cuDNN's norm has another order of arguments; its rule needs no device."""
    torch.manual_seed(0)
    x, weight, gradients = torch.randn(3, 4, 2).half(), torch.rand(4), torch.randn(5, 3, 4, 2).half()
    mean, scale = x.float().mean((0, 2)), (x.float().var((0, 2), correction=0) + 1e-5).rsqrt()
    backward: Any = torch.ops.aten.native_batch_norm_backward
    with preamp.autocast("cpu", dtype=torch.float16):
        seen = torch.vmap(
            lambda g: torch.ops.aten.cudnn_batch_norm_backward(x, g, weight, None, None, mean, scale, 1e-5, x)
        )(gradients)
    for i, g in enumerate(gradients):
        wanted = backward(g.float(), x.float(), weight, None, None, mean, scale, True, 1e-5, [True] * 3)
        for ours, theirs in zip(seen, wanted, strict=True):
            torch.testing.assert_close(ours[i].float(), theirs, rtol=2e-3, atol=2e-3)

"""apex.contrib, apex.mlp and apex.fused_dense on torch's operators, and what subclasses of the optimizers look for."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from preamp.compat.apex import _amp_c, amp, optimizers
from preamp.compat.apex._layers import (
    MLP,
    FastLayerNorm,
    FastLayerNormFN,
    FusedDense,
    FusedDenseGeluDense,
    SoftmaxCrossEntropyLoss,
    clip_grad_norm_,
    fused_dense_function,
)
from preamp.compat.apex._scaler import LossScaler
from preamp.compat.apex.contrib.optimizers import FP16_Optimizer, FusedAdam
from preamp.compat.apex.optimizers import fused_adam as fused_adam_cuda

from .toys import scaled_backward

# -- what subclasses of the optimizers look for

OPERATORS = {
    "FusedAdam": ("multi_tensor_adam",), "FusedLAMB": ("multi_tensor_l2norm", "multi_tensor_lamb"),
    "FusedSGD": ("multi_tensor_sgd",), "FusedMixedPrecisionLamb": ("multi_tensor_l2norm",),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "operators"), OPERATORS.items())
def test_operators_and_buffers(kind: str, operators: tuple[str, ...]) -> None:
    optimizer = getattr(optimizers, kind)([nn.Parameter(torch.ones(3))], lr=0.1)
    for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert all(getattr(one, name) is getattr(_amp_c, name) for name in operators)
        assert one._dummy_overflow_buf.tolist() == [0] and one._dummy_overflow_buf is one._dummy_overflow_buf


def test_the_overflow_buffer_of_a_scaler() -> None:
    """Scripts that reduce gradients by themselves put their own there before update_scale."""
    scaler = LossScaler("dynamic")
    assert scaler._overflow_buf.tolist() == [0] and scaler._overflow_buf.dtype is torch.int32
    bad = torch.tensor([1.0, float("inf")])
    scaler.unscale([bad], [bad])
    assert scaler._overflow_buf.tolist() == [1]
    assert scaler.update_scale() and scaler.loss_scale() == 2.0**15
    scaler.clear_overflow_state()
    assert scaler._overflow_buf.tolist() == [0]
    own = torch.zeros(1, dtype=torch.int)
    grads = [torch.ones(2), bad]
    _amp_c.multi_tensor_scale(65536, own, [grads, [torch.empty(2) for _ in grads]], 1.0)
    scaler._overflow_buf = own
    assert scaler.update_scale() and scaler.loss_scale() == 2.0**14
    scaler.clear_overflow_state()
    assert not scaler.update_scale() and copy.deepcopy(scaler).loss_scale() == 2.0**14
    static = LossScaler(128.0)
    static._overflow_buf = torch.ones(1, dtype=torch.int)
    assert not static.update_scale()


# -- the optimizers of 2018


def reference(steps: int, limit: float, correct: bool = True) -> list[np.ndarray]:
    """Two groups of one parameter each in float64, by the published rule: corrections multiply the rate alone."""
    params = [np.array([1.0, 2.0]), np.array([3.0])]
    m, v = [np.zeros(2), np.zeros(1)], [np.zeros(2), np.zeros(1)]
    for t in range(1, steps + 1):
        for i, p in enumerate(params):
            g = 2 * p
            norm = np.sqrt((g * g).sum())
            if limit:
                g = g / max(1.0, (norm + 1e-6) / limit)
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g * g
            rate = 0.1 * (np.sqrt(1 - 0.999**t) / (1 - 0.9**t) if correct else 1.0)
            params[i] = p - rate * (m[i] / (np.sqrt(v[i]) + 1e-8) + 0.01 * p)
    return params


@pytest.mark.parametrize("limit", [0.0, 1.5])
@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("place", [optimizers.FusedAdam, FusedAdam])
def test_fused_adam_of_2018(limit: float, correct: bool, place: Any) -> None:
    params = [nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([3.0]))]
    groups = [{"params": [p]} for p in params]
    optimizer = place(groups, lr=0.1, bias_correction=correct, weight_decay=0.01, max_grad_norm=limit)
    assert type(optimizer) is FusedAdam and isinstance(optimizer, optimizers.FusedAdam)
    for i in range(3):
        optimizer.zero_grad()
        sum(p.square().sum() for p in params).backward()  # type: ignore[union-attr]
        if i == 1:
            again = place(groups, lr=0.1, bias_correction=correct, weight_decay=0.01, max_grad_norm=limit)
            again.load_state_dict(optimizer.state_dict())
            optimizer = again
        optimizer.step()
    for mine, theirs in zip(params, reference(3, limit, correct), strict=True):
        np.testing.assert_allclose(mine.detach().numpy(), theirs, rtol=1e-5)


def test_fused_adam_of_2018_takes_gradients_and_gives_low_copies() -> None:
    param = nn.Parameter(torch.tensor([1.0, 2.0]))
    low = param.detach().half()
    optimizer = FusedAdam([param], lr=0.1, weight_decay=0.01, max_grad_norm=1.5)
    for _ in range(3):
        grad = (2 * param.detach() * 8).half()
        optimizer.step(grads=[grad], output_params=[low], scale=8.0, grad_norms=[grad.float().norm()])
    np.testing.assert_allclose(param.detach().numpy(), reference(3, 1.5)[0], rtol=2e-3)
    assert torch.equal(low, param.detach().half())
    optimizer = copy.deepcopy(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert optimizer.param_groups[1]["max_grad_norm"] == 1.5
    with pytest.raises(ValueError, match="zip"):
        optimizer.step(grads=[[low, low], [low]])
    with pytest.raises(RuntimeError, match="eps_inside_sqrt"):
        optimizers.FusedAdam([param], eps_inside_sqrt=True)
    with pytest.raises(TypeError):
        optimizers.FusedAdam([param], nothing=1)


@pytest.mark.parametrize("dynamic", [True, False])
def test_fp16_optimizer_skips_after_an_overflow(dynamic: bool) -> None:
    """Under a fixed scale as well, unlike that of apex.fp16_utils."""
    model = nn.Linear(2, 1).half()
    scales: dict[str, Any] = {"dynamic_loss_scale": True} if dynamic else {"static_loss_scale": 128.0}
    optimizer = optimizers.FP16_Optimizer(optimizers.FusedAdam(model.parameters()), **scales)
    assert type(optimizer) is FP16_Optimizer
    before = [p.detach().clone() for p in model.parameters()]
    start = optimizer.cur_scale
    optimizer.backward(model(torch.full((1, 2), 6e4).half()).sum())
    optimizer.step()
    optimizer.zero_grad()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert optimizer.cur_scale == (start / 2 if dynamic else 128.0)
    optimizer.backward(model(torch.full((1, 2), 0.01).half()).sum())
    optimizer.step()
    assert not torch.equal(model.weight, before[0])
    copied = FP16_Optimizer(optimizers.FusedAdam(nn.Linear(2, 1).half().parameters()), **scales)
    copied.load_state_dict(optimizer.state_dict())
    assert copied.cur_scale == optimizer.cur_scale and torch.equal(
        copied.fp32_groups[0][0], optimizer.fp32_groups[0][0]
    )
    with pytest.raises(RuntimeError, match="bare instances"):
        amp.initialize(nn.Linear(2, 1), optimizer, opt_level="O1", verbosity=0)


# -- layers and losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fast_layer_norm(dtype: torch.dtype) -> None:
    layer, x = FastLayerNorm(8), torch.randn(3, 8)
    assert set(layer.state_dict()) == {"weight", "bias"}
    torch.testing.assert_close(layer(x), F.layer_norm(x, (8,)))
    low = FastLayerNormFN.apply(x, layer.weight.to(dtype), layer.bias.to(dtype), 1e-5)
    assert low.dtype is dtype
    torch.testing.assert_close(low.float(), F.layer_norm(x, (8,)), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("to_float", [True, False])
def test_cross_entropy(dtype: torch.dtype, to_float: bool) -> None:
    logits, labels = torch.randn(5, 7).to(dtype).requires_grad_(), torch.tensor([0, 3, 6, 1, 0])
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, 0, to_float)
    expected = F.cross_entropy(logits.detach().float(), labels, reduction="none", label_smoothing=0.1)
    expected = expected.masked_fill(labels == 0, 0.0)
    assert losses.dtype is (torch.float32 if to_float else dtype)
    torch.testing.assert_close(losses.float(), expected, rtol=2e-3, atol=2e-3)
    losses.sum().backward()
    assert logits.grad is not None and not logits.grad[0].any() and logits.grad[1].any()


def test_clipping_of_16_bit_gradients() -> None:
    full, low = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4).half())
    full.grad, low.grad = torch.full((4,), 3.0), torch.full((4,), 6e4).half()
    norm = clip_grad_norm_([full, low, nn.Parameter(torch.ones(1))], 1.0)
    expected = torch.tensor(3.0**2 * 4 + 6e4**2 * 4).sqrt()
    torch.testing.assert_close(norm, expected, rtol=1e-3, atol=0.0)
    torch.testing.assert_close(full.grad, torch.full((4,), 3.0) / expected, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(low.grad.float(), torch.full((4,), 0.5), rtol=1e-2, atol=0.0)
    full.grad = torch.full((4,), float("inf"))
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(full, 1.0, error_if_nonfinite=True)
    assert float(clip_grad_norm_([], 1.0)) == 0.0


@pytest.mark.parametrize("activation", ["none", "relu", "sigmoid"])
@pytest.mark.parametrize("bias", [True, False])
def test_mlp(activation: str, bias: bool) -> None:
    mlp = MLP([6, 5, 3], bias=bias, activation=activation)
    function: Any = {"none": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid}[activation]
    x = torch.randn(4, 6)
    expected = x
    for i, weight in enumerate(mlp.weights):
        expected = function(F.linear(expected, weight, mlp.biases[i] if bias else None))
    assert torch.equal(mlp(x), expected) and len(mlp.biases) == (2 if bias else 0)
    names = {"weight_0", "weight_1"} | ({"bias_0", "bias_1"} if bias else set())
    assert set(mlp.state_dict()) == names and torch.equal(copy.deepcopy(mlp)(x), mlp(x))
    with pytest.raises(TypeError, match="activation"):
        MLP([1, 2], activation="gelu")


def test_dense_layers() -> None:
    x = torch.randn(4, 6)
    dense, two = FusedDense(6, 5), FusedDenseGeluDense(6, 5, 3)
    assert torch.equal(dense(x), fused_dense_function(x, dense.weight, dense.bias)) and dense(x).isfinite().all()
    inner = F.gelu(F.linear(x, two.weight1, two.bias1), approximate="tanh")
    assert torch.equal(two(x), F.linear(inner, two.weight2, two.bias2)) and two(x).isfinite().all()
    assert FusedDense(6, 5, bias=False).bias is None
    with pytest.raises(AssertionError, match="without bias"):
        FusedDenseGeluDense(6, 5, 3, bias=False)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_layers_under_amp(level: str) -> None:
    model = nn.Sequential(FusedDense(6, 8), FastLayerNorm(8), MLP([8, 8]), FusedDenseGeluDense(8, 8, 3))
    optimizer = optimizers.FusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x, y = torch.randn(16, 6), torch.randint(1, 3, (16,))
    losses = []
    for _ in range(30):
        loss = SoftmaxCrossEntropyLoss.apply(model(x), y, 0.0, 0, True).mean()
        optimizer.zero_grad()
        scaled_backward(loss, optimizer)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("corrected", [0, 1])
def test_the_operator_of_2018_is_a_step_of_that_optimizer(dtype: torch.dtype, corrected: int) -> None:
    torch.manual_seed(0)
    mine = torch.randn(5)
    theirs = torch.nn.Parameter(mine.clone())
    optimizer = FusedAdam(
        [theirs], 0.1, bias_correction=bool(corrected), weight_decay=0.1, max_grad_norm=0.0, betas=(0.9, 0.99)
    )
    m, v, out = torch.zeros(5), torch.zeros(5), torch.zeros(5, dtype=torch.float16)
    for step in range(1, 4):
        gradient = torch.randn(5).to(dtype)
        optimizer.step(grads=[gradient.clone()], scale=8.0)
        fused_adam_cuda.adam(mine, out, m, v, gradient, 0.1, 0.9, 0.99, 1e-8, 8.0, step, 1, corrected, 0.1)
    assert torch.equal(mine, theirs) and torch.equal(out, mine.half())
    fused_adam_cuda.adam(mine, torch.tensor([]), m, v, gradient, 0.1, 0.9, 0.99, 1e-8, 8.0, 4, 1, corrected, 0.1)
    with pytest.raises(RuntimeError, match="eps_mode=1"):
        fused_adam_cuda.adam(mine, out, m, v, gradient, 0.1, 0.9, 0.99, 1e-8, 8.0, 5, 0, corrected, 0.1)
    for flag, expected in ((1, out.clone()), (0, mine.half())):
        fused_adam_cuda.maybe_cast_mt(65536, torch.tensor([flag]), [[mine], [out]])
        assert torch.equal(out, expected)

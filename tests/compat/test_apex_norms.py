"""Apex's norm layers: against torch's, in which dtype they answer, and what can be done with them."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from preamp.compat.apex import _fused_layer_norm_cuda as compiled
from preamp.compat.apex._layers import FastLayerNorm
from preamp.compat.apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from preamp.compat.apex.normalization import fused_layer_norm as module
from preamp.compat.apex.parallel import SyncBatchNorm

SHAPE = (32, 16)
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
LOW = [torch.float16, torch.bfloat16]
KINDS: list[Any] = [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm]
kinds = pytest.mark.parametrize("kind", KINDS)


def plain(x: Tensor, layer: Any) -> Tensor:
    """Torch's norms in float64."""
    operator = torch.layer_norm if isinstance(layer, FusedLayerNorm) else torch.rms_norm
    params = [getattr(layer, name, None) for name in ("weight", "bias")[: 2 if operator is torch.layer_norm else 1]]
    wide = [None if param is None else param.double() for param in params]
    return operator(x.double(), layer.normalized_shape, *wide, layer.eps)  # type: ignore[no-any-return]


def randomised(layer: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.rand(param.shape, generator=generator) + 0.5)
    return layer


@kinds
@pytest.mark.parametrize("dtype", FLOATS)
def test_values_and_gradients_are_the_papers(kind: Any, dtype: torch.dtype) -> None:
    layer = randomised(kind(SHAPE)).to(dtype)
    x = torch.randn(16, *SHAPE).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    twin = copy.deepcopy(layer).double()
    out, expected = layer(x), plain(wide, twin)
    assert out.dtype is dtype
    tolerance = {"atol": 10 * torch.finfo(dtype).eps, "rtol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    upstream = torch.rand_like(out)
    out.backward(upstream)
    expected.backward(upstream.double())
    assert x.grad is not None
    assert x.grad.dtype is dtype
    torch.testing.assert_close(x.grad.double(), wide.grad, **tolerance)
    for name, param in layer.named_parameters():
        assert param.grad.dtype is dtype
        theirs = twin.get_parameter(name).grad
        assert float((param.grad.double() - theirs).abs().max() / theirs.abs().max()) < 16 * torch.finfo(dtype).eps


@kinds
@pytest.mark.parametrize("weight", [torch.float32, *LOW])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_a_mixed_layer_gives_the_dtype_of_its_parameters_and_another_of_its_input(
    kind: Any, dtype: torch.dtype, weight: torch.dtype
) -> None:
    layer = randomised(kind(SHAPE)).to(weight)
    x = torch.randn(4, *SHAPE).to(dtype).requires_grad_()
    out = layer(x)
    given = weight if issubclass(kind, (MixedFusedLayerNorm, MixedFusedRMSNorm)) else dtype
    assert out.dtype is given
    torch.testing.assert_close(out, plain(x, layer).to(given), atol=0.02, rtol=0.01)
    out.sum().backward()
    assert x.grad is not None
    assert (x.grad.dtype, layer.weight.grad.dtype) == (dtype, weight)


@kinds
@pytest.mark.parametrize("dtype", LOW)
def test_autocast_casts_all_of_it(kind: Any, dtype: torch.dtype) -> None:
    layer = randomised(kind(SHAPE))
    x = torch.randn(4, *SHAPE, requires_grad=True)
    low = copy.deepcopy(layer).to(dtype)
    expected = low(x.detach().to(dtype))
    with torch.autocast("cpu", dtype=dtype):
        out = layer(x)
    assert out.dtype is dtype
    assert torch.equal(out, expected)
    out.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is layer.weight.grad.dtype is torch.float32


@kinds
def test_autocast_leaves_float64_alone(kind: Any) -> None:
    layer, x = kind(SHAPE).double(), torch.randn(4, *SHAPE, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype is torch.float64 and torch.equal(out, layer(x))


def test_functions_take_apexs_positions() -> None:
    names = {
        "fused_layer_norm_affine": "input weight bias normalized_shape eps memory_efficient",
        "fused_layer_norm": "input normalized_shape eps memory_efficient",
        "mixed_dtype_fused_layer_norm_affine": "input weight bias normalized_shape eps memory_efficient",
        "fused_rms_norm_affine": "input weight normalized_shape eps memory_efficient",
        "fused_rms_norm": "input normalized_shape eps memory_efficient",
        "mixed_dtype_fused_rms_norm_affine": "input weight normalized_shape eps memory_efficient",
    }
    for name, arguments in names.items():
        parameters = inspect.signature(getattr(module, name)).parameters
        assert list(parameters) == arguments.split()
        assert parameters["eps"].default == 1e-6
        assert parameters["memory_efficient"].default is False


def test_functions_are_what_the_layers_compute() -> None:
    x, weight, bias = torch.randn(3, *SHAPE), torch.rand(SHAPE), torch.rand(SHAPE)
    normed = nn.functional.layer_norm(x, SHAPE, eps=1e-6)
    assert torch.equal(module.fused_layer_norm(x, SHAPE), normed)
    assert torch.equal(module.fused_layer_norm(x, torch.Size(SHAPE), 1e-6, memory_efficient=True), normed)
    torch.testing.assert_close(module.fused_layer_norm_affine(x, weight, bias, SHAPE), normed * weight + bias)
    out = module.mixed_dtype_fused_layer_norm_affine(x.half(), weight, bias, SHAPE)
    assert out.dtype is torch.float32
    assert torch.equal(module.FusedLayerNormFunction.apply(x, SHAPE, 1e-6), normed)
    rms = nn.functional.rms_norm(x, SHAPE, eps=1e-6)
    torch.testing.assert_close(module.fused_rms_norm(x, SHAPE), rms)
    torch.testing.assert_close(module.fused_rms_norm_affine(x, weight, SHAPE), rms * weight)
    assert module.mixed_dtype_fused_rms_norm_affine(x, weight.bfloat16(), SHAPE).dtype is torch.bfloat16


@kinds
def test_attributes_state_and_copies(kind: Any) -> None:
    layer = kind(8, eps=1e-3)
    assert layer.normalized_shape == torch.Size([8])
    assert (layer.eps, layer.elementwise_affine) == (1e-3, True)
    assert repr(layer).startswith(f"{kind.__name__}((8,), eps=0.001, elementwise_affine=True")
    names = ["weight", "bias"] if issubclass(kind, FusedLayerNorm) else ["weight"]
    assert list(layer.state_dict()) == names
    randomised(layer)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(torch.ones(2, 8)), layer(torch.ones(2, 8)))
    layer.reset_parameters()
    assert torch.equal(layer.weight, torch.ones(8))
    if "bias" in names:
        reference = nn.LayerNorm(8)
        reference.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("kind", [*KINDS, FastLayerNorm, SyncBatchNorm])
def test_whole_models_that_older_releases_of_apex_pickled(kind: Any) -> None:
    """They lack attributes that came later."""
    layer = randomised(kind(8))
    expected = layer(torch.ones(2, 8))
    for name in ("memory_efficient", "process_group", "channel_last", "fuse_relu"):
        vars(layer).pop(name, None)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(torch.ones(2, 8)), expected)


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm])
def test_without_parameters(kind: Any) -> None:
    layer = kind(8, elementwise_affine=False, memory_efficient=True)
    assert layer.weight is None
    assert not list(layer.parameters())
    assert layer(torch.ones(2, 8).half()).dtype is torch.float16
    layer.reset_parameters()


@pytest.mark.parametrize("kind", [MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_mixed_layers_need_their_parameters(kind: Any) -> None:
    with pytest.warns(UserWarning, match="elementwise_affine"):
        assert kind(8, elementwise_affine=True).weight is not None
    with pytest.warns(UserWarning, match="elementwise_affine"), pytest.raises(RuntimeError, match="Use Fused"):
        kind(8, elementwise_affine=False)
    assert kind(8, memory_efficient=True).memory_efficient


@kinds
def test_layers_compile_whole(kind: Any) -> None:
    layer = randomised(kind(8))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(3, 8)
    assert torch.equal(compiled(x), layer(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(x).dtype is torch.bfloat16


FUNCTIONS = {
    "FusedLayerNormFunction": 1, "FusedLayerNormAffineFunction": 3, "FusedLayerNormAffineMixedDtypesFunction": 3,
    "FusedRMSNormFunction": 1, "FusedRMSNormAffineFunction": 2, "FusedRMSNormAffineMixedDtypesFunction": 2,
}  # fmt: skip


@pytest.mark.parametrize(("name", "tensors"), FUNCTIONS.items())
def test_functions_by_the_names_of_autograd_functions(name: str, tensors: int) -> None:
    """Megatron looks at forward's arguments, and calls apply."""
    kind = getattr(module, name)
    assert inspect.getfullargspec(kind.forward).args[0] == "ctx"
    assert inspect.getfullargspec(kind.forward).args[-3:] == ["normalized_shape", "eps", "memory_efficient"]
    inputs = [x.requires_grad_() for x in (torch.randn(3, 4), torch.rand(4), torch.rand(4))][:tensors]
    out = kind.apply(*inputs, (4,), 1e-5)
    assert torch.equal(kind.forward(None, *inputs, (4,), 1e-5, False), out)
    (out * torch.arange(4.0)).sum().backward()
    assert all(x.grad is not None and x.grad.any() for x in inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("rms", [False, True])
def test_the_compiled_operators_are_torchs(dtype: torch.dtype, memory_efficient: bool, affine: bool, rms: bool) -> None:
    """Which toolkits call in autograd functions of their own."""
    torch.manual_seed(0)
    x, grad = torch.randn(2, 5, 3, 4).to(dtype), torch.randn(2, 5, 3, 4).to(dtype)
    shape = torch.Size((3, 4))
    params = [torch.rand(shape).add_(0.5).to(dtype), torch.randn(shape).to(dtype)][: 1 if rms else 2] if affine else []
    leaves = [each.double().requires_grad_() for each in (x, *params)]
    operator = torch.rms_norm if rms else torch.layer_norm
    plain = operator(leaves[0], shape, *leaves[1:], *([None] * ((1 if rms else 2) - len(params))), 1e-5)
    wanted = torch.autograd.grad(plain, leaves, grad.double())

    name = "_affine" * affine
    out, *statistics = getattr(compiled, "rms_" * rms + "forward" + name)(x, shape, *params, 1e-5)
    assert all(each.shape == (10,) and each.dtype == torch.promote_types(dtype, torch.float32) for each in statistics)
    if memory_efficient and not rms:
        statistics[0] = None
    kept = out if memory_efficient else x
    found = getattr(compiled, "rms_" * rms + "backward" + name)(
        grad, *statistics, kept, shape, *params, 1e-5, memory_efficient
    )
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.float16 else {"rtol": 1e-4, "atol": 1e-5}
    for got, want in zip((out, *(found if affine else [found])), (plain.detach(), *wanted), strict=True):
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), want, **near)


@pytest.mark.parametrize("rms", [False, True])
def test_a_weight_of_zero_keeps_memory_efficient_gradients_finite(rms: bool) -> None:
    """A gate that begins at 0: the output does not tell what was normed there, for which Apex takes 0."""
    torch.manual_seed(0)
    x, grad, weight = torch.randn(5, 4), torch.randn(5, 4), torch.tensor([0.0, 1.0, -2.0, 3.0])
    params = [weight] if rms else [weight, torch.randn(4)]
    forward, backward = ("rms_forward_affine", "rms_backward_affine") if rms else ("forward_affine", "backward_affine")
    out, *statistics = getattr(compiled, forward)(x, (4,), *params, 1e-5)
    wanted = getattr(compiled, backward)(grad, *statistics, x, (4,), *params, 1e-5, False)
    found = getattr(compiled, backward)(grad, *statistics, out, (4,), *params, 1e-5, True)
    assert found[1][0] == 0.0 and found[0].isfinite().all()
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got[..., 1:], want[..., 1:], rtol=1e-4, atol=1e-4)


def test_the_compiled_operators_of_mixed_dtypes() -> None:
    x, ones = torch.randn(4, 8).half(), torch.ones(8)
    assert compiled.forward_affine_mixed_dtypes(x, (8,), ones, ones, 1e-5)[0].dtype is torch.float32
    out, invvar = compiled.rms_forward_affine_mixed_dtypes(x, (8,), ones, 1e-5)
    of_input, of_weight = compiled.rms_backward_affine(out, invvar, x, (8,), ones, 1e-5)
    assert (out.dtype, of_input.dtype, of_weight.dtype) == (torch.float32, torch.float16, torch.float32)

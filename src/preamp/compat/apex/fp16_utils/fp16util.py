"""Casting networks to 16 bits, and carrying parameters and gradients between a model and its float32 masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_

from ....autocast import PRODUCTS, widened
from ..parallel.distributed import flatten, unflatten

clip_grad_norm = clip_grad_norm_


class tofp16(nn.Module):
    """A layer that casts its input to float16, and passes the gradient back in the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        """`input` as float16."""
        return input.half()


class _Half(nn.Module):
    """A network in float16: for it and for its copies products of the CPU go through float32."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        PRODUCTS.hold_while(self)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        PRODUCTS.hold_while(self)


class FP16Model(_Half):
    """A network in float16, all but its affine batch norms, that casts what it is given.

    `network`: converted in place, and kept under that name. Tensors among the positional arguments become float16,
    whatever they were; other values, and keyword arguments, are passed on as they are.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The network on float16 inputs."""
        cast = (value.half() if isinstance(value, Tensor) else value for value in inputs)
        with widened():
            return self.network(*cast, **kwargs)


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Make affine batch norms of a module, at any depth, float32 again, in place; returns the module.

    Batch norms without parameters stay as they are: torch's kernels take none of another dtype than the input's.
    """
    for part in module.modules():
        if isinstance(part, _BatchNorm) and part.affine:
            part.float()
    return module


class _HalfNetwork(_Half, nn.Sequential):
    """What `network_to_half` returns."""

    def forward(self, input: Any) -> Any:
        """The layers in turn."""
        with widened():
            return super().forward(input)


def network_to_half(network: nn.Module) -> nn.Sequential:
    """A network in float16, in place, but for affine batch norms, behind a layer that casts its one input.

    Keys of the state_dict begin with "1.".
    """
    return _HalfNetwork(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's own floating parameters, their gradients and its own buffers in place; not those of children."""
    module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, recurse=False)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast all of a network but its affine batch norms to `dtype`, in place; returns it."""
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
    return network


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[Parameter], list[Parameter]]:
    """(model_params, master_params): the parameters that require a gradient, and float32 copies of them.

    `flat_master`: the copies are one flat Parameter, in a list, whose gradient is zeros to begin with; its model
    parameters must have one dtype (RuntimeError).
    """
    model_params = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        return model_params, [Parameter(param.detach().clone().float()) for param in model_params]
    dtypes = {param.dtype for param in model_params}
    if len(dtypes) > 1:
        raise RuntimeError(
            f"flat_master=True with a mixture of parameters of different types, {sorted(map(str, dtypes))}: one tensor "
            "has one dtype, and the way back would round some of them. Write flat_master=False"
        )
    master = Parameter(flatten([param.detach() for param in model_params]).float())
    master.grad = torch.zeros_like(master)
    return model_params, [master]


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the model's gradients into those of the masters, in the masters' dtype.

    A parameter without a gradient gives its master None, or zeros in its part of a flat master.
    """
    with torch.no_grad():
        if flat_master:
            (master,) = master_params
            grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in model_params]
            if master.grad is None:
                master.grad = torch.empty_like(master)
            master.grad.copy_(flatten(grads))
            return
        pairs = list(zip(model_params, master_params, strict=True))
        for model, master in pairs:
            if model.grad is None:
                master.grad = None
            elif master.grad is None:
                master.grad = torch.empty_like(master)
        _copy([m.grad for _, m in pairs if m.grad is not None], [p.grad for p, _ in pairs if p.grad is not None])


def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Round the masters into the model's parameters."""
    with torch.no_grad():
        if flat_master:
            (master,) = master_params
            _copy(list(model_params), unflatten(master.detach(), model_params))
        else:
            _copy(list(model_params), [master.detach() for master in master_params])


def to_python_float(t: Any) -> float:
    """The number in a tensor of one entry; of anything else without `item`, its first entry."""
    number: float = t.item() if hasattr(t, "item") else t[0]
    return number


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    """Copy pairwise; sparse gradients spread out."""
    if into:
        torch._foreach_copy_(into, [v if v.layout is torch.strided else v.to_dense() for v in values])

"""Modules that cast what they get and what they return: subclasses, made on the fly, that wrap `forward`.

`isinstance`, `state_dict` keys, `deepcopy`, DataParallel, pickling and `torch.compile(fullgraph=True)` work as before;
a pair of forward hooks would break the compiler's graph, and a replaced `forward` attribute would run the original's
forward on a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..tree import cast_floating, tensors


@dataclass(frozen=True, slots=True)
class Casting:
    """What a module does around its forward. `None` everywhere: nothing."""

    inputs: torch.dtype | None = None
    """Floating inputs are cast to this."""
    outputs: torch.dtype | None = None
    """Floating outputs are cast to this."""
    outputs_as_inputs: bool = False
    """Floating outputs are cast to the dtype that the first floating input came in."""
    region: torch.dtype | None = None
    """The dtype that an autocast region around the call has inside this module; float32 switches it off."""
    through: Callable[[Tensor], Tensor] | None = None
    """What a linear or convolution layer computes with in place of a parameter, inside a region."""

    wide_weights: bool = False
    """A batch norm computes with its weights in float32, as its statistics are: FSDP2 has given it 16-bit ones."""

    @property
    def mixes(self) -> bool:
        """Whether it is that of a norm whose kernel takes 16-bit activations with float32 weights."""
        return self.region is torch.float32 and self.inputs is None


NOTHING = Casting()

_APART = Casting(inputs=torch.float32, outputs_as_inputs=True, region=torch.float32)
"""For a norm that mixes, where its kernel cannot: torch's rules for gradients under vmap want one dtype."""


class CastingModule(nn.Module):
    """The mixin that a casting module's class gets in front. `_preamp_casting` is the only thing it adds."""

    _preamp_casting: Casting = NOTHING  # of a module that the class makes itself, as a slice of a Sequential is
    _preamp_original: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward, between the casts."""
        casting = self._preamp_casting
        came_in = _first_floating(args, kwargs) if casting.outputs_as_inputs or casting.region is not None else None
        if casting.mixes and came_in is not None and _is_transformed(came_in):
            casting = _APART
        if casting.inputs is not None:
            args, kwargs = cast_floating(args, casting.inputs), cast_floating(kwargs, casting.inputs)
        with _region(casting.region, self, came_in, args, kwargs):
            if casting.through is not None and _in_low_region(self):
                result = _computed_through(self, casting.through, *args, **kwargs)
            elif casting.wide_weights:
                result = _normed_with_wide_weights(self, *args, **kwargs)
            else:
                result = super().forward(*args, **kwargs)
        outputs = came_in.dtype if casting.outputs_as_inputs and came_in is not None else casting.outputs
        return result if outputs is None else cast_floating(result, outputs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the original class: a saved model does not need preamp to be read."""
        state = {key: value for key, value in self.__dict__.items() if key != "_preamp_casting"}
        plain = object.__new__(self._preamp_original)
        plain.__dict__.update(state)
        return plain.__reduce_ex__(min(protocol, 1))  # the newer forms insist on the pickled object's own class

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy that casts like this module, and belongs to no session."""
        own = getattr(self._preamp_original, "__deepcopy__", None)
        if own is not None:
            clone = own(self, memo)
            clone.__class__, clone._preamp_casting = type(self), self._preamp_casting
            return clone
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone


def _in_low_region(module: Any) -> bool:
    return torch.is_autocast_enabled(module.weight.device.type)


def _computed_through(module: Any, through: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    """The forward pass of a linear or convolution layer with other tensors as its parameters."""
    weight, bias = through(module.weight), None if module.bias is None else through(module.bias)
    if isinstance(module, nn.Linear):
        return F.linear(input, weight, bias)
    result: Tensor = module._conv_forward(input, weight, bias)
    return result


def _normed_with_wide_weights(module: Any, input: Tensor) -> Tensor:
    """The forward pass of a batch norm with float32 weights; torch's documentation of BatchNorm2d says what it does."""
    module._check_input_dim(input)
    tracks = module.track_running_stats and module.running_mean is not None
    learns = module.training and tracks
    if learns and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    momentum = module.momentum
    if momentum is None:  # a plain mean over all batches
        momentum = 1 / float(module.num_batches_tracked) if learns else 0.0
    weight, bias = (None if p is None else p.float() for p in (module.weight, module.bias))
    of_batch = module.training or not tracks
    mean, var = (module.running_mean, module.running_var) if tracks else (None, None)
    return F.batch_norm(input, mean, var, weight, bias, of_batch, momentum, module.eps)


SHADOWED: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules whose parameters may have shadows: exactly these classes, since a subclass may use its weight otherwise."""


def _is_transformed(tensor: Tensor) -> bool:
    """Whether a transformation of torch.func is at work on a tensor; compiled code resolves those by itself."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _first_floating(args: Any, kwargs: Any) -> Tensor | None:
    for tensor in tensors((args, kwargs)):
        if tensor.is_floating_point():
            return tensor
    return None


def _region(dtype: torch.dtype | None, module: nn.Module, like: Tensor | None, args: Any, kwargs: Any) -> Any:
    """A change of the ambient autocast region for one module; outside regions modules run as they are.

    On the device of the first floating input; without one (token ids, a parametrization's call) of what there is.
    """
    if dtype is None:
        return nullcontext()
    if like is None:
        like = next(iter(tensors((args, kwargs))), None)
    if like is None:
        like = next(module.parameters(), None)
    if like is None:
        return nullcontext()
    device_type = like.device.type
    if dtype is torch.float32:
        return torch.autocast(device_type, enabled=False)
    return torch.autocast(device_type, dtype=dtype)


_SUBCLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def casting_class(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _SUBCLASSES:
        body = {"_preamp_original": original, "__module__": original.__module__, "__doc__": original.__doc__}
        _SUBCLASSES[original] = type(original.__name__, (CastingModule, original), body)
    return _SUBCLASSES[original]

"""Precision of modules: converts a model's parameters, and makes modules cast what they get and what they return.

A module that has to cast gets a subclass of its own class that wraps `forward`. `isinstance`, `state_dict` keys,
`deepcopy`, DataParallel, pickling and `torch.compile(fullgraph=True)` work as before; a pair of forward hooks would
break the compiler's graph, and a replaced `forward` attribute would run the original's forward on a copy.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedParameter

from .errors import PolicyError, SessionError
from .formats import LOW_DTYPES, name_of
from .masters import Masters
from .policy import Policy, Precision
from .tree import cast_floating, tensors

NORMS: tuple[type[nn.Module], ...] = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""What a policy's `norms` field is about."""

_RNNS: tuple[type[nn.Module], ...] = (nn.RNNBase, nn.RNNCellBase)


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


NOTHING = Casting()


class CastingModule(nn.Module):
    """The mixin that a casting module's class gets in front. `_preamp_casting` is the only thing it adds."""

    _preamp_casting: Casting
    _preamp_original: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward, between the casts."""
        casting = self._preamp_casting
        came_in = _first_floating(args, kwargs) if casting.outputs_as_inputs or casting.region is not None else None
        if casting.inputs is not None:
            args, kwargs = cast_floating(args, casting.inputs), cast_floating(kwargs, casting.inputs)
        with _region(casting.region, came_in):
            if casting.through is not None and _in_low_region(self):
                result = _computed_through(self, casting.through, *args, **kwargs)
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


SHADOWED: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules whose parameters may have shadows: exactly these classes, since a subclass may use its weight otherwise."""


def _first_floating(args: Any, kwargs: Any) -> Tensor | None:
    for tensor in tensors((args, kwargs)):
        if tensor.is_floating_point():
            return tensor
    return None


def _region(dtype: torch.dtype | None, like: Tensor | None) -> Any:
    """A change of the ambient autocast region for one module; outside regions modules run as they are."""
    if dtype is None or like is None:
        return nullcontext()
    device_type = like.device.type
    if dtype is torch.float32:
        return torch.autocast(device_type, enabled=False)
    return torch.autocast(device_type, dtype=dtype)


_SUBCLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _casting_class(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _SUBCLASSES:
        body = {"_preamp_original": original, "__module__": original.__module__, "__doc__": original.__doc__}
        _SUBCLASSES[original] = type(original.__name__, (CastingModule, original), body)
    return _SUBCLASSES[original]


@lru_cache
def _mixes(kind: type[nn.Module], device_type: str, low: torch.dtype) -> bool:
    """Whether torch's kernel for a norm takes 16-bit activations with float32 weights: asked of it once, by trying.

    Where it does, it computes in float32 inside, and two casts of the activations in each direction are spared. Batch
    norm does everywhere; for the others it depends on the device and on the version of torch.
    """
    if issubclass(kind, _BatchNorm):
        return True
    probes: dict[type[nn.Module], tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        nn.LayerNorm: (lambda: nn.LayerNorm(8, device=device_type), (2, 8)),
        nn.GroupNorm: (lambda: nn.GroupNorm(2, 4, device=device_type), (2, 4, 3)),
        _InstanceNorm: (lambda: nn.InstanceNorm1d(4, affine=True, device=device_type), (2, 4, 3)),
    }
    for base, (make, shape) in probes.items():
        if issubclass(kind, base):
            try:
                with torch.enable_grad(), torch.autocast(device_type, enabled=False):
                    given = torch.zeros(shape, dtype=low, device=device_type, requires_grad=True)
                    result = make()(given)
                    result.sum().backward()
            except (RuntimeError, NotImplementedError):
                return False
            return result.dtype is low
    return False


class Conversion:
    """A model brought under a policy; `undo()` brings its modules and buffers back (`keeper` its parameters).

    `model`: its floating parameters in float32, or already in the policy's dtype. `prefix` goes before names ("gen:"),
    so that several models can be told apart. When the policy does not fit the model, nothing has been changed.
    """

    def __init__(self, model: nn.Module, policy: Policy, keeper: Masters, prefix: str = "") -> None:
        self._policy, self._keeper, self._prefix = policy, keeper, prefix
        root = unwrapped(model)
        if any(isinstance(module, CastingModule) for module in root.modules()):
            raise SessionError(
                "this model is already prepared by an open session; close that session first (session.close())"
            )
        self._changed: list[CastingModule] = []
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor, int]] = []
        precisions = dict(_precisions(root, policy))
        plan = list(self._plan_parameters(root, precisions))  # raises before anything is changed
        for name, parameter, dtype in plan:
            if parameter.dtype is dtype:
                keeper.adopt(name, parameter)
            else:
                keeper.lower(name, parameter, dtype)
        self._lower_buffers(root, precisions)
        through = self._shadowed(root, precisions)
        for path, module in root.named_modules():
            parent = precisions[path.rpartition(".")[0]] if path else None
            casting = self._casting(module, precisions[path], parent, is_root=path == "")
            if module in through:
                casting = replace(casting, through=keeper.through)
            if casting != NOTHING:
                self._wrap(module, casting)
            if isinstance(module, nn.RNNBase) and policy.params in LOW_DTYPES:
                module.flatten_parameters()

    def _plan_parameters(
        self, root: nn.Module, precisions: dict[str, torch.dtype | None]
    ) -> Iterator[tuple[str, nn.Parameter, torch.dtype]]:
        seen: dict[nn.Parameter, tuple[str, torch.dtype]] = {}
        for path, module in root.named_modules():
            dtype = self._storage(module, precisions[path])
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                name = f"{self._prefix}{path}.{key}" if path else f"{self._prefix}{key}"
                if isinstance(parameter, UninitializedParameter):
                    raise PolicyError(f"the parameter {name} is lazy: run one batch through the model before prepare()")
                if not parameter.is_floating_point() or parameter.dtype is torch.float64:
                    continue
                if parameter in seen:
                    first, stored = seen[parameter]
                    if stored is not dtype:
                        raise PolicyError(
                            f"{first} and {name} are one shared parameter, which the policy wants in "
                            f"{name_of(stored)} and in {name_of(dtype)}; give both modules the same precision"
                        )
                    continue
                seen[parameter] = (name, dtype)
                if dtype in LOW_DTYPES and parameter.dtype in (torch.float32, dtype):
                    yield name, parameter, dtype
                elif parameter.dtype in LOW_DTYPES:
                    raise PolicyError(
                        f"the parameter {name} is {name_of(parameter.dtype)} and the policy wants {name_of(dtype)}: "
                        "prepare() casts by itself and needs the float32 model; remove .half() or .to(...) before it"
                    )

    def _storage(self, module: nn.Module, precision: torch.dtype | None) -> torch.dtype:
        """The dtype of a module's own parameters and buffers."""
        policy = self._policy
        if policy.params is torch.float32 or precision is torch.float32:
            return torch.float32
        if isinstance(module, NORMS):
            return policy.norms if policy.norms is torch.float32 else precision or policy.params
        return precision or policy.params

    def _shadowed(self, root: nn.Module, precisions: dict[str, torch.dtype | None]) -> set[nn.Module]:
        """Give weights shadows, if that is wanted: those used in nothing but low linear layers and convolutions."""
        if not self._keeper.shadows:
            return set()
        fitting = {m for path, m in root.named_modules() if type(m) in SHADOWED and precisions[path] is None}
        elsewhere = {p for m in root.modules() if m not in fitting for p in m.parameters(recurse=False)}
        for module in fitting:
            for parameter in module.parameters(recurse=False):
                fits = parameter.requires_grad and parameter.dtype is torch.float32 and parameter not in elsewhere
                if fits and parameter not in self._keeper:
                    self._keeper.shadow(parameter)
        return fitting

    def _lower_buffers(self, root: nn.Module, precisions: dict[str, torch.dtype | None]) -> None:
        for path, module in root.named_modules():
            dtype = self._storage(module, precisions[path])
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.dtype is torch.float32 and dtype in LOW_DTYPES:
                    low = buffer.to(dtype)
                    module._buffers[key] = low
                    self._buffers.append((module, key, buffer, low, low._version))

    def _casting(
        self, module: nn.Module, precision: torch.dtype | None, parent: torch.dtype | None, *, is_root: bool
    ) -> Casting:
        """What a module casts; a precision of its own is entered and left where it begins, not in modules inside."""
        policy = self._policy
        low = policy.params if policy.params in LOW_DTYPES else None
        casting = NOTHING
        if precision is not parent and policy.compute in LOW_DTYPES:
            inside, outside = precision or low, parent or low
            if precision is not torch.float32 and low is None:
                inside = None  # float32 parameters: the region casts
            casting = Casting(inputs=inside, outputs=outside, region=self._region(precision))
        elif low and precision is not torch.float32 and isinstance(module, _RNNS):
            casting = Casting(inputs=precision or low)
        elif low and precision is not torch.float32 and policy.norms is torch.float32 and isinstance(module, NORMS):
            casting = self._norm_casting(module, precision or low)
        if is_root:
            if low and precision is None and casting == NOTHING:
                casting = replace(casting, inputs=low)
            if policy.output is not None:
                casting = replace(casting, outputs=policy.output, outputs_as_inputs=False)
        return casting

    def _norm_casting(self, module: nn.Module, low: torch.dtype) -> Casting:
        if isinstance(module, _BatchNorm):
            return NOTHING
        weight = next((p for p in module.parameters(recurse=False)), None)
        kind: Any = type(module)
        if weight is not None and _mixes(kind, weight.device.type, low):
            return Casting(region=torch.float32)  # no region, whose rule would cast what the kernel takes as it is
        return Casting(inputs=torch.float32, outputs_as_inputs=True, region=torch.float32)

    def _region(self, precision: torch.dtype | None) -> torch.dtype | None:
        if not self._policy.has_regions:
            return None
        return precision or self._policy.compute

    def _wrap(self, module: nn.Module, casting: Casting) -> None:
        module.__dict__["_preamp_casting"] = casting
        module.__class__ = _casting_class(type(module))
        assert isinstance(module, CastingModule)
        self._changed.append(module)

    def bypass(self) -> list[tuple[CastingModule, Casting]]:
        """Stop casting; returns what `resume` needs."""
        held = [(module, module._preamp_casting) for module in self._changed]
        for module in self._changed:
            module._preamp_casting = NOTHING
        return held

    @staticmethod
    def resume(held: list[tuple[CastingModule, Casting]]) -> None:
        """Cast again."""
        for module, casting in held:
            module._preamp_casting = casting

    def to_float(self) -> None:
        """Buffers in float32, with all their bits where nobody wrote them; `to_low` is the way back."""
        for module, key, full, low, version in self._buffers:
            now = module._buffers[key]
            untouched = now is low and low._version == version
            module._buffers[key] = full if untouched else (None if now is None else now.float())

    def to_low(self) -> None:
        """Undo `to_float`."""
        for i, (module, key, _, low, _) in enumerate(self._buffers):
            full = module._buffers[key]
            if full is not None:
                fits = low.shape == full.shape and low.device == full.device
                low = low.copy_(full) if fits else full.to(low.dtype)  # in place: a CUDA graph may read it
                module._buffers[key] = low
                self._buffers[i] = (module, key, full, low, low._version)

    def undo(self) -> None:
        """The model as it was, in class and dtype; its values are those that training gave it."""
        for module in self._changed:
            module.__class__ = module._preamp_original  # type: ignore[assignment]
            del module.__dict__["_preamp_casting"]
        self._changed.clear()
        self.to_float()
        self._buffers.clear()


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that a compiled or parallel wrapper wraps (whose parameters are the same objects)."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _precisions(root: nn.Module, policy: Policy) -> Iterator[tuple[str, torch.dtype | None]]:
    """(path, dtype) of every module; None where the policy's own dtypes hold. Raises for ambiguity and for no match."""
    compiled = [(pattern, re.compile(pattern), precision) for pattern, precision in policy.modules]
    used: set[str] = set()
    found: dict[str, torch.dtype | None] = {}
    for path, _ in root.named_modules():
        matching = [(pattern, precision) for pattern, regex, precision in compiled if regex.fullmatch(path)]
        exact = [(pattern, precision) for pattern, precision in matching if pattern == path]
        used.update(pattern for pattern, _ in matching)
        chosen = exact or matching
        if len({precision for _, precision in chosen}) > 1:
            rules = ", ".join(f"{p!r} -> {x if isinstance(x, str) else name_of(x)}" for p, x in chosen)
            raise PolicyError(
                f"the module {path!r} matches several rules of different precision: {rules}. "
                f"Make the patterns exclusive, or add a rule for exactly {path!r}"
            )
        parent = found[path.rpartition(".")[0]] if path else None
        found[path] = _as_dtype(chosen[0][1], policy) if chosen else parent
    idle = [pattern for pattern, _, _ in compiled if pattern not in used]
    if idle:
        some = ", ".join(path for path in list(found)[1:6])
        raise PolicyError(
            f"no module matches {', '.join(map(repr, idle))}; paths look like: {some or '(no sub-modules)'}"
        )
    yield from found.items()


def _as_dtype(precision: Precision, policy: Policy) -> torch.dtype | None:
    if precision == "low" or precision is policy.compute:
        return None
    return torch.float32 if precision == "full" else precision

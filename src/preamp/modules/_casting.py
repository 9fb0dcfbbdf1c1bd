"""Modules that cast their inputs and outputs: subclasses, made on the fly, that wrap `forward`.

`isinstance`, `state_dict` keys, `deepcopy`, DataParallel, pickling and `torch.compile(fullgraph=True)` work as before;
a pair of forward hooks would break the compiler's graph, and a replaced `forward` attribute would run the original's
forward on a copy.
"""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import PreampWarning, SessionError
from ..formats import LOW_DTYPES, name_of
from ..tree import cast_floating, map_tensors, tensors


class _WithoutHook(nn.Module):
    """A base in front of a model's class whose `__init_subclass__` is not to run: some keep a table of subclasses."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


class Subclasses:
    """The subclasses of one kind, by what they are made from; each is kept while modules of it are there.

    `mixin`: a base of all of them. `original`: the name of the attribute that holds the class one is made from.
    `methods`: what they have in its place; `forward` gets its signature, and has to call it.
    """

    def __init__(self, mixin: type[nn.Module], original: str, **methods: Any) -> None:
        self._mixin, self._original, self._methods = mixin, original, methods
        self._made: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]] = weakref.WeakValueDictionary()

    def of(self, original: type[nn.Module]) -> type[nn.Module]:
        """The subclass of a class."""
        if _is_parametrized(original):  # it was made for one module
            return self._make(original)
        made = self._made.get(original)
        if made is None:
            made = self._made[original] = self._make(original)
        return made

    def _make(self, original: type[nn.Module]) -> type[nn.Module]:
        """A subclass; of a class that torch.nn.utils.parametrize has made for one module, one like it over a subclass,
        since to remove the parametrization is to go back to its base.
        """
        body: dict[str, Any] = {self._original: original}
        if _is_parametrized(original):
            own = {name: value for name, value in vars(original).items() if name not in ("__dict__", "__weakref__")}
            return type(original.__name__, (self.of(original.__bases__[0]),), {**own, **body})
        ours = self._methods["forward"]
        forward = FunctionType(ours.__code__, ours.__globals__, "forward", None, ours.__closure__)
        forward.__doc__, forward.__module__ = original.forward.__doc__, original.__module__
        forward.__qualname__ = getattr(original.forward, "__qualname__", "forward")
        with suppress(TypeError, ValueError):  # of a forward that is no Python function
            forward.__signature__ = inspect.signature(original.forward)  # type: ignore[attr-defined]
        body |= {**self._methods, "forward": forward}
        body |= {"__module__": original.__module__, "__doc__": original.__doc__}
        bases = (self._mixin,) if issubclass(self._mixin, original) else (original, self._mixin)  # of a bare nn.Module
        hooked = next(kind for kind in original.__mro__ if "__init_subclass__" in vars(kind))
        bases = bases if hooked.__module__ in ("builtins", "typing") else (_WithoutHook, *bases)  # Generic stays first
        return type(original.__name__, bases, body)

    def leave(self, module: nn.Module) -> None:
        """Give a module the class that it would have else, whatever was made of its class meanwhile."""
        kind: Any = type(module)
        if self._original in vars(kind):
            module.__class__ = vars(kind)[self._original]
        else:  # other code has made a subclass for it: torch.nn.utils.parametrize
            kind.__bases__ = tuple(vars(base).get(self._original, base) for base in kind.__bases__)


def _is_parametrized(kind: type[nn.Module]) -> bool:
    base = kind.__bases__[0]
    return kind.__module__ == "torch.nn.utils.parametrize" and kind.__name__ == f"Parametrized{base.__name__}"


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

    computes: torch.dtype | None = None
    """The dtype in which a whole model computes, whatever region a framework enters around it."""
    device_type: str = "cpu"
    """The device type of a whole model's parameters."""
    ambient: torch.dtype | None = None
    """The dtype of a region that a whole model enters where there is none, since float32 buffers meet its weights."""
    keeper: weakref.ref[Any] | None = None
    """Refers to the keeper of a whole model's masters, which knows whether some are in the places of weights now."""
    around: Callable[[nn.Module], Any] | None = None
    """Makes a context for each call of a whole model; a function of a module, as it is pickled with the model."""
    copies: Callable[[nn.Module], Mapping[Any, Tensor] | None] | None = None
    """Gives copies of the masters of a whole model, which a copy of it has for weights; None without its session."""

    wide_weights: bool = False
    """A batch norm computes with its weights in float32, as its statistics are: FSDP2 has given it 16-bit ones."""

    stays: bool = False
    """Whether a pickled module keeps it, since its model has 16-bit weights and could not be called without."""
    bypassed: bool = False
    """Of a whole model in full precision: nothing is cast for now."""

    @property
    def mixes(self) -> bool:
        """Whether it is that of a norm whose kernel takes 16-bit activations with float32 weights."""
        return (self.region is torch.float32 or self.outputs_as_inputs) and self.inputs is None


NOTHING = Casting()
BYPASSED = Casting(bypassed=True)

_APART = Casting(inputs=torch.float32, outputs_as_inputs=True, region=torch.float32)
"""For a norm that mixes, where its kernel cannot: torch's rules for gradients under vmap want one dtype."""


class CastingModule(nn.Module):
    """The mixin that a casting module's class gets. `_preamp_casting` is the only thing it adds."""

    _preamp_casting: Casting = NOTHING  # of a module that the class makes itself, as a slice of a Sequential is
    _preamp_original: type[nn.Module]


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the original forward between the casts."""
    if not isinstance(self, CastingModule):  # the session is closed, and user code has kept this method
        return type(self).forward(self, *args, **kwargs)
    casting, original = self._preamp_casting, self._preamp_original.forward
    if type(args) is not tuple or (args and type(args[0]) is not Tensor and isinstance(args[0], torch.fx.Proxy)):
        raise SessionError(f"torch.fx traces {_NO_COPY}, torch.fx.symbolic_trace(copied)")
    if casting.bypassed:  # a model that came in 16 bits is given such inputs, and is float32 now
        return original(self, *map_tensors(_widened, args), **map_tensors(_widened, kwargs))
    region = casting.region
    keeper = None if torch.compiler.is_compiling() or casting.keeper is None else casting.keeper()
    ambient = casting.computes if keeper is not None and keeper.inside else casting.ambient
    if ambient is not None and region is None and not _in_region(casting.device_type):
        region = ambient
    came_in = _first_floating(args, kwargs) if casting.outputs_as_inputs or region is not None else None
    if casting.mixes and came_in is not None and _is_transformed(came_in):
        casting = _APART
    if casting.computes is not None:
        _tell_foreign_region(casting.computes, casting.device_type, self)
    if (low := casting.inputs) is not None:
        args, kwargs = tuple([cast_floating(each, low) for each in args]), kwargs and cast_floating(kwargs, low)
    around = nullcontext() if casting.around is None else casting.around(self)
    with _region(region, self, came_in, args, kwargs), around:
        compute = _normed_with_wide_weights if casting.wide_weights else original
        result = compute(self, *args, **kwargs)
    outputs = came_in.dtype if casting.outputs_as_inputs and came_in is not None else casting.outputs
    return result if outputs is None else cast_floating(result, outputs)


def _reduce_ex(self: Any, protocol: Any) -> Any:
    """Pickle as the original class, which preamp is not needed to read; with its casts where weights are 16-bit."""
    state = {key: value for key, value in self.__dict__.items() if key != "_preamp_casting"}
    plain = object.__new__(self._preamp_original)
    plain.__dict__.update(state)
    make, args, *rest = plain.__reduce_ex__(min(protocol, 1))  # newer forms insist on the pickled object's own class
    if not self._preamp_casting.stays:
        return make, args, *rest
    return _unpickled, (replace(self._preamp_casting, copies=None, keeper=None), make, args), *rest


def _unpickled(casting: Casting, make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    module = make(*args)
    module.__dict__["_preamp_casting"] = casting
    module.__class__ = casting_class(type(module))
    return module


def _prepare_scriptable(self: Any) -> Any:
    """Refuse torch.jit.script, which calls this first."""
    raise SessionError(f"torch.jit.script compiles {_NO_COPY}, torch.jit.script(copied)")


_NO_COPY = (
    "a model by its source and shares its weights: the casts of an open session would be lost. Give it a copy, which "
    "is a plain float32 model. Write: copied = copy.deepcopy(model)"
)


_PLAIN = "preamp: a plain copy"


def _deepcopy(self: Any, memo: dict[Any, Any]) -> Any:
    """A copy that belongs to no session: of a whole model with 16-bit weights a plain one with what is stored for them.

    Averages and teachers are such copies, and changes as small as theirs are lost in 16 bits. The model is only read:
    another thread may copy it while it trains.
    """
    casting, plain = self._preamp_casting, _PLAIN in memo
    masters = None if plain or casting.copies is None else casting.copies(self)
    if masters is not None:
        for each in (*self.parameters(), *self.buffers()):
            if each in masters or each.dtype in LOW_DTYPES:
                wide = masters[each] if each in masters else each.detach().float()
                if id(each) in memo:  # its optimizer's copy, which came first, has it
                    memo[id(each)].data = wide
                    continue
                memo[id(each)] = nn.Parameter(wide, each.requires_grad) if isinstance(each, nn.Parameter) else wide
        memo[_PLAIN] = True  # until this one is copied
        try:
            return _deepcopy(self, memo)
        finally:
            del memo[_PLAIN]
    kind = self._preamp_original if plain or casting in (NOTHING, BYPASSED) else type(self)
    own = getattr(self._preamp_original, "__deepcopy__", None)
    if own is not None:
        clone = own(self, memo)
        clone.__class__ = kind
    else:
        clone = object.__new__(kind)
        memo[id(self)] = clone
        clone.__setstate__(copy.deepcopy(_state_of(self), memo))
    clone.__dict__.pop("_preamp_casting", None)
    if kind is type(self):
        clone.__dict__["_preamp_casting"] = casting
    return clone


def _state_of(module: Any) -> Any:
    """What a module gives to be copied: all that it has, unless its class says what."""
    given = getattr(type(module), "__getstate__", None)
    return module.__dict__ if given is getattr(object, "__getstate__", None) else module.__getstate__()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_DTYPES else tensor


def _in_region(device_type: str) -> bool:
    return not torch.amp.is_autocast_available(device_type) or torch.is_autocast_enabled(device_type)


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


def _is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor is under a transformation of torch.func; compiled code resolves those itself."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _first_floating(args: Any, kwargs: Any) -> Tensor | None:
    for tensor in tensors((args, kwargs)):
        if tensor.is_floating_point():
            return tensor
    return None


def _region(dtype: torch.dtype | None, module: nn.Module, like: Tensor | None, args: Any, kwargs: Any) -> Any:
    """A change of the ambient autocast region for one module; outside regions modules run unchanged.

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


def _tell_foreign_region(wanted: torch.dtype, device_type: str, module: nn.Module) -> None:
    """Warn when a region around a model's call, not a session's, has it compute in another dtype than its policy's."""
    if torch.compiler.is_compiling():
        return
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return
    seen = torch.get_autocast_dtype(device_type)
    if seen is wanted:
        return
    warnings.warn(
        f"{type(module).__name__} was prepared to compute in {name_of(wanted)}, and it is called in an autocast region "
        f"of {name_of(seen)}, which decides: it computes in {name_of(seen)}. Frameworks enter such a region themselves "
        f"(mixed_precision={name_of(seen)!r}, bf16=True, precision='bf16-mixed'): switch that off there, or prepare() "
        f"with a level that computes in {name_of(seen)}",
        PreampWarning,
        stacklevel=4,
    )


_SUBCLASSES = Subclasses(
    CastingModule, "_preamp_original", forward=_forward, __reduce_ex__=_reduce_ex,
    __deepcopy__=_deepcopy, __prepare_scriptable__=_prepare_scriptable,
)  # fmt: skip
casting_class = _SUBCLASSES.of
"""The class of `original`s that cast."""


def uncast(module: nn.Module) -> None:
    """Give a casting module the class it would have without casting, even if it was subclassed in between."""
    _SUBCLASSES.leave(module)
    module.__dict__.pop("_preamp_casting", None)

"""What a training step did between two optimizer steps, kept so that it can be replayed.

Calls of the models are kept with their inputs, random state and buffers; what the script computes from their outputs
(the loss) is kept operator by operator, with the line that asked for each. A replay calls the models again and runs
those operators on what they give, with autograd, so that the backward pass can be observed too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from ...autocast import MARKER
from ...formats import LOW_DTYPES
from ...machine import random_kept, random_state, set_random_state
from ...tree import PLAIN, tensors
from ..operators import Call, Observer, Stream, base_of
from ..places import Place, Places, users_line
from ..records import NOWHERE, Line
from ..shadow.remedies import PRODUCTS, Remedy, applied, run_kept
from ..shadow.source import Readings
from . import restore
from .entries import KeptTensor, Key, ModelCall, Named, Op, RandomState, Ref, call_again, identity_of, tensor_key

_REGIONS = ("cpu", "cuda", MARKER)
"""Device types whose autocast regions are entered again."""
CALLS = 16
"""Model calls of one step that are kept even when their backward pass was sound."""
LIMIT = 4000
"""Operators kept a step; a loss made of more is not replayed."""


class Tape(Observer):
    """The step's calls and operators, from its first model call on.

    `readings`: where what statements read is kept; `raised`: takes errors of the operators that are kept.
    """

    def __init__(
        self, stream: Stream, readings: Readings, raised: Callable[[Exception], None] = lambda _: None
    ) -> None:
        self._stream, self.readings, self._raised = stream, readings, raised
        self._entries: list[ModelCall | Op | RandomState | KeptTensor] = []
        self._known: dict[Key, StorageWeakRef | None] = {}
        """What a replay makes. The reference holds no numbers, but the identity: no other storage gets the same key."""
        self._calls = 0
        self._is_open = self._between = False
        self._op: Op | None = None
        self.is_replaying = False
        """Whether models are called to do the step again, which is no doing of the script's."""
        self.in_region = False
        """Whether an autocast region is entered, as operators do not see."""
        self._drew = False
        self.whole = True
        """False when more was done than is kept."""

    def clear(self) -> None:
        """Begin a new step."""
        self.close_window()
        self._entries.clear()
        self._known.clear()
        self._calls = 0
        self.whole = True

    @property
    def is_long(self) -> bool:
        """Whether so many model calls are kept that their inputs should be released where they are not needed."""
        return self._calls >= CALLS

    def enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> ModelCall:
        """Before a model runs."""
        self.close_window()
        parts = list(module.modules())
        held = [(part, name, b) for part in parts for name, b in part._buffers.items() if b is not None]
        call = ModelCall(
            module,
            self._refer(args),
            self._refer(kwargs),
            random_state(),
            [(part, name, b, b.detach().clone(), 0 if b.is_inference() else b._version) for part, name, b in held],
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _REGIONS),
            {part: restore.attributes_of(part) for part in parts},
            users_line(),
        )
        self._calls += 1
        if self._calls > 8 * CALLS:
            self.whole = False  # no step is that long: there are no steps
            self._entries.clear()
        else:
            self._entries.append(call)
        return call

    def leave_model(self, call: ModelCall, out: Any, keep_on: bool) -> None:
        """After it ran; `keep_on`: keep the operators that follow."""
        call.outputs = list(self._know(out))
        if keep_on:
            self.open_window()

    def open_window(self, *, between: bool = False) -> None:
        """Keep operators from here on; `between`: before a model has run, those that have to do with 16 bits."""
        if not self._is_open and self.whole:
            self._is_open, self._between, self._drew = True, between, False
            self._stream.add(self)

    def close_window(self) -> None:
        """Keep no more operators."""
        if self._is_open:
            self._is_open = False
            self._stream.remove(self)

    def wants(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Operators of the forward pass."""
        if torch._C._current_autograd_node() is not None or func.namespace == "profiler":
            return False
        if not self._between:
            return True
        given = [*tensors(args)]
        low = kwargs.get("dtype") in LOW_DTYPES or any(t.dtype in LOW_DTYPES for t in given)
        return low or any(tensor_key(t) in self._known for t in given)

    def after(self, call: Call) -> None:
        """An operator has given what the ones after it will read."""
        if self._op is not None:
            self._op.outputs = list(self._know(call.out))

    def failed(self, error: Exception) -> None:
        """An operator has raised an error."""
        self._raised(error)

    def before(self, call: Call) -> None:
        """Keep an operator, before it runs."""
        self._op = None
        if len(self._entries) >= LIMIT:
            self.whole = False
            return
        for tensor in call.written:
            key = tensor_key(tensor)
            if key not in self._known:
                self._entries.append(KeptTensor(key, tensor.detach().clone()))
                self._known[key] = identity_of(tensor)
        if not self._drew and torch.Tag.nondeterministic_seeded in call.func.tags:
            self._drew = True  # the first that draws since a model returned; those after it go on from there
            self._entries.append(RandomState(random_state()))
        self.readings.note(call.place.at)
        args, kwargs = self._refer(call.args), self._refer(call.kwargs)
        self._op = Op(call.func, args, kwargs, [], call.grad_enabled, call.place, self.in_region)
        self._entries.append(self._op)

    def keep_grad(self, original: Any, args: Any, kwargs: Any, out: Any) -> None:
        """`torch.autograd.grad`, after it ran with a graph to go back through once more."""
        if not self._is_open or len(self._entries) >= LIMIT:
            return
        place = Place(self._stream.module, *users_line(), "forward")
        args, kwargs = self._refer(args), self._refer(kwargs)
        self._entries.append(Op(original, args, kwargs, list(self._know(out)), True, place))

    def _know(self, out: Any) -> Iterator[Key]:
        """The keys of tensors that a replay makes again."""
        for tensor in tensors(out):
            key = tensor_key(tensor)
            self._known[key] = identity_of(tensor)
            yield key

    def _refer(self, value: Any) -> Any:
        """A value with every tensor that a replay makes itself replaced by its key."""
        if isinstance(value, Tensor):
            key = tensor_key(value)
            return Ref(key) if key in self._known else value
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is tuple or kind is list:  # by hand: pytree takes longer than most operators
            return kind([self._refer(item) for item in value])
        if kind is dict:
            return {name: self._refer(item) for name, item in value.items()}
        return tree_map(lambda leaf: self._refer(leaf) if isinstance(leaf, Tensor) else leaf, value)

    def models(self) -> list[nn.Module]:
        """The models called, each once."""
        return list(dict.fromkeys(entry.module for entry in self._entries if isinstance(entry, ModelCall)))

    def called(self) -> Line:
        """The script's line that called a model first in this step."""
        return next((entry.at for entry in self._entries if isinstance(entry, ModelCall)), NOWHERE)

    def called_at(self, path: str | None, named: Named) -> Line:
        """The script's line that called the model of which a module is part; (None, None) where it was not called."""
        for entry in self._entries:
            if isinstance(entry, ModelCall) and any(named(part) == path for part in entry.module.modules()):
                return entry.at
        return NOWHERE

    def samples(self, *, masks: bool = True) -> tuple[int, ...]:
        """Positions along the first dimension of the first input of the step that is not finite; of 16 at the most.

        Without `masks`, -inf does not count: it is what attention masks are made of.
        """
        for tensor in self.inputs():
            if not tensor.is_floating_point() or not tensor.dim():
                continue
            values = tensor.detach()
            sick = ~torch.isfinite(values) if masks else values.isnan() | (values == torch.inf)
            if bool(sick.any()):
                return tuple(int(i) for i in sick.reshape(tensor.shape[0], -1).any(dim=1).nonzero().flatten()[:16])
        return ()

    def inputs(self) -> Iterator[Tensor]:
        """The script's own tensors that went in: of the models' calls, then of the loss."""
        for entry in self._entries:
            if isinstance(entry, (ModelCall, Op)):
                yield from tensors((entry.args, entry.kwargs))

    def factor_on(self, loss: Tensor) -> float | None:
        """The constant that the script multiplied the loss by, last of all; None without one."""
        return self._last_factor(loss)[1]

    def _last_factor(self, loss: Tensor) -> tuple[Key, float | None]:
        """What was multiplied last to give the loss, or the loss itself, and by which constant."""
        wanted = tensor_key(loss)
        for entry in self._entries:
            if isinstance(entry, Op) and wanted in entry.outputs and base_of(entry.func) == "mul":
                of, factor = entry.args[0], entry.args[1] if len(entry.args) > 1 else None
                if isinstance(factor, Tensor) and factor.numel() == 1:
                    factor = float(factor)
                if isinstance(factor, (int, float)):
                    return of.key if isinstance(of, Ref) else wanted, float(factor)
                return wanted, None
        return wanted, None

    def knows(self, loss: Tensor) -> bool:
        """Whether a replay gives this loss."""
        return self.whole and tensor_key(loss) in self._known

    def replay(
        self, losses: Sequence[Tensor], places: Places, remedy: Remedy | None = None, *, unscaled: bool = False
    ) -> list[Tensor]:
        """Do it all again up to the losses, and return the new ones; without any, all that is kept.

        `places` is told where each operator is run; `remedy`: with these lines computed otherwise; `unscaled`: up to
        the losses as they were before the constant that they were multiplied by last.
        """
        wanted = [self._last_factor(loss)[0] if unscaled else tensor_key(loss) for loss in losses]
        made = [getattr(e, "outputs", ()) for e in self._entries]
        ends = [max(i for i, outputs in enumerate(made) if key in outputs) for key in wanted]
        env = self._again(max(ends, default=len(made) - 1), places, remedy)
        return [env[key] for key in wanted]

    @contextmanager
    def done_again(self) -> Iterator[None]:
        """Inside, models may be called again: it leaves no trace, and only modes entered inside see it."""
        parts = [part for model in self.models() for part in model.modules()]
        attributes = {part: restore.attributes_of(part) for part in parts}
        self.is_replaying = True
        try:
            with _disable_current_modes(), random_kept(), restore.untouched(parts), restore.eager():
                yield
        finally:
            self.is_replaying = False
            restore.put_back(attributes)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        return not self._entries

    @property
    def device(self) -> str:
        """The type of device on which the step runs."""
        kinds = {t.device.type for model in self.models() for t in model.parameters()} - {"cpu"}
        return next(iter(kinds), "cpu")

    def _again(self, last: int, places: Places, remedy: Remedy | None) -> dict[Key, Tensor]:
        env: dict[Key, Tensor] = {}

        def look_up(leaf: Any) -> Any:
            if remedy is None or remedy.casts == "kept" or not isinstance(leaf, Tensor):
                return env[leaf.key] if isinstance(leaf, Ref) else leaf
            version, exact, line = self.readings.casts.get(leaf, (None, leaf, NOWHERE))
            return exact if version is not None and remedy.covers(line, None) else leaf

        def cast_again(leaf: Any) -> Any:
            is_strided = isinstance(leaf, Ref) and len(leaf.key) > 1
            return look_up(leaf).to(leaf.key[-1]) if is_strided else look_up(leaf)

        def as_given(leaf: Any) -> Any:
            found = cast_again(leaf)
            if remedy is not None and found is not look_up(leaf):  # the model's weights have this dtype
                remedy.back[:] = [found.dtype]
            return found

        for entry in self._entries[: last + 1]:
            if isinstance(entry, RandomState):
                set_random_state(entry.state)
            elif isinstance(entry, KeptTensor):
                env[entry.key] = entry.value.clone()
            elif isinstance(entry, ModelCall):
                uncast = remedy is not None and remedy.casts == "only"  # nothing of which is to be cast back
                find = look_up if uncast or any(on for _, on, _ in entry.autocast) else as_given
                given = tree_map(find, entry.args), tree_map(find, entry.kwargs)
                with restore.unheard(), applied(remedy, places):
                    out = list(tensors(call_again(entry, *given)))
                env.update({key: t for key, t in zip(entry.outputs, out, strict=False) if key is not None})
            else:
                place = entry.place
                cast = entry.in_region and base_of(entry.func) in PRODUCTS
                cast = cast and remedy is not None and not remedy.computes(place.at, place.module)
                find = cast_again if cast else look_up
                args, kwargs = tree_map(find, entry.args), tree_map(find, entry.kwargs)
                places.forced = entry.place
                with torch.set_grad_enabled(entry.grad):
                    reading = self.readings.get(place.at)
                    within = None if reading is None else reading.function
                    out = run_kept(entry.func, args, kwargs, remedy, place, within)
                places.forced = None
                alias = base_of(entry.func) in ("detach", "alias")
                for key, tensor in zip(entry.outputs, tensors(out), strict=False):
                    if not (alias and key in env):
                        env[key] = tensor
        return env

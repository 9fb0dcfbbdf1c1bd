"""Master weights: the float32 copies that an optimizer steps while the model computes in 16 bits.

The optimizer keeps the model's own parameters in its groups. While it steps, each parameter is its master, with a
float32 gradient; afterwards it is the 16-bit tensor again, with the new master rounded into it. So `zero_grad` of the
optimizer and of the model, `add_param_group`, LR schedulers, hooks and `state_dict` see the parameters they always saw,
and any optimizer's state is made in float32.

A master follows its parameter: one that was written from outside (`load_state_dict`, an EMA, a clamp) takes over the
entries that changed, and keeps its own bits where the written value is what the master rounds to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import SessionError
from ..formats import LOW_DTYPES
from ..kernels import Storage, Tensors, join
from ..sharding import held_here
from .audit import Audit, agrees
from .leaves import Agreed, Kept, Leaf, Leaves, check_masters, whole
from .swap import hand_over, rebuild_reducers, set_data, swap


class Masters:
    """The masters of a session's low parameters, by parameter."""

    wanted = True
    """Whether a low parameter that is added later should get a master too."""
    split = False
    """Whether masters are split: the parameter, and low bits beside it, instead of a float32 copy."""
    step = 0
    """The number of the session's step, for random numbers."""

    def __init__(self) -> None:
        self._leaves: dict[Parameter, Leaf] = {}
        self.inside: dict[Parameter, Leaf] = {}
        """Those whose masters are in their places."""
        self._every: Leaves | None = None
        self._agreed = Agreed()
        self._audit = Audit()
        self._wide: dict[Parameter, weakref.ref[Parameter]] = {}
        """The float32 tensors that parameters had in `full` last: a graph that is still alive may hold them."""
        self._entered: list[Parameter] = []  # in `full`
        self._adopted: set[Parameter] = set()
        """Those that came in 16 bits."""
        self.rounded: str | None = None
        """A parameter whose master was replaced by 16-bit values that were loaded, if there is one."""

    def __len__(self) -> int:
        return len(self._leaves)

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._leaves)

    def __contains__(self, parameter: Parameter) -> bool:
        return parameter in self._leaves

    def among(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        """Select the parameters that have a master."""
        return [parameter for parameter in parameters if parameter in self] if self._leaves else []

    @property
    def recast(self) -> dict[Parameter, torch.dtype]:
        """The dtypes in which parameters are stepped now, of those that were stepped in another one before."""
        return dict.fromkeys(self._adopted, torch.float32)

    def lower(self, name: str, parameter: Parameter, dtype: torch.dtype) -> None:
        """Turn a float32 parameter into a low one; its present data becomes the master."""
        master = parameter.data
        set_data(parameter, master.to(dtype))
        self._know(name, parameter, master)

    def adopt(self, name: str, parameter: Parameter) -> None:
        """Make a master for a parameter that is already low."""
        self._adopted.add(parameter)
        self._know(name, parameter, parameter.data.float())

    def _know(self, name: str, parameter: Parameter, stored: Tensor) -> None:
        self._leaves[parameter] = Leaf(name, stored, parameter.data, self._agreed.add(parameter))
        self._every = None

    def without_masters(self, leaves: Leaves) -> list[Parameter]:
        """The 16-bit parameters that are trained, should have a master, and have none."""
        return [p for p in leaves.others if p.dtype in LOW_DTYPES and p.requires_grad] if self.wanted else []

    def leaves_of(self, parameters: Sequence[Parameter]) -> Leaves:
        """The leaves of parameters that are checked together, valid until more of these have one."""
        return Leaves(parameters, self._leaves, self._agreed)

    def _all_leaves(self) -> Leaves:
        self._every = self._every or self.leaves_of(list(self._leaves))
        return self._every

    def refresh(self, leaves: Leaves | None = None, addresses: tuple[int, ...] | None = None) -> None:
        """Update the masters of parameters that were written from outside since the last step.

        `leaves`: of these; None: of all. `addresses`: of the parameters, if known.
        """
        if not self._leaves:
            return
        leaves = leaves or self._all_leaves()
        if leaves.agree(addresses) and not self.inside:
            return
        for parameter, leaf in zip(leaves.parameters, leaves.leaves, strict=True):
            if parameter not in self.inside:
                self._follow(parameter, leaf)

    def _follow(self, parameter: Parameter, leaf: Leaf) -> None:
        if self._agreed.holds(leaf.number, parameter):
            return
        data = parameter.data
        leaf.fit(parameter, data)
        master = leaf.stored.to(data.device)
        # A parameter that its user cast to float32 holds the rounded value: it gets the master's bits back.
        kept = data == master.to(data.dtype if data.dtype in LOW_DTYPES else leaf.low.dtype)
        written = torch.where(kept, master, data.float())
        leaf.stored = master.detach().copy_(written)  # in place: an optimizer's state may hold it too
        if data.dtype is torch.float32:
            data.copy_(written)
        self._note(parameter, leaf)

    def _note(self, parameter: Parameter, leaf: Leaf) -> None:
        """Record that a parameter agrees with its master now."""
        leaf.low = parameter.data
        self._agreed.note(leaf.number, parameter)

    def refresh_before_step(self, leaves: Leaves, *, again: bool = False) -> None:
        """`refresh`, and now and then `compare`. `again`: the step itself refreshes them."""
        if not self._leaves:
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self.refresh(leaves)  # a graph would repeat a comparison at each replay, and must not read a flag
            return
        self._audit.read_flags()
        if self._audit.due(leaves):
            self.compare(leaves)
        elif not again:
            self.refresh(leaves)

    def compare(self, leaves: Leaves | None = None) -> None:
        """`refresh`, and also the masters of parameters that were written through `.data`: by their values."""
        leaves = leaves or self._all_leaves()
        self.refresh(leaves)
        pairs = [pair for pair in zip(leaves.parameters, leaves.leaves, strict=True) if pair[0] not in self.inside]
        for parameter, leaf in self._audit.written(pairs):
            self._agreed.versions[leaf.number] = -1
            self._follow(parameter, leaf)

    def swap_in(self, parameters: Iterable[Parameter], gradients: Mapping[Parameter, Tensor] | None = None) -> None:
        """Swap masters in for the parameters, with the float32 `gradients` (None if a parameter has none)."""
        for parameter in parameters:
            leaf = self._leaves.get(parameter)
            if leaf is None or parameter in self.inside:
                continue
            gradient = None if gradients is None else gradients.get(parameter)
            leaf.other = Parameter(self._in_float32(parameter, leaf), parameter.requires_grad)
            leaf.other.grad = leaf.shown = gradient
            leaf.shown_version = 0 if gradient is None else gradient._version
            self.inside[parameter] = leaf  # first: an interrupt may come at any line, and the way back starts here
            try:
                swap(parameter, leaf.other)
            except SessionError:
                del self.inside[parameter]
                self.swap_out(gradients)
                raise
            leaf.aside, leaf.other.grad = leaf.other.grad, None

    def _in_float32(self, parameter: Parameter, leaf: Leaf) -> Tensor:
        """The master that takes a parameter's place."""
        return leaf.stored

    def swap_out(
        self, parameters: Iterable[Parameter] | None = None, scale: Tensor | None = None, changed: bool = False,
        lazily: bool = False,
    ) -> list[tuple[Parameter, Parameter]]:  # fmt: skip
        """Put the 16-bit tensors back, and round the masters into them; if `lazily`, where that makes a difference.

        They get their gradients back. Float32 gradients that were changed in between are copied back times `scale` (all
        of them if `changed`), and cleared ones stay cleared. Returns pairs of a parameter and the object that held its
        master.
        """
        if not self.inside:
            return []
        leaving = list(self.inside if parameters is None else (p for p in parameters if p in self.inside))
        with torch.no_grad():
            for parameter in leaving:
                leaf = self.inside[parameter]
                other = leaf.other
                # An interrupt came before the swap. The address decides: a parameter may be float32 by its user's cast.
                if other is None or (other.dtype is torch.float32 and other.data_ptr() != leaf.low.data_ptr()):
                    continue
                leaf.take_back(parameter, scale, changed)
                other.requires_grad_(parameter.requires_grad)  # freezing it while swapped in is meant to last
                swap(parameter, other)
                leaf.fit(parameter, other.detach())
            self._publish(leaving, lazily)
        others = []
        for parameter in leaving:
            leaf = self.inside[parameter]
            self._note(parameter, leaf)
            if leaf.other is not None:
                leaf.other.grad = None
                others.append((parameter, leaf.other))
            leaf.other = None
            del self.inside[parameter]
        return others

    def _publish(self, parameters: Sequence[Parameter], lazily: bool) -> None:
        for parameter in parameters:
            leaf = self._leaves[parameter]
            if leaf.other is not None:
                # an optimizer may have put another tensor there; not `.data`, whose writes autograd would not notice
                now = leaf.other.detach()
                leaf.stored = now if now.dtype is torch.float32 else self._of_weight(leaf.stored, now)  # it was cast
        written = [p for p in parameters if not lazily or not agrees(p, self._leaves[p])]
        if written:
            masters = [held_here(self._leaves[p].stored) for p in written]
            torch._foreach_copy_(list(map(held_here, written)), masters)

    def take_late(self, parameters: Iterable[Parameter]) -> dict[Parameter, Tensor]:
        """Take, in float32, gradients that came to 16-bit parameters while their masters were in their places."""
        late = {}
        for parameter in self.among(parameters):
            low = self._leaves[parameter].other if parameter in self.inside else parameter
            if low is not None and low.grad is not None:
                late[parameter], low.grad = low.grad.float(), None
        return late

    def place(self, storage: Storage, stored: Tensors, parameters: Tensors) -> None:
        """Put into the storage of a step what is stored for its parameters."""
        storage.params, storage.copies = stored, parameters

    def stored(self, parameter: Parameter) -> Tensor:
        """What is stored for a parameter: its float32 master, or that master's low bits."""
        return self._leaves[parameter].stored

    def held(self, parameter: Parameter) -> Iterator[tuple[str, Tensor]]:
        """What is held for a parameter, but for its states: (kind, tensor) pairs, to be counted."""
        leaf = self._leaves.get(parameter)
        yield "parameters", parameter.data if leaf is None else leaf.low
        if leaf is not None:
            yield "masters", leaf.stored
            late = None if leaf.other is None else leaf.other.grad
            yield from (("gradients", grad) for grad in (leaf.aside, late) if grad is not None)
        if parameter.grad is not None:
            yield "gradients", parameter.grad

    def full(self) -> None:
        """Turn every parameter into float32, until `low`; in a hook of a step some are so before, and stay so."""
        self.compare()
        self._entered = [parameter for parameter in self._leaves if parameter not in self.inside]
        self.swap_in(self._entered)

    def low(self) -> None:
        """Undo `full`, keeping what was written into the parameters in between.

        A backward pass may still be due: of 16-bit parameters, which must not be written unless they have changed, or
        of float32 ones.
        """
        for parameter, other in self.swap_out(self._entered, lazily=True):
            self._handed_over(parameter, other)

    def _handed_over(self, parameter: Parameter, other: Parameter) -> None:
        hand_over(parameter, other)
        self._agreed.in_graphs = True
        self._wide[parameter] = weakref.ref(other)

    def behind(self, tensor: Tensor) -> list[Tensor]:
        """A tensor, and what else graphs may have in the place of a parameter: its master, or its 16 bits in `full`."""
        known, leaf = self._wide.get(tensor), self.inside.get(tensor)  # type: ignore[call-overload]
        others = known and known(), leaf and leaf.other
        return [tensor, *(other for other in others if other is not None)]

    def grad(self, outputs: Tensor, inputs: Iterable[Tensor], create_graph: bool) -> list[Tensor]:
        """Gradients of the sum of `outputs`, as `torch.autograd.grad` has them, in float32."""
        behind = list(map(self.behind, inputs))
        every, unused = list(chain.from_iterable(behind)), any(len(each) > 1 for each in behind)
        seed = torch.ones_like(outputs)
        raw = iter(torch.autograd.grad(outputs, every, seed, create_graph=create_graph, allow_unused=unused))
        found = [[g.float() for g in islice(raw, len(each)) if g is not None] for each in behind]
        if not all(found):
            raise SessionError("grad(): the outputs do not depend on one of the inputs")
        return [reduce(torch.add, each) for each in found]

    def restore(self) -> dict[Parameter, torch.dtype]:
        """Give every parameter its master for good, and forget it; those that came in 16 bits keep what they hold.

        Returns the dtypes in which parameters of `recast` are stepped from now on.
        """
        self.swap_out()
        self.compare()
        for parameter, leaf in self._leaves.items():
            if parameter not in self._adopted:
                set_data(parameter, self._in_float32(parameter, leaf))
        rebuild_reducers(self._leaves)
        stepped = {parameter: parameter.dtype for parameter in self._adopted}
        for known in (self._leaves, self._wide, self._adopted):
            known.clear()
        self._every = None
        return stepped

    @contextmanager
    def loading(self, named: Mapping[str, Parameter], state: Mapping[str, Any]) -> Iterator[None]:
        """Wrap the loading of a model's state: masters take wider values, which the parameters would round."""
        dtypes = {p: getattr(state.get(name), "dtype", None) for name, p in named.items() if p in self._leaves}
        # what has another name in the state may be renamed by a hook of the module's
        wide = [p for p, dtype in dtypes.items() if dtype not in LOW_DTYPES and p not in self.inside]
        before = {p: p.detach().clone() for p, dtype in dtypes.items() if dtype in LOW_DTYPES and p not in self.inside}
        self.swap_in(wide)
        try:
            yield
        finally:
            self.swap_out(wide)
        for parameter, value in before.items():
            if not torch.equal(held_here(parameter), held_here(value)):
                self.rounded = self._leaves[parameter].name

    def rename(self, named: Iterable[tuple[str, Parameter]]) -> None:
        """Name masters by the present paths of their parameters in the models; the first of several."""
        paths: dict[Parameter, str] = {}
        for path, parameter in named:
            paths.setdefault(parameter, path)
        taken = set(paths.values())
        for parameter, leaf in self._leaves.items():
            leaf.name = paths.get(parameter) or (f"(removed):{leaf.name}" if leaf.name in taken else leaf.name)

    def named(self) -> dict[str, Kept]:
        """The masters by name, live tensors."""
        return {self._leaves[parameter].name: kept for parameter, kept in self.saved().items()}

    def saved(self) -> dict[Parameter, Kept]:
        """The masters by parameter, live tensors."""
        self.compare()
        return {parameter: self._saved(parameter, leaf) for parameter, leaf in self._leaves.items()}

    def copies(self, parameters: Iterable[Parameter]) -> dict[Parameter, Tensor]:
        """Float32 values in new memory: masters where they round to what a parameter has, which may be written now."""
        found = {}
        for parameter in self.among(parameters):
            low = parameter.detach()
            wide = low if low.dtype is torch.float32 else self._in_float32(parameter, self._leaves[parameter])
            found[parameter] = self._of_weight(wide, low)
        return found

    def _of_weight(self, wide: Tensor, low: Tensor) -> Tensor:
        return torch.where(wide.to(low.dtype) == low, wide, low.float()).detach()

    def _saved(self, parameter: Parameter, leaf: Leaf) -> Kept:
        return leaf.stored

    def load(self, state: Mapping[str, Any], named: Iterable[tuple[str, Parameter]]) -> None:
        """Take masters by name, also into `named` parameters that have none now. `StateError` unless all fit."""
        self.rename(named := list(named))
        self.rounded = None
        self.swap_out()
        left = {name: p for name, p in named if name in state and p not in self}
        check_masters(state, self._leaves, left)
        with torch.no_grad():
            for name, parameter in left.items():
                parameter.copy_(whole(name, state[name]))
            for parameter, leaf in self._leaves.items():
                self._take(parameter, leaf, whole(leaf.name, state[leaf.name]))
                self._note(parameter, leaf)

    def take_over(self, kept: Mapping[Parameter, Tensor]) -> None:
        """Take masters, or their bits, that an optimizer has kept for its own steps; later writes to weights win."""
        for parameter, own in kept.items():
            low, leaf = parameter.data, self._leaves[parameter]
            wide = (
                torch.where(own.to(low.dtype) == low, own, low.float()) if own.is_floating_point() else join(low, own)
            )
            self._take(parameter, leaf, wide)
            self._note(parameter, leaf)

    def _take(self, parameter: Parameter, leaf: Leaf, wide: Tensor) -> None:
        """Keep a master that is loaded, and round it into its parameter."""
        leaf.stored.copy_(wide)
        parameter.data.copy_(leaf.stored)

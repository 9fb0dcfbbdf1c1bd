"""Brings a model under a policy: converts its parameters and buffers, and has its modules cast."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedParameter

from ..errors import PolicyError, SessionError, kind_of
from ..formats import LOW_DTYPES, name_of
from ..frameworks import unwrapped
from ..ledger import Masters, NoMasters, set_data
from ..policy import Policy
from ..sharding import gathered_as, reshard
from ._casting import BYPASSED, NOTHING, Casting, CastingModule, casting_class, uncast
from ._owned import check_free, disown, own
from ._precisions import NORMS, is_norm, mixes, precisions_of, refuse_unfit

_FLOATS, _LEARNS = (torch.float32, *LOW_DTYPES), attrgetter("requires_grad")

_FAST: tuple[type[nn.Module], ...] = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
_Buffer = tuple[nn.Module, str, Tensor, Tensor]  # a module, its key, the buffer in float32 and in 16 bits
_RNNS: tuple[type[nn.Module], ...] = (nn.RNNBase, nn.RNNCellBase)


class Conversion:
    """A model brought under a policy; `undo()` brings its modules and buffers back (`keeper` its parameters).

    `model`: its floating parameters in float32, or already in the policy's dtype. `prefix` goes before names ("gen:"),
    to distinguish several models. `around` makes a context for each call of a model with 16-bit parameters, `copies`
    gives what a copy of it has for weights. `stepped`: the parameters that optimizers step; others are left as they
    are, and cast at use (None: all are brought under the policy, for inference). If the policy does not fit the model,
    nothing is changed.
    """

    def __init__(
        self, model: nn.Module, policy: Policy, keeper: Masters, prefix: str = "",
        around: Callable[[nn.Module], Any] | None = None, stepped: Collection[nn.Parameter] | None = None,
        copies: Callable[[nn.Module], Any] | None = None,
    ) -> None:  # fmt: skip
        self._policy, self._keeper, self._prefix, self._around, self._copies = policy, keeper, prefix, around, copies
        self._left: dict[nn.Parameter, tuple[str, torch.dtype]] = {}
        """Parameters that no optimizer steps, with their names and the dtypes that the policy has for them."""
        self._low = NoMasters()
        """Keeps those of them that are 16-bit, for passes in full precision."""
        self._changed: dict[CastingModule, Casting] = {}
        self._buffers: list[_Buffer] = []
        self._low_buffers: list[_Buffer] = []  # that came so, and are float32 in full precision
        self._owned: list[nn.Module] = []
        self._known: set[nn.Parameter] = set()
        self._wide_buffers = False
        root = unwrapped(model)
        check_free(root, keeper)
        for path, module in root.named_modules():
            if isinstance(module, CastingModule):  # a copy, or one whose session was lost: as it was before
                uncast(module)
            if policy.params in LOW_DTYPES:
                refuse_unfit(path, module)
        self._gathered = gathered_as(root)
        self._sparse = _sparse_embeddings(root) if policy.masters else set()
        list(self._survey(root))
        joining = [p for p in self._left if stepped is None or (p.requires_grad and p in stepped)]
        for parameter in joining:  # raises before anything is changed
            self._check(parameter, *self._left[parameter])
        try:
            self._lower(joining)
            for parameter in self._left:
                self._low.adopt("", parameter)
            self._lower_buffers(root)
            for path, module in root.named_modules():
                self._cast(path, module)
                if isinstance(module, nn.RNNBase) and policy.params in LOW_DTYPES:
                    module.flatten_parameters()
            self._own(root)
        except BaseException:  # a class may allow no subclass
            self.undo()
            raise

    def _own(self, root: nn.Module) -> None:
        self._owned = list(root.modules())
        self._known = {p for p in root.parameters() if not isinstance(p, UninitializedParameter)}
        own(self._owned, self._keeper)

    def _survey(self, root: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
        """Note parameters that are not known yet as left; each with its module."""
        self._precisions = dict(precisions_of(root, self._policy, first=not self._owned))
        for path, module in root.named_modules():
            dtype = self._storage(module, self._precisions[path])
            for key, parameter in module._parameters.items():
                if parameter is None or parameter in self._known:
                    continue
                name = f"{self._prefix}{path}.{key}" if path else f"{self._prefix}{key}"
                lazy = isinstance(parameter, UninitializedParameter)
                if lazy and not self._owned:
                    raise PolicyError(f"the parameter {name} is lazy: run one batch through the model before prepare()")
                if lazy or parameter.dtype not in _FLOATS:
                    continue
                first, stored = self._left.setdefault(parameter, (name, dtype))
                if stored is not dtype and not self._owned:
                    raise PolicyError(
                        f"{first} and {name} are one shared parameter, which the policy wants in "
                        f"{name_of(stored)} and in {name_of(dtype)}; give both modules the same precision"
                    )
                yield module, parameter

    def _meet(self) -> None:
        """Find parameters that the model has got since: those of a module that was added, and those that the removal of
        a reparametrization has made of 16-bit ones, which are float32 again when the session ends.
        """
        if not self._owned:
            return
        root = self._owned[0]
        if self._known.issuperset(root.parameters()):
            return
        reshard([root])  # while it is gathered, FSDP2 shows other parameters, which are nobody's to keep
        if self._known.issuperset(root.parameters()):
            return
        before = set(self._owned)
        gone = self._known.difference(root.parameters())
        taken = {held.data_ptr() for parameter in self._keeper.among(gone) for _, held in self._keeper.held(parameter)}
        for module, parameter in self._survey(root):
            name, dtype = self._left[parameter]
            lent = parameter.data_ptr() in taken
            if lent and parameter.dtype is torch.float32:
                parameter.data = parameter.data.clone()  # which the master of one that is gone goes on holding
            if (lent or module in before) and parameter.dtype is dtype and dtype in LOW_DTYPES:
                self._low.lower(name, parameter, dtype)
            else:
                self._low.adopt(name, parameter)
        self._own(root)

    def _check(self, parameter: nn.Parameter, name: str, dtype: torch.dtype) -> None:
        """Check that an optimizer can step a parameter under the policy."""
        if parameter in self._gathered:
            self._check_gathered(name, parameter, dtype)
        elif parameter.dtype in LOW_DTYPES and parameter.dtype is not dtype:
            raise PolicyError(
                f"the parameter {name} is {name_of(parameter.dtype)} and the policy wants {name_of(dtype)}: "
                "prepare() casts by itself. Leave out .half() or .to(...) before it, load the model with "
                "from_pretrained(..., dtype=torch.float32), or make the layers that train float32: "
                "layer.float(). O2 takes fp16 parameters and O5 bf16 ones, not in norms, and gives them masters"
            )

    def _check_gathered(self, name: str, parameter: nn.Parameter, wanted: torch.dtype) -> None:
        """A sharded parameter stays float32, and is its own master: FSDP2 has to gather it as the policy wants."""
        if parameter.dtype in LOW_DTYPES:
            raise SessionError(
                f"the sharded parameter {name} is {name_of(parameter.dtype)}: its shards would be rounded after every "
                "step. Shard the float32 model, which prepare() and .half() have not seen yet: "
                "fully_shard(model, mp_policy=policy.fsdp()), then the optimizer, then prepare()"
            )
        gathered = self._gathered.get(parameter) or torch.float32
        low = self._policy.params in LOW_DTYPES
        if low and wanted in LOW_DTYPES and gathered is not wanted:
            raise SessionError(
                f"the sharded parameter {name} is gathered in {name_of(gathered)}, and the policy computes with "
                f"{name_of(wanted)} parameters: write fully_shard(module, mp_policy=policy.fsdp()) with policy = "
                f"preamp.policy({self._policy.level or str(self._policy)!r}), or take level='O1' or 'O4'"
            )
        path = name.removeprefix(self._prefix).rpartition(".")[0]
        if wanted is torch.float32 and gathered in LOW_DTYPES and self._precisions[path] is torch.float32:  # by a rule
            raise SessionError(
                f"the policy wants {name} in float32, and FSDP2 gathers it in {name_of(gathered)}: shard that module "
                "by itself before the ones around it: fully_shard(module, mp_policy=policy.fsdp(full=True))"
            )

    def _storage(self, module: nn.Module, precision: torch.dtype | None) -> torch.dtype:
        """The dtype of a module's own parameters and buffers."""
        policy = self._policy
        if policy.params is torch.float32 or precision is torch.float32 or module in self._sparse:
            return torch.float32
        if is_norm(module):
            return policy.norms if policy.norms is torch.float32 else precision or policy.params
        return precision or policy.params

    def _lower(self, joining: Collection[nn.Parameter]) -> None:
        """Give parameters that were left the dtypes and the masters that the policy has for them."""
        for parameter in joining:
            name, dtype = self._left.pop(parameter)
            self._low.drop(parameter)
            if parameter in self._gathered or parameter in self._keeper:
                continue  # FSDP2's are their own masters; another model of the session may have it as well
            if parameter.dtype is not torch.float32 and parameter.dtype is not dtype:
                set_data(parameter, parameter.data.float())
            if dtype in LOW_DTYPES and parameter.dtype is dtype:
                self._keeper.adopt(name, parameter)
            elif dtype in LOW_DTYPES:
                self._keeper.lower(name, parameter, dtype)

    def _lower_buffers(self, root: nn.Module) -> None:
        for path, module in root.named_modules():
            dtype = self._storage(module, self._precisions[path])
            if is_norm(module) and self._is_left(module) is not None:
                continue  # its statistics have the dtype of its weights
            for key, buffer in module._buffers.items():
                if buffer is None or buffer.dtype is not torch.float32 or dtype not in LOW_DTYPES:
                    continue
                if not self._policy.has_regions or is_norm(module):
                    low = next((low for _, _, full, low in self._buffers if full is buffer), None)  # another has it
                    low = buffer.to(dtype) if low is None else low
                    module._buffers[key] = low
                    self._buffers.append((module, key, buffer, low))
                else:  # a counter or an average would stop moving, and frequencies become other angles
                    self._wide_buffers = True

    def _is_left(self, module: nn.Module) -> torch.dtype | None:
        """The dtype of a module's own parameters if no optimizer steps them, else None."""
        return next((p.dtype for p in module._parameters.values() if p is not None and p in self._left), None)

    def join(self, stepped: Collection[nn.Parameter]) -> list[nn.Parameter]:
        """Bring parameters under the policy that were left as they are, and that an optimizer steps from now on."""
        self._meet()
        joining = [p for p in self._left if p.requires_grad and p in stepped]
        self._lower(joining)
        changed = set(joining)
        if joining:
            self._lower_buffers(self._owned[0])
        for path, module in self._owned[0].named_modules() if joining else ():
            if changed.isdisjoint(p for p in module._parameters.values() if p is not None):
                continue
            for key, buffer in module._buffers.items() if is_norm(module) else ():
                if buffer is not None and buffer.dtype in LOW_DTYPES:  # its statistics came in the dtype of its weights
                    module._buffers[key] = buffer.to(self._storage(module, self._precisions[path]))
            self._cast(path, module)
        own(self._owned, self._keeper)
        return joining

    def kept_buffers(self) -> Iterator[Tensor]:
        """The float32 buffers that `undo` brings back."""
        yield from (full for _, _, full, _ in self._buffers)

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
            if self._is_left(module) is torch.float32:  # whose kernels take inputs of their weights' dtype only
                casting = Casting(inputs=torch.float32, outputs=precision or low, region=torch.float32)
        elif is_norm(module) and (left := self._is_left(module)) in LOW_DTYPES:
            ours = precision or policy.compute
            casting = NOTHING if left is ours else Casting(inputs=left, outputs=ours, region=torch.float32)
        elif low and precision is not torch.float32 and policy.norms is torch.float32 and is_norm(module):
            casting = self._norm_casting(module, precision or low)
        elif isinstance(module, (_BatchNorm, _InstanceNorm) if policy.has_regions else NORMS):
            stored = self._storage(module, precision)  # and no rule of a region casts what comes in
            casting = Casting(inputs=stored) if stored in LOW_DTYPES else NOTHING
        elif low and precision is not torch.float32 and module in self._sparse:
            casting = Casting(outputs=precision or low)
        elif low and precision is not torch.float32 and isinstance(module, _FAST):
            casting = Casting(region=self._region(precision))  # their fast path mixes no dtypes, and is off in a region
        if self._needs_wide_weights(module, precision):
            casting = replace(casting, wide_weights=True)
        if is_root:
            if low and precision is None:
                inputs = low if casting == NOTHING else casting.inputs
                device_type = next((p.device.type for p in module.parameters()), "cpu")
                wide = self._wide_buffers or any(p.dtype is not low for p in self._left)
                ambient = low if wide else None
                casting = replace(casting, inputs=inputs, computes=low, device_type=device_type, ambient=ambient)
            if low:
                keeper = weakref.ref(self._keeper)  # a session that is lost ends
                casting = replace(casting, around=self._around, copies=self._copies, keeper=keeper)
            if policy.output is not None:
                casting = replace(casting, outputs=policy.output, outputs_as_inputs=False)
        return casting

    def _norm_casting(self, module: nn.Module, low: torch.dtype) -> Casting:
        if isinstance(module, _BatchNorm):
            return Casting(outputs_as_inputs=True)  # what its kernel does
        weight = next((p for p in module.parameters(recurse=False)), None)
        if weight is not None and self._gathered.get(weight) in LOW_DTYPES:
            return NOTHING  # FSDP2 gives it 16-bit weights; the region's rule has it compute in float32
        kind: Any = type(module)
        if weight is not None and mixes(kind, weight.device.type, low):
            return Casting(region=torch.float32)  # no region, whose rule would cast what the kernel takes as it is
        return Casting(inputs=torch.float32, outputs_as_inputs=True, region=torch.float32)

    def _needs_wide_weights(self, module: nn.Module, precision: torch.dtype | None) -> bool:
        """Whether it is a batch norm that FSDP2 gives 16-bit weights, while its statistics are float32."""
        weight = module._parameters.get("weight") if isinstance(module, _BatchNorm) else None
        low = weight is not None and self._gathered.get(weight) in LOW_DTYPES
        if not low or self._storage(module, precision) is not torch.float32:
            return False
        if type(module).forward is not _BatchNorm.forward:
            raise SessionError(
                f"FSDP2 gathers the weights of {kind_of(module)} in 16 bits, and its statistics are float32: "
                "shard it by itself before what is around it: fully_shard(module, mp_policy=policy.fsdp(full=True))"
            )
        return True

    def _region(self, precision: torch.dtype | None) -> torch.dtype | None:
        return (precision or self._policy.compute) if self._policy.has_regions else None

    def _cast(self, path: str, module: nn.Module) -> None:
        """Have a module cast as the policy has it."""
        parent = self._precisions[path.rpartition(".")[0]] if path else None
        casting = self._casting(module, self._precisions[path], parent, is_root=path == "")
        if casting == NOTHING and module not in self._changed:
            return
        if self._policy.params in LOW_DTYPES:
            casting = replace(casting, stays=True)
        module.__dict__["_preamp_casting"] = casting
        if not isinstance(module, CastingModule):
            module.__class__ = casting_class(type(module))
        assert isinstance(module, CastingModule)
        self._changed[module] = casting

    def bypass(self) -> None:
        """Stop casting until `resume`."""
        for module in self._changed:
            module._preamp_casting = BYPASSED if module is self._owned[0] else NOTHING

    def resume(self) -> None:
        """Cast again."""
        for module, casting in self._changed.items():
            module._preamp_casting = casting

    @property
    def unstepped(self) -> list[nn.Parameter]:
        """The parameters that were left as they are."""
        return list(self._left)

    @property
    def learning(self) -> int:
        """How many of the parameters that were left as they are want a gradient."""
        return sum(map(_LEARNS, self._left))

    def to_float(self) -> None:
        """Turn what the policy has made 16-bit, and no master is kept of, to float32; `to_low` undoes it."""
        self._meet()
        self._low.full(adopted=False)
        self._buffers_to_float()

    def rest_to_float(self) -> None:
        """The same with frozen parameters and buffers that came in 16 bits, for a model that runs; a second call does
        nothing.
        """
        self._low.full()
        each = ((module, key, buffer) for module in self._owned for key, buffer in module._buffers.items())
        made: dict[int, Tensor] = {}  # several may have one
        found = [(m, key, b) for m, key, b in each if b is not None and b.dtype in LOW_DTYPES]
        low = [(m, key, made.setdefault(id(b), b.float()), b) for m, key, b in found]
        self._low_buffers += low
        for module, key, full, _ in low:
            module._buffers[key] = full

    def _buffers_to_float(self) -> None:
        """Turn buffers to float32, with their original bits unless they were written; removed ones are let go."""
        self._buffers = [entry for entry in self._buffers if entry[1] in entry[0]._buffers]
        for module, key, full, low in self._buffers:
            now = module._buffers[key]
            if now is low and now.shape == full.shape:
                # by value: batch norm writes its statistics without counting their version up
                if not torch.equal(low, full.to(low.device, low.dtype)):
                    full.copy_(low)
                module._buffers[key] = full
            else:
                module._buffers[key] = None if now is None else now.float()

    def to_low(self) -> None:
        """Undo `to_float`, as far as it came."""
        self._low.low()
        for entries in (self._buffers, self._low_buffers):
            for i, (module, key, _, low) in enumerate(entries):
                full = module._buffers.get(key)
                if full is not None and full is not low:
                    fits = low.shape == full.shape and low.device == full.device
                    low = low.copy_(full) if fits else full.to(low.dtype)  # in place: a CUDA graph may read it
                    module._buffers[key] = low
                    entries[i] = (module, key, full, low)
        self._low_buffers.clear()

    def undo(self) -> None:
        """Restore the model's classes and dtypes; it keeps the values that training gave it."""
        with suppress(PolicyError):  # of rules for a module that was added, which the next region would have told
            self._meet()
        self._low.restore()
        for module in self._changed:
            uncast(module)
        self._changed.clear()
        disown(self._owned)
        self._owned.clear()
        self._buffers_to_float()
        self._buffers.clear()
        self._left.clear()


def _sparse_embeddings(root: nn.Module) -> set[nn.Module]:
    """Embeddings with sparse gradients, except those whose weight others use too.

    They stay float32: rows are only looked up, a weight and a master would be more than a float32 weight, and torch
    cannot add sparse gradients of float16 on a CPU.
    """
    uses: Counter[Tensor] = Counter(p for module in root.modules() for p in module.parameters(recurse=False))
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {m for m in root.modules() if isinstance(m, kinds) and m.sparse and uses[m.weight] == 1}

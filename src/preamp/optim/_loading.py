"""States of optimizers: their checks, saving them, and loading them without losing bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..errors import OptimizerError, kind_of
from ..formats import LOW_DTYPES
from ..kernels import join, split
from ..ledger import KEPT, Masters, SplitMasters, parameters_of
from ..sharding import held_here
from ._eight_bit import NAMES, as_float32, is_8bit
from ._from_apex import check_form, completed

_NUMBERS = frozenset({
    "lr", "eps", "weight_decay", "momentum", "lr_decay", "initial_accumulator_value", "max_grad_norm",
})  # fmt: skip
FLAGS = frozenset({
    "amsgrad", "maximize", "capturable", "decoupled_weight_decay", "nesterov", "bias_correction", "grad_averaging",
    "adam_w_mode", "use_nvlamb", "reg_inside_moment", "init_zero",
})  # fmt: skip
_MASTERS = {"master": {torch.float32}, "master_bits": set(KEPT.values())}
"""States in which masters are kept, and their dtypes."""
_INFINITE = float("inf")


class Loading(Optimizer):
    """The part of `FusedOptimizer` for states: `master`, and whether a session has lent its masters."""

    master: str | None
    counts_steps = True
    _masters: Masters
    _lent: bool

    kept: tuple[str, ...] = ()
    """Names of all states that it may have."""
    known: ClassVar[frozenset[str]] = frozenset({
        "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "grad_avg", "sum",
        "exp_inf", "prev", "step_size", "ax",
    })  # fmt: skip
    """States of `torch.optim` that have the shape of their parameter."""

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the states that a step needs, with the options of a group: by default all of `kept`."""
        return type(self).kept

    def _own_masters(self) -> Masters:
        return SplitMasters(KEPT[self.master]) if self.master in KEPT else Masters()

    def is_mastered(self, param: Parameter) -> bool:
        """Whether a parameter is 16-bit and stepped through a float32 master."""
        return param.dtype in LOW_DTYPES and (param in self._masters if self._lent else self.master is not None)

    @property
    def _master_key(self) -> str:
        return "master_bits" if self.master in KEPT else "master"

    def state_dtype(self, name: str, param: Parameter) -> torch.dtype:
        """The dtype of a state: float32 where there is a master, else the parameter's."""
        return torch.float32 if self.is_mastered(param) else param.dtype

    def state_form(self, name: str, param: Tensor) -> torch.Size | int:
        """The shape of a state's local part, or the number of its entries: by default the parameter's shape."""
        return held_here(param).shape

    def check_state(self, name: str, value: Any, param: Parameter) -> None:
        """`OptimizerError` for a state whose shape, dtype or device a step does not expect."""
        own = held_here(param)
        here = held_here(value) if isinstance(value, Tensor) else own.new_zeros(())
        dtype = self.state_dtype(name, param)
        if not self._has_form(name, here, param) or (here.dtype, here.device) != (dtype, own.device):
            raise OptimizerError(
                f"the state {name!r} of a parameter of shape {tuple(own.shape)} is {_seen(value)}, not {dtype} on "
                f"{own.device}: {type(self).__name__} would step it with what is none of its own. Was the parameter "
                "resized, or the state that of another? Give it a state that fits, or none: optimizer.state.pop(param)"
            )

    def _has_form(self, name: str, here: Tensor, param: Tensor) -> bool:
        form = self.state_form(name, param)
        return here.layout is torch.strided and form in (here.shape, here.numel() if isinstance(form, int) else None)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with float32 masters under "master"; every parameter has a step count of its own."""
        if not self._lent:
            self._masters.refresh()  # a weight may have been written since the last step
        packed = super().state_dict()
        for key, state in (own := packed["state"]).items():
            if isinstance(state, dict):
                own[key] = {n: v.clone() if n == "step" and isinstance(v, Tensor) else v for n, v in state.items()}
        return packed

    def check_options(self, group: dict[str, Any]) -> None:
        """`OptimizerError` for options of a group that are no numbers, or out of the range in which they make sense."""
        for name, value in ((name, group[name]) for name in self.defaults if name in group):
            if name == "betas":
                for i, beta in enumerate(check_several(name, value, 2)):
                    check_number(f"betas[{i}]", beta, high=1.0)
            elif name in _NUMBERS and not (name == "max_grad_norm" and value is None):
                check_number(name, value)
            elif name in FLAGS and (isinstance(value, Tensor) or value not in (False, True)):
                raise OptimizerError(f"{name}={value!r}: write True or False")

    def check_loadable(self, state_dict: dict[str, Any]) -> None:
        """`OptimizerError` for states of other shapes than the parameters', or options that this optimizer has not."""
        self._check_states(self._completed(state_dict))

    def _completed(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state_dict in the form that this optimizer has; the one given stays as it is."""
        done = completed(self, state_dict)
        for param, number in self._saved(done):
            if number in done["state"]:
                done["state"][number] = self._readable(done["state"][number], param)
        return done

    def _readable(self, row: Any, param: Parameter) -> Any:
        """The saved states of a parameter; moments in 8 bits in full."""
        return as_float32(row)

    def _check_states(self, state_dict: dict[str, Any]) -> None:
        needed: dict[Any, tuple[str, ...]] = {}
        for own, group in zip(self.param_groups, state_dict["param_groups"], strict=False):
            self.check_options({**group, "params": own["params"]})
            needed.update(dict.fromkeys(group["params"], self.state_names(group)))
        names = (*self.kept, *_MASTERS)
        for param, number in self._saved(state_dict):
            saved = state_dict["state"].get(number, {})
            coded = is_8bit(saved)
            there = {name: value for name, value in saved.items() if value is not None}.keys()
            wanted = needed.get(number, ())
            if not coded and there & self.known and (there.isdisjoint(self.kept) or not there >= set(wanted)):
                raise OptimizerError(
                    f"a parameter has the states {', '.join(map(str, there))}, and {type(self).__name__} steps with "
                    f"{', '.join(wanted) or 'none'}: they are another optimizer's, and the run would go on from zeros. "
                    "Load them into an optimizer of the kind that saved them, or go on without them"
                )
            for name in names:
                if saved.get(name) is None and not (coded and name in NAMES):
                    continue
                value: Any = saved.get(name)
                numbers = isinstance(value, Tensor) and (value.is_floating_point() or name in (*NAMES, "master_bits"))
                if not numbers or not self._has_form(name, held_here(value), param):
                    raise OptimizerError(
                        f"the state {name!r} for a parameter of shape {tuple(param.shape)} is {_seen(value)}, which is "
                        "none of this parameter. Was the order of layers changed since it was saved? Give the "
                        "optimizer its parameters in the order in which they were"
                    )
            if isinstance(step := saved.get("step", 0), Tensor) and step.numel() != 1:
                raise OptimizerError(f"the state 'step' is {_seen(step)}, and counts one parameter's steps")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. States of 16-bit parameters stay float32, and masters in the state are written to them.

        States of Apex's fused optimizers load too. Options that saved groups lack stay as they are here.
        `OptimizerError`, a ValueError, changing nothing, for states of other shapes than the parameters', and for
        options that were on where this optimizer has none.
        """
        state_dict = self._completed(state_dict)
        self._check_states(state_dict)
        low = self._low_params()
        super().load_state_dict(state_dict)
        self._masters = self._masters if self._lent else self._own_masters()
        for param, number in self._saved(state_dict):
            state, saved = self.state.get(param), state_dict["state"].get(number, {})
            if state is None:
                continue
            if param in low:  # torch has cast its states to 16 bits
                for name, value in saved.items():
                    if isinstance(value, Tensor):  # 16 bits, of a checkpoint of torch's, as float32
                        dtype = torch.float32 if value.dtype in LOW_DTYPES else None
                        state[name] = value.to(param.device, dtype)
            # torch's optimizers keep one in the parameter's dtype, and step the weight without it
            good = [saved[n] for n, known in _MASTERS.items() if getattr(saved.get(n), "dtype", None) in known]
            for name in _MASTERS:
                state.pop(name, None)
            if good and self.is_mastered(param):
                self._take_master(param, state, good[-1].to(param.device))
            self._mend(param, state)

    @torch.no_grad()
    def _take_master(self, param: Parameter, state: dict[str, Any], saved: Tensor) -> None:
        """Keep a loaded master, float32 or the bits beside the weight, in the form that is stepped here."""
        kept = KEPT.get(str(self.master))
        if self._lent:
            self._masters.take_over({param: saved})
        elif saved.dtype is kept:
            state["master_bits"] = saved  # beside a weight that may be loaded later
        else:
            weight = wide = saved if saved.is_floating_point() else join(param, saved)
            if kept is None:
                state["master"] = wide
            else:
                weight, state["master_bits"] = split(wide, kept)
            param.copy_(weight)

    def _low_params(self) -> set[Parameter]:
        """The 16-bit parameters that have a master here, or states of another dtype."""
        lent = self._masters if self._lent else ()  # the session makes those float32 itself
        low = [p for p in parameters_of(self) if p.dtype in LOW_DTYPES and p not in lent]
        names = type(self).kept
        return {p for p in low if self.is_mastered(p) or any(self.state_dtype(n, p) is not p.dtype for n in names)}

    def _saved(self, state_dict: dict[str, Any]) -> Iterator[tuple[Parameter, Any]]:
        """The parameters, each with the number under which states are saved for it."""
        saved = (i for group in state_dict["param_groups"] for i in group["params"])
        return zip(parameters_of(self), saved, strict=False)  # torch says so if there are more of one than of the other

    def _mend(self, param: Parameter, state: dict[str, Any]) -> None:
        """Restore the dtypes of loaded states that torch has cast."""
        for name in type(self).kept:
            if isinstance(state.get(name), Tensor):
                state[name] = state[name].to(self.state_dtype(name, param))


def float32_states(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state_dict of an optimizer with `states="8bit"`: its moments become float32, as in any other Adam.

    Args:
        state_dict: Of any optimizer; what is not in 8 bits stays the same.

    Raises:
        OptimizerError: If it is not an optimizer's state_dict, or if codes and scales do not fit each other.

    >>> torch.optim.AdamW(params).load_state_dict(preamp.optim.float32_states(optimizer.state_dict()))
    """
    check_form(state_dict)
    return {**state_dict, "state": {key: as_float32(row) for key, row in state_dict["state"].items()}}


def check_number(name: str, value: Any, *, low: float = 0.0, high: float = _INFINITE, whole: bool = False) -> None:
    """`OptimizerError` unless a number, or a tensor of one (not if it is to be `whole`), lies in [low, high)."""
    is_tensor = isinstance(value, Tensor) and not whole and value.numel() == 1 and not value.is_complex()
    is_number = not isinstance(value, bool) and isinstance(value, Integral if whole else Real)
    number = float(value) if is_tensor or is_number else float("nan")
    if not low <= number < high:
        raise OptimizerError(f"{name}={value!r}: write a {'whole ' * whole}number that lies in [{low:g}, {high:g})")


def check_several(name: str, values: Any, count: int) -> tuple[Any, ...]:
    """The values; `OptimizerError` unless they are a tuple or list of `count`."""
    if not isinstance(values, (tuple, list)) or len(values) != count:
        raise OptimizerError(f"{name}={values!r}: write {count} numbers, as ({', '.join('abc'[:count])})")
    return tuple(values)


def _seen(value: Any) -> str:
    """A description of an object found in place of a state."""
    if not isinstance(value, Tensor):
        return kind_of(value)
    return f"a tensor of shape {tuple(held_here(value).shape)}, {value.dtype} on {value.device}"

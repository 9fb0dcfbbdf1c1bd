"""States of optimizers: their checks, saving them, and loading them without losing bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..errors import OptimizerError, kind_of
from ..formats import LOW_DTYPES
from ..ledger import Buckets, Masters, SplitMasters
from ..sharding import held_here
from ._eight_bit import NAMES, is_8bit
from ._from_apex import completed


class Loading(Optimizer):
    """The part of `FusedOptimizer` for states: `master`, and whether a session has lent its masters."""

    master: str | None
    counts_steps = True
    _masters: Masters
    _lent: bool
    _buckets: Buckets | None

    kept: tuple[str, ...] = ()
    """Names of all states that it may have."""

    def _prepare(self) -> None:
        """Start without buckets, and with its own masters."""

    def _own_masters(self) -> Masters:
        return SplitMasters() if self.master == "split" else Masters()

    def is_mastered(self, param: Parameter) -> bool:
        """Whether a parameter is 16-bit and stepped through a float32 master."""
        return param.dtype in LOW_DTYPES and (param in self._masters if self._lent else self.master is not None)

    @property
    def _master_key(self) -> str:
        return "master_bits" if self.master == "split" else "master"

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
        packed = super().state_dict()
        packed["state"] = {
            key: {n: v.clone() if n == "step" and isinstance(v, Tensor) else v for n, v in state.items()}
            if isinstance(state, dict)
            else state
            for key, state in packed["state"].items()
        }
        return packed

    def check_loadable(self, state_dict: dict[str, Any]) -> None:
        """`OptimizerError` for a state_dict that holds states of other shapes than the parameters', or options that
        this optimizer has not.
        """
        self._check_states(completed(self, state_dict))

    def _check_states(self, state_dict: dict[str, Any]) -> None:
        names = (*self.kept, "master", "master_bits")
        for param, number in self._saved(state_dict):
            saved = state_dict["state"].get(number, {})
            if not isinstance(saved, Mapping):
                raise OptimizerError(f"the states saved for a parameter are {kind_of(saved)}, not a dict")
            coded = is_8bit(saved) and NAMES[1] in self.kept
            for name in names:
                if saved.get(name) is None and not (coded and name in NAMES):
                    continue
                value: Any = saved.get(name)
                number_like = isinstance(value, Tensor) and (
                    value.is_floating_point() or coded or name == "master_bits"
                )
                if not number_like or not self._has_form(name, held_here(value), param):
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
        state_dict = completed(self, state_dict)
        self._check_states(state_dict)
        low, key = self._low_params(), self._master_key
        wanted = torch.int16 if key == "master_bits" else torch.float32
        strangers = {  # torch's optimizers keep a master in the parameter's dtype, and do not step it
            param
            for param, number in self._saved(state_dict)
            if (kept := state_dict["state"].get(number, {}).get(key)) is not None and kept.dtype != wanted
        }
        super().load_state_dict(self._kept(state_dict, low))
        self._masters = self._masters if self._lent else self._own_masters()
        with torch.no_grad():
            for param in low if self.master is not None and not self._lent else ():
                master = self.state.get(param, {}).get(self._master_key)
                if param in strangers:  # its master is as old as that optimizer, and the weight was stepped since
                    self.state[param].pop(self._master_key, None)
                elif master is not None and self.master == "float32":
                    param.copy_(master)
            for group in self.param_groups:
                for param in group["params"]:
                    if param in self.state:
                        for name in ("master", "master_bits"):  # one that no step follows would be saved, and loaded
                            if self._lent or self.master is None or name != key:
                                self.state[param].pop(name, None)
                        self._mend(param, self.state[param])

    def _low_params(self) -> set[Parameter]:
        params = (p for group in self.param_groups for p in group["params"] if p.dtype in LOW_DTYPES)
        lent = self._masters if self._lent else ()  # the session makes those float32 itself
        return {p for p in params if p not in lent and self._has_wide_states(p)}

    def _kept(self, state_dict: dict[str, Any], low: set[Parameter]) -> dict[str, Any]:
        """A state_dict whose states of `low` parameters torch does not cast to 16 bits: wrapped, for `__setstate__`."""
        states = dict(state_dict["state"])
        for param, number in self._saved(state_dict):
            if param in low and number in states:
                states[number] = {
                    name: _Kept(value) if isinstance(value, Tensor) else value for name, value in states[number].items()
                }
        return {**state_dict, "state": states}

    def _saved(self, state_dict: dict[str, Any]) -> Iterator[tuple[Parameter, Any]]:
        """The parameters, each with the number under which states are saved for it."""
        own = (p for group in self.param_groups for p in group["params"])
        saved = (i for group in state_dict["param_groups"] for i in group["params"])
        return zip(own, saved, strict=False)  # torch says so if there are more of one than of the other

    def _has_wide_states(self, param: Parameter) -> bool:
        """Whether a 16-bit parameter without a lent master has float32 states."""
        return self.master is not None and not self._lent

    def _mend(self, param: Parameter, state: dict[str, Any]) -> None:
        """Restore the dtypes of loaded states that torch has cast: those that are neither float32 nor the weight's."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_buckets" not in self.__dict__:  # unpickled, or copied
            self._prepare()
        self._buckets = None
        for param, own in self.state.items():
            for name, value in own.items():
                if isinstance(value, _Kept):
                    own[name] = value.on(param.device)


class _Kept:
    """Wraps a loaded state, so that torch does not cast it to the dtype of its parameter."""

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def on(self, device: torch.device) -> Tensor:
        """The state on a device; 16 bits, of a checkpoint of torch's, as float32."""
        return self._value.to(device, torch.float32 if self._value.dtype in LOW_DTYPES else None)


def _seen(value: Any) -> str:
    """A description of an object found in place of a state."""
    if not isinstance(value, Tensor):
        return kind_of(value)
    return f"a tensor of shape {tuple(held_here(value).shape)}, {value.dtype} on {value.device}"

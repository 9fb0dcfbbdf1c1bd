"""Gradients that are released: each parameter steps as soon as its gradient is complete, which is then freed.

So a backward pass holds one gradient at a time. What needs all of them at once is refused, at `prepare` or at the first
call: a loss scale, clipping by the common norm, accumulation.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..errors import PolicyError, PreampWarning, SessionError
from ..kernels import Reading, read
from ..ledger import gradients_of, parameters_of, wrappers_of
from ..optim import FusedOptimizer
from ..scaling import LossScale
from ..sharding import flat_group, is_sharded
from ._regions import FullPrecision
from ._step import Check, Taken

_HOW = "prepare(..., release_gradients=True) steps each parameter as soon as its gradient has come, and frees that"

_EXCHANGED = (
    f"{_HOW} before DistributedDataParallel or fully_shard has exchanged it with other ranks: leave it out there. "
    "Ranks that shard the model keep a shard of each gradient"
)


def check_release(
    models: Iterable[nn.Module], optimizers: Mapping[str, Optimizer], scales: Mapping[str, LossScale], group: Any
) -> None:
    """Refuse what needs gradients of several parameters, or of several passes, at once."""
    if any(scale.kind != "none" for scale in scales.values()):
        raise PolicyError(
            f"{_HOW}: when one overflows under the loss scale, others have been stepped already. Use level='O4' or "
            "'O5', which have no scale"
        )
    if len(scales) > 1 or group is not None:
        why = f"several losses ({', '.join(scales)})" if len(scales) > 1 else "a group of ranks that skip together"
        raise SessionError(f"{_HOW}, and {why} would have to wait for one another: leave it out")
    for optimizer in optimizers.values():
        if gradients_of(optimizer):
            raise SessionError(f"{_HOW}, and there are gradients from before: write optimizer.zero_grad() first")
        if not isinstance(optimizer, FusedOptimizer) or not optimizer.steps_alone:
            why = "needs all gradients at once" if isinstance(optimizer, FusedOptimizer) else "steps all of them"
            raise SessionError(
                f"{_HOW}, and {type(optimizer).__name__} {why}: use an optimizer of preamp.optim other than LAMB"
            )
    for model in models:
        shards = flat_group([model]) is not None or any(map(is_sharded, model.parameters()))
        if shards or isinstance(model, DistributedDataParallel):
            raise SessionError(_EXCHANGED)
    if not optimizers:
        raise SessionError(f"{_HOW}: give prepare() the optimizer")


class Released:
    """The steps of a backward pass, and what was read of its gradients."""

    def __init__(self, optimizers: Sequence[FusedOptimizer], full: FullPrecision) -> None:
        self._optimizers, self._full = optimizers, full
        self._hooks: dict[Parameter, Any] = {}
        self._read: dict[Parameter, Reading] = {}
        self._looked, self.ours = False, 0  # it has no backward passes of its own
        self.watch()

    def __len__(self) -> int:
        """How many parameters were stepped since the last `session.step`."""
        return len(self._read)

    def forget(self, kept: int = 0) -> None:
        """End the step without a report, of all parameters but the first `kept`: a pass failed, or was given up."""
        self._read = dict(list(self._read.items())[:kept])

    def zeroed(self) -> None:
        """End the step, since its gradients are cleared; `PreampWarning` if there were some."""
        if self._read:
            told = f"{len(self._read)} parameters were stepped already, as release_gradients=True does in backward: "
            told += "zero_grad() before session.step() takes nothing back. Look at a loss before its backward pass"
            warnings.warn(told, PreampWarning, stacklevel=3)
        self.forget()

    def watch(self) -> None:
        """Step parameters that have joined, too."""
        for optimizer in self._optimizers:
            for parameter in parameters_of(optimizer):
                if parameter.requires_grad and parameter not in self._hooks:
                    came = weakly(Released.came, self, optimizer)
                    self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(came)

    def came(self, optimizer: FusedOptimizer, parameter: Parameter) -> None:
        """Step a parameter whose gradient is complete, and free that. One that is not finite is only freed."""
        gradient = parameter.grad
        if gradient is None or self._full.depth:
            return
        if parameter in self._read:
            raise SessionError(
                f"a second gradient of a parameter (of shape {tuple(parameter.shape)}) came before session.step(), and "
                "release_gradients=True has stepped and freed the first: gradients cannot be accumulated. Write "
                "session.step() after each backward pass, or take larger batches"
            )
        if not self._looked and wrappers_of(set(self._hooks)):
            raise SessionError(_EXCHANGED)
        self._looked = True
        reading = self._read[parameter] = read([gradient.coalesce() if gradient.is_sparse else gradient])
        optimizer.step_alone(parameter, reading.found)
        parameter.grad = None

    def finish(self, chosen: Sequence[Optimizer], check: Check) -> Taken:
        """End the steps since the last call, of all optimizers. `check`: called before that."""
        if len(chosen) < len(self._optimizers):
            self.refuse("step(optimizer) of one of several optimizers")
        for own in self._optimizers:
            for parameter in parameters_of(own):  # hooks do not see gradients that were assigned, or handed over
                self.came(own, parameter)
        parameters, every = list(self._read), list(self._read.values()) or [read([])]
        self._read.clear()
        check(parameters)
        for optimizer in chosen:
            optimizer.step()  # without gradients: for hooks, and schedulers, which ask whether it was called
        home = every[0].found.device
        here = [reading.on(home) for reading in every]
        norm = torch.linalg.vector_norm(torch.stack([reading.norm for reading in here]))
        found = torch.stack([reading.found for reading in here]).amax()
        together = Reading(found, norm, torch.cat([reading.nonfinite for reading in here]))
        return parameters, together, lambda: norm, bool(found) if home.type == "cpu" else None

    def refuse(self, call: str) -> NoReturn:
        """`SessionError` for a call that would need the gradients."""
        raise SessionError(
            f"{call} in a session with release_gradients=True, where each gradient is stepped and freed as it comes. "
            "To change single ones, give the parameter a hook: parameter.register_hook(lambda g: g.clamp(-1, 1))"
        )

    def close(self) -> None:
        """Step nothing more."""
        for hook in self._hooks.values():
            hook.remove()


def weakly(method: Callable[..., None], owner: Any, *args: Any) -> Callable[[Tensor], None]:
    """A hook that keeps no session alive: what one on a tensor holds, Python's collector cannot see."""
    known, others = weakref.ref(owner), [weakref.ref(each) for each in args]

    def came(parameter: Tensor) -> None:
        alive = known()
        if alive is not None and not alive.ours:
            method(alive, *(other() for other in others), parameter)

    return came

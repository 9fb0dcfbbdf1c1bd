"""What a session is, apart from what it does in a step: its parts, its state, its end."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..autocast import REGISTRY
from ..compiling import traced_by_callers
from ..errors import PreampWarning, SessionError
from ..ledger import Masters
from ..modules import Conversion
from ..optim import FusedOptimizer
from ..policy import Policy
from ..sharding import agreed_largest, flat_group, is_sharded, sharded_parts
from ._checks import STATE_VERSION, check_own_step, check_sharded_late, first_nonfinite, named_parameters
from ._gradients import GradientBook
from ._losses import Losses
from ._parameters import parameters_of, state_like_parameters
from ._precision import FullPrecision
from ._rates import Rates
from ._report import StepReport
from ._round import Round
from ._state import check_whole

if TYPE_CHECKING:
    from typing_extensions import Self


class SessionBase:
    """The models, optimizers, scales and masters of a training run, held together until `close()`."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        policy: Policy,
        losses: Losses,
        masters: Masters,
        conversions: Sequence[Conversion],
        device_type: str,
        skip: str = "auto",
        group: Any = None,
        given: Mapping[str, Any] | None = None,
        earlier: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        self.policy = policy
        """The policy in force."""
        self.device_type = device_type
        self._models, self._optimizers = dict(models), dict(optimizers)
        self._losses, self._masters, self._conversions = losses, masters, list(conversions)
        self.is_stage = group is not None and flat_group(models.values()) is None
        """Whether other processes have other parameters, in plain tensors: a stage of a pipeline, say."""
        self._group = group
        self._book = GradientBook(masters, self._device, group)
        self._round = Round(losses, self._book, list(self._optimizers.values()))
        self._sharded = any(is_sharded(p) for model in models.values() for p in model.parameters())
        self._parts = [part for model in models.values() for part in sharded_parts(model)]
        self._shards = list(named_parameters(models)) if self._sharded else None
        self._given = {optimizers[name]: each for name, each in (given or {}).items()}
        """What a framework handed out in the place of the optimizers."""
        self._skip, self._attempts = skip, 0
        self._skips = 0
        self._device_skips: Tensor | None = None
        self._loads = 0  # how often states were loaded, which lie in other tensors then
        self._rates = Rates()
        self._closed = False
        self._full = FullPrecision(models.values(), masters, conversions)
        self._stepping: Optimizer | None = None
        self._earlier = list(earlier or ())
        """Parameters with true gradients from before the session, until the first backward pass."""
        self._book.carry(earlier or {})
        self.last_step: StepReport | None = None
        """The report of the last `step`."""
        for optimizer in self._optimizers.values():
            if isinstance(optimizer, FusedOptimizer):
                optimizer.lend(masters)
        if policy.has_regions:
            assert policy.ops is not None
            holder = REGISTRY.hold(policy.ops, device_type)
            self._rules = weakref.finalize(
                self, REGISTRY.release, holder
            )  # also of a session that is lost before it is closed
            self._rules.atexit = False
        self._handles = [
            handle
            for optimizer in self._optimizers.values()
            for handle in (
                optimizer.register_step_pre_hook(self._before_optimizer_step),
                optimizer.register_load_state_dict_pre_hook(self._before_optimizer_load),
                optimizer.register_load_state_dict_post_hook(self._after_optimizer_load),
            )
        ]

    @property
    def models(self) -> dict[str, nn.Module]:
        """The session's models by name; a single one has the name ""."""
        return dict(self._models)

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The session's optimizers by name; a single one has the name ""."""
        return dict(self._optimizers)

    @property
    def steps(self) -> int:
        """Attempts at a step so far, skipped ones included."""
        return self._attempts

    @property
    def skipped(self) -> int:
        """Skipped steps so far; waits for the device."""
        return self._skips + (0 if self._device_skips is None else int(self._device_skips))

    def loss_scale(self, name: str | None = None) -> float:
        """The present scale of a loss; waits for the device."""
        name = self._losses.named(name)
        self._settle(name)
        return float(self._losses[name].current(self._device()))

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """All that preamp adds to a training run: scales, masters, counters. Save it beside model and optimizer.

        Tensors, numbers and strings only, so `torch.load(weights_only=True)` reads it. The tensors are the live ones,
        as in torch's own state dicts: clone them to keep a moment.
        """
        self._check_open()
        self._settle(None)
        return {
            "version": STATE_VERSION,
            "policy": str(self.policy),
            "losses": self._losses.state_dict(),
            "masters": dict(self._masters.named()),
            "steps": self._attempts,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave; before or after the model's and the optimizer's own state, as you like.

        Strict: another version, policy, set of losses or of masters is a `StateError`, and nothing has changed.
        """
        self._check_open()
        check_whole(state, str(self.policy), self._losses)
        self._forget_all()
        self._masters.load(state["masters"])
        self._losses.load_state_dict(state["losses"])
        self._attempts, self._skips, self._device_skips = int(state["steps"]), int(state["skipped"]), None
        self._loads += 1
        self._round.clear()

    def close(self) -> None:
        """Give model, optimizer and torch back as they were; the second call does nothing."""
        if self._closed:
            return
        self._closed = True
        torch.clear_autocast_cache()
        self._full.leave()
        true = self._true_gradients()
        for handle in self._handles:
            handle.remove()
        self._reshard()
        for conversion in self._conversions:
            conversion.undo()
        self._masters.restore()
        for parameter, gradient in true.items():
            parameter.grad = gradient
        for each in self._optimizers.values():
            state_like_parameters(each)
            if isinstance(each, FusedOptimizer):
                each.lend(None)
        if self.policy.has_regions:
            self._rules()
        self._rates.give_back()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        level = self.policy.level
        state = "closed" if self._closed else f"{self._attempts} steps"
        return f"Session({level or 'custom'} on {self.device_type}, {state}: {self.policy})"

    # -- inside

    def _reshard(self) -> None:
        """Drop what FSDP2 has gathered (`sharding.reshard`)."""
        for part in self._parts:
            part.reshard()

    def _check_scaled_somewhere(self) -> None:
        """Before the first step: the loss of some stage has to have been scaled. Waits for the device."""
        device = self._device()
        scales = any(self._losses[name].inverse(device) is not None for name in self._losses)
        if scales and not bool(agreed_largest(torch.tensor(float(len(self._round.names)), device=device), self._group)):
            raise SessionError(
                "no stage of the group has scaled its loss, and gradients that are not scaled would vanish when they "
                "are unscaled. Where the loss is computed, write session.backward(loss), or have the schedule's "
                "loss_fn return session.scale(loss)"
            )

    def _named(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Parameters with their paths; of a sharded model its first ones, as it has others while it is gathered."""
        return named_parameters(self._models) if self._shards is None else self._shards

    @traced_by_callers
    def _check_open(self) -> None:
        if self._closed:
            raise SessionError("this session is closed; prepare the model again to go on")
        if not self._full.depth and not torch.compiler.is_compiling():
            self._full.leave()  # of one that was interrupted
        if not torch.compiler.is_compiling() and not self._attempts and not self._sharded:
            check_sharded_late(self._models.values())

    def _device(self) -> torch.device:
        for each in self._optimizers.values():
            for parameter in parameters_of(each):
                return parameter.device
        return torch.device(self.device_type)

    def _settle(self, name: str | None) -> None:
        self._round.settle(name, lambda: first_nonfinite(self._named()))

    def _tell_rounded(self) -> None:
        warnings.warn(
            f"{self._masters.rounded} and others were loaded from a state that has them in 16 bits, and their float32 "
            "masters with them: what was below that precision is lost. To go back to an earlier point (a range test of "
            "learning rates, the best weights so far), keep session.state_dict() beside model.state_dict() and load "
            "both, or take and load the model's inside session.full_precision(values_only=True)",
            PreampWarning,
            stacklevel=5,
        )
        self._masters.rounded = None

    def _rest(self) -> None:
        """Let gradients be as backward leaves them, and parameters 16-bit; not in `full_precision()`."""
        if not self._full.depth:
            self._book.rest(self._optimizers.values())

    def _forget_all(self) -> None:
        for each in self._optimizers.values():
            self._book.forget(each)

    def _scale_earlier(self, name: str) -> None:
        """Before the first backward pass: bring gradients from before `prepare` to the scale of its loss."""
        if self._earlier and not self._losses.apart:
            self._book.scale_carried(self._earlier, self._losses[name].scale)
        self._earlier.clear()

    def _true_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Make gradients that wait for a step true, for good, and drop those that a step has used scaled.

        Returns those of low parameters, in float32.
        """
        optimizers = list(self._optimizers.values())
        self._book.rest(optimizers)
        inverse = None
        if not self._losses.apart and not self._earlier:  # to those that are still here no backward pass has come
            inverse = self._losses[next(iter(self._losses))].inverse(self._device())
            if inverse is not None and not self._round.running:
                for each in optimizers:
                    each.zero_grad()
        return self._book.true_for_good(optimizers, inverse)

    def _before_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse a step that nobody but the caller takes, where it would do harm."""
        if self._stepping is optimizer or self._full.depth:  # where parameters are masters, and gradients true
            return
        check_own_step(optimizer, self._masters, self._round.running and any(map(self._scales, self._losses)))

    _before_optimizer_step.changes_nothing = True  # type: ignore[attr-defined]

    def _scales(self, name: str) -> bool:
        return self._losses[name].kind != "none"

    def _before_optimizer_load(self, optimizer: Optimizer, state: Any) -> None:
        """Torch casts loaded state to the parameters' dtype: let it find float32 masters, not 16-bit parameters."""
        if list(map(_size, optimizer.param_groups)) != list(map(_size, state["param_groups"])):
            return  # torch refuses it, and nobody would swap them out
        self._rest()
        self._masters.refresh(parameters_of(optimizer))
        self._masters.swap_in(parameters_of(optimizer))

    def _after_optimizer_load(self, optimizer: Optimizer) -> None:
        self._masters.swap_out(parameters_of(optimizer))
        self._loads += 1


def _size(group: Mapping[str, Any]) -> int:
    return len(group["params"])

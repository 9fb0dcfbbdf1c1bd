"""`Session`: a training run under a policy. The only place where the mechanisms meet, in the order of a step."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..compiling import traced_by_callers, uncompiled
from ..errors import SessionError
from ..frameworks import unwrap
from ..kernels import clip_values_
from ..ledger import Gradients, Masters, clear_gradients, gradients_of
from ..modules import Conversion
from ..optim import FusedOptimizer
from ..policy import Policy
from ..scaling import Skips, first_nonfinite
from ..sharding import flat_group, is_sharded, sharded_parts
from . import _checks as checks
from ._capture import CapturedStep, Rates
from ._losses import Losses, PendingScales
from ._memory import Memory, memory_of
from ._order import BackwardPass, CallOrder
from ._regions import FullPrecision, Joining, SessionRegion, held_kernels, not_synchronised, warn_outside
from ._released import Released
from ._report import StepReport
from ._restored import restore
from ._step import OptimizerSteps

_OutsideRegions = torch._C._DisableAutocast
"""What comes after backward is no model's arithmetic: a region that is still open, also torch's, has no say in it."""

_CLOSED = "this session is closed, by close() or at the end of its `with` block: prepare() again to go on"


class Session:
    """Made by `preamp.prepare`. Owns what mixed precision adds to a training loop: regions, scales, masters, skips.

    A context manager: leaving it, or `close()`, restores model, optimizer and torch; parameters keep the values that
    training gave them.

    >>> with preamp.prepare(model, optimizer, level="O4") as session:
    ...     for x, y in loader:
    ...         with session.autocast():
    ...             loss = loss_fn(model(x), y)
    ...         session.backward(loss)
    ...         session.step()
    ...         session.zero_grad()
    """

    def __init__(
        self, models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], policy: Policy, losses: Losses,
        masters: Masters, conversions: Sequence[Conversion], device_type: str, skip: str = "auto", group: Any = None,
        given: Mapping[str, Any] | None = None, earlier: Mapping[nn.Parameter, Tensor] | None = None,
        why: str | None = None, release: bool = False,
    ) -> None:  # fmt: skip
        # first, since another session's rules may forbid it; called by close(), or at the end of a session not closed
        self._release_kernels = weakref.finalize(self, held_kernels(policy, device_type))
        self._release_kernels.atexit = False
        self.policy = policy
        """The policy in force."""
        self.device_type = device_type
        self.is_stage = group is not None and flat_group(models.values()) is None
        """Whether other processes have other parameters, in plain tensors: a stage of a pipeline, say."""
        self.last_step: StepReport | None = None
        """The report of the last `step`."""
        self._models, self._optimizers = dict(models), dict(optimizers)
        self._losses, self._masters, self._conversions = losses, masters, list(conversions)
        self._group, self._why, self._attempts = group, why, 0
        self._has_regions = policy.has_regions
        own = list(optimizers.values())
        self._gradients = Gradients(masters, own, device_type, group)
        self._pending = PendingScales(losses, self._gradients, own)
        self._full = full = FullPrecision(models.values(), own, masters, conversions)
        self._steps = OptimizerSteps(own, self._gradients, masters, losses, self._pending, full, conversions, skip)
        self._steps.wrappers = {optimizers[k]: v for k, v in (given or {}).items() if v is not optimizers[k]}
        self._steps.follow(self._steps.wrappers.values())
        self._order = CallOrder(
            optimizers, self._gradients, masters, losses, self._pending, full, self._steps.others, group, self.is_stage
        )
        self._rates, self._closed, self._in_regions = Rates(), False, False
        self._opened: dict[int, SessionRegion] = {}
        self._sharded = any(is_sharded(p) for model in models.values() for p in model.parameters())
        self._parts = [part for model in models.values() for part in sharded_parts(model)]
        self._shards = list(checks.named_parameters(models)) if self._sharded else None
        self._joining = Joining(own, self._models, self._conversions, self._gradients)
        self._released = Released([o for o in own if isinstance(o, FusedOptimizer)], full) if release else None
        self._gradients.carry(earlier or {})

    # -- forward

    @traced_by_callers
    def autocast(self, enabled: bool = True) -> SessionRegion:
        """A new region for the forward pass and the loss, as the policy has it; also a decorator.

        Args:
            enabled: False for a region in which nothing is cast.
        """
        if self._closed:
            raise SessionError(_CLOSED)
        active = enabled and self._has_regions
        again = functools.partial(Session.autocast, self, enabled)
        dtype = self.policy.compute if active else None
        kept = None if self.policy.params is torch.float32 else False  # of a master that is in place for a moment
        return SessionRegion(self.device_type, dtype, active, kept, self._entering, again, self._opened)

    @uncompiled
    def _entering(self) -> None:
        """A region begins: the forward pass is to see 16-bit parameters."""
        self._check_open()
        self._in_regions = True
        # A thread that only evaluates must leave gradients alone: another one may be about to step.
        if torch.is_grad_enabled() and not self._full.depth and self._joining.thread in (None, threading.get_ident()):
            self._gradients.rest()
            self._joining()
            if self._released is not None:
                self._released.watch()

    @contextmanager
    def full_precision(self, *, values_only: bool = False) -> Iterator[None]:
        """Inside, the model runs in float32, with its master weights: for validation, or an export.

        Use it between steps, and not in compiled code. Gradients are put aside while it lasts. `session.backward`
        inside adds to them, and is an error under DistributedDataParallel where parameters have 16 bits; gradients of
        a plain `loss.backward()` inside are dropped as it ends.

        Args:
            values_only: Parameters and buffers are to be read or written, and the model will not run. Frozen weights
                that came in 16 bits stay so, and need no memory in float32.

        Raises:
            SessionError: Without `values_only`, for a model that FSDP2 gathers in 16 bits: it can only be read.
        """
        self._check_open()
        if self._full.depth:
            self._full.runs(not values_only)
            yield
            return
        self._reshard()
        if self._sharded and not values_only and self.policy.compute is not torch.float32:
            checks.check_gathered_full(self._models.values())
        self._gradients.rest()
        self._full.waiting = self._pending.running and not all(map(self._pending.has_stepped, self._steps.optimizers))
        with self._full, torch.autocast(self.device_type, enabled=False):
            self._full.runs(not values_only)
            yield

    # -- backward

    @uncompiled
    def scale(self, loss: Tensor, name: str | None = None) -> Tensor:
        """Multiply a loss by its scale, for code that calls backward itself: `session.scale(loss).backward()`.

        Args:
            loss: A 0-d floating tensor.
            name: Which of the session's losses it is.

        Raises:
            SessionError: For losses with scales of their own, whose gradients are unscaled as their backward ends.
        """
        name = self._begin_backward(loss, name)
        if self._losses.separate_scales:
            raise SessionError(f"the loss {name!r} has a scale of its own: write session.backward(loss, name={name!r})")
        self._pending.ran(name)
        scaled = self._order.scaled(self._losses[name].scale(loss))
        if loss.grad_fn is not None and self._full.nodes.has(loss.grad_fn):
            inner, scaled = scaled, scaled.view_as(scaled)  # which does not refer to itself
            scaled.backward = functools.partial(_go_back, self._masters, inner)  # type: ignore[method-assign]
        return scaled

    @uncompiled
    def backward(self, loss: Tensor, *, name: str | None = None, sync: bool = True, **kwargs: Any) -> None:
        """Compute gradients of `loss` times its scale. Call it once a micro-batch; gradients add up until `step`.

        Args:
            loss: A 0-d floating tensor.
            name: Which of the session's losses it is.
            sync: False if more micro-batches follow before the step; under DistributedDataParallel and FSDP2 forward
                and backward must run inside `session.no_sync()`, which is checked.
            **kwargs: For `Tensor.backward` (`retain_graph`, `inputs`).
        """
        name = self._begin_backward(loss, name)
        if not sync:
            self._needs_gradients("backward(sync=False)")
            checks.check_no_sync(self._models.values())
        scale = self._losses[name]
        seed = scale.seed(loss) if kwargs.get("gradient") is None else None  # saves the product, and its backward
        of, first = (scale.scale(loss), ()) if seed is None else (loss, (seed,))
        back = functools.partial(_go_back, self._masters) if "inputs" in kwargs else type(of).backward
        run = functools.partial(back, of, *first, **kwargs)
        with BackwardPass(self._order, name, self._released):
            if self._losses.separate_scales:
                self._pending.void_zeroed()
                readings = self._gradients.add_unscaled(run, scale.inverse(loss.device), self._steps.others.unscaled())
                self._pending.record(name, readings)
            else:
                run()

    def _begin_backward(self, loss: Tensor, name: str | None) -> str:
        """Check before a backward pass, and apply the loss scale's pending update; returns the loss's name."""
        self._check_open()
        torch.clear_autocast_cache()  # of a region that is open still: weights may be changed before the next forward
        self._joining.thread = threading.get_ident()
        checks.check_loss(loss)
        name = self._losses.named(name)
        if not self._in_regions and not self._full.depth:  # of the first loss only
            self._in_regions = True
            warn_outside(loss, self.policy, self._full)
        if not self._full.depth:
            self._gradients.rest()
        elif self.policy.params is not torch.float32:
            checks.check_exchanged(self._models.values())
        for each in self._optimizers.values() if self._released is not None else ():
            self._gradients.follow(each)
        self._joining.check()
        self._order.check_backward()
        self._full.counts = self._full.depth > 0
        self._settle(name)
        self._order.before_pass(loss, self._losses[name])
        if self._gradients.carried:
            self._gradients.scale_carried(None if self._losses.separate_scales else self._losses[name].scale)
        return name

    def grad(
        self, outputs: Tensor, inputs: Tensor | Sequence[Tensor], *, name: str | None = None, create_graph: bool = True
    ) -> tuple[Tensor, ...]:
        """True gradients of `outputs` with respect to `inputs`, as `torch.autograd.grad` gives them, in float32.

        For a gradient penalty: the pass is scaled and the result unscaled, so that nothing underflows on the way.

        Args:
            outputs: A floating tensor; its sum is differentiated.
            inputs: One or several tensors. One that is not reached is an error, as in torch.
            name: Which of the session's losses gives the scale.
            create_graph: Whether the gradients can be differentiated again.
        """
        self._check_open()
        scale = self._losses[self._losses.named(name)]
        wanted = (inputs,) if isinstance(inputs, Tensor) else inputs
        scaled = self._masters.grad(scale.scale(outputs), wanted, create_graph)
        inverse = scale.inverse(outputs.device)
        return tuple(g if inverse is None else g * inverse.to(g.device) for g in scaled)

    def no_sync(self, *wrapped: nn.Module) -> AbstractContextManager[None]:
        """Inside, DistributedDataParallel and FSDP2 models do not exchange gradients: for micro-batches but the last.

        Args:
            *wrapped: DistributedDataParallel models made after `prepare`, which the session does not know.
        """
        return not_synchronised((*self._models.values(), *map(unwrap, wrapped)))

    # -- between backward and step

    @uncompiled
    def unscale_(self, optimizer: Optimizer | None = None) -> None:
        """Make the gradients true: unscaled, float32 for parameters with masters. Idempotent.

        Until `step`, which reads them again, parameters with masters hold these, and `.grad` has the parameter's dtype.

        Args:
            optimizer: Only its gradients; None for those of all.
        """
        self._needs_gradients("unscale_()")
        self._order.check_full("unscale_()")
        chosen = checks.selected(self._optimizers, optimizer)
        self._order.check_apart("unscale_()", chosen)
        with _OutsideRegions():
            for each in chosen:
                if not self._gradients.is_true(each):  # else ranks would wait for one that calls this alone
                    self._steps.read(each)
                    self._gradients.make_true(each)

    @uncompiled
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, optimizer: Optimizer | None = None) -> Tensor:
        """Shrink the true gradients so that their common norm is at most `max_norm`.

        Optimizers that are clipped together step or skip together. There is no host sync. Gradients that `unscale_` has
        not made true do not change until `step`, which clips them as it unscales them.

        Args:
            max_norm: The largest norm allowed.
            norm_type: The order of the norm; `float("inf")` for the largest magnitude.
            optimizer: Only its gradients; None for those of all.

        Returns:
            The norm before, 0-d float32; not finite if the step will be skipped.
        """
        self._needs_gradients("clip_grad_norm_()")
        most, order = checks.check_limit("clip_grad_norm_", max_norm), float(norm_type)
        chosen = checks.selected(self._optimizers, optimizer)
        self._order.check_clip("clip_grad_norm_", chosen)
        with _OutsideRegions():
            for each in chosen:
                self._steps.read(each)
            return self._gradients.clip_by_norm(chosen, most, order, at_once=self._order.shares)

    @uncompiled
    def clip_grad_value_(self, clip_value: float, *, optimizer: Optimizer | None = None) -> None:
        """Clamp every entry of the true gradients.

        Args:
            clip_value: Entries end within `[-clip_value, clip_value]`.
            optimizer: Only its gradients; None for those of all.
        """
        self._needs_gradients("clip_grad_value_()")
        checks.check_limit("clip_grad_value_", clip_value)
        chosen = checks.selected(self._optimizers, optimizer)
        self._order.check_clip("clip_grad_value_", chosen)
        self.unscale_(optimizer)
        with _OutsideRegions():
            for each in chosen:
                self._steps.read(each)
                self._gradients.norm(each)
                clip_values_(gradients_of(each), float(clip_value))

    def memory(self) -> Memory:
        """What this process holds from step to step, in bytes, by kind; `preamp.plan` counts the same beforehand.

        Gradients count where there are some now, states once the optimizer has made them.
        """
        self._check_open()
        return memory_of(self._models.values(), self._optimizers.values(), self._masters, self._conversions)

    # -- step

    @uncompiled
    def step(self, optimizer: Optimizer | None = None) -> StepReport:
        """Step all optimizers, or one, each unless its gradients are not finite; then update the scales.

        Those that were clipped by a common norm skip together, since it is not finite if one of them is not.
        With several optimizers stepped one by one, a scale is updated once, at the next backward of its loss.

        Args:
            optimizer: The one to step; None for all.

        Returns:
            What happened; reading a field of it waits for the device.

        Raises:
            SessionError: When no `session.backward` came before; but not with `prepare(..., group=...)`, where
                gradients may come from the loss of another stage.
            ScaleCollapse: After too many skips in a row.
        """
        self._check_open()
        chosen = checks.selected(self._optimizers, optimizer)
        if self._released:
            self._pending.all_ran()
        name = self._order.check_step(chosen, self._attempts)[0]
        scale = self._losses[name].current(self._gradients.device)
        self._masters.step = self._attempts
        take = self._steps.take_all if self._released is None else self._released.finish
        try:
            with _OutsideRegions():
                parameters, read, norm, host_skipped = take(chosen, self._check_stepping)
        finally:
            torch.clear_autocast_cache()  # of a region that is open still: casts of weights as they were
            self._reshard()  # weights that an evaluation since backward has gathered are out of date
        self._order.stepped(chosen, scale)
        if self._masters.rounded is not None:
            checks.warn_rounded(self._masters)
        names = functools.partial(checks.names_of, parameters, self._named)
        self.last_step = report = StepReport(self._attempts, read.found, scale, norm, read.nonfinite, names)
        self._losses.skips.count(self._attempts, read.found, host_skipped)
        self._attempts += 1
        if self._order.changed:
            self._order.tell_of_clipping(report)
        self._pending.stepped(chosen, read, host_skipped)
        if len(chosen) == len(self._optimizers):
            self._settle(None)
        return report

    @uncompiled
    def zero_grad(self, set_to_none: bool = True, *, optimizer: Optimizer | None = None) -> None:
        """Clear the gradients of all optimizers (and of the models' other parameters), or of one optimizer.

        Args:
            set_to_none: False to fill them with zeros.
            optimizer: Only its gradients; None for those of all.
        """
        self._check_open()
        self._order.check_full("zero_grad()")
        for each in checks.selected(self._optimizers, optimizer):
            self._gradients.forget(each)
            self._pending.void(each)
            each.zero_grad(set_to_none)
        if optimizer is None:
            self._pending.forget(*self._losses if self._gradients.stepping is None else ())
            if self._released is not None:
                self._released.zeroed()
            for model in self._models.values():
                clear_gradients(model, set_to_none)

    def capture(self, function: Callable[..., Any], *, warmup: int = 3) -> CapturedStep:
        """Make a CUDA graph of `function`, a whole training step on tensors. It pays off where kernels are short.

        The first calls run as written, the next is captured, later ones replay it. One more call runs as written if the
        last one differed: it made states, or had other hyper-parameters. Arguments keep their shapes; learning rates
        are tensors until `close`, which schedulers write into. Any optimizer that does not need the host will do:
        fused, capturable, of preamp.optim, or `skip="device"`. Without CUDA it warns and changes nothing.

        Args:
            function: Forward, backward, step and `zero_grad`; takes and returns tensors.
            warmup: How many calls run as written.

        Returns:
            The step to call in its place; its results are copies.

        Raises:
            SessionError: When the parameters lie on several GPUs.

        >>> step = session.capture(train_step)
        >>> for x, y in loader:
        ...     loss = step(x, y)
        """
        self._needs_gradients("capture()")
        return CapturedStep(self, function, warmup)

    # -- what there is, and its state

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
        """Skipped steps so far; a host sync."""
        return int(self._losses.skips)

    def loss_scale(self, name: str | None = None) -> float:
        """The present scale of a loss; a host sync.

        Args:
            name: Which of the session's losses it is; not needed if there is one.
        """
        name = self._losses.named(name)
        self._settle(name)
        return float(self._losses[name].current(self._gradients.device))

    def state_dict(self) -> dict[str, Any]:
        """All that preamp adds to a training run: scales, masters, counters. Save it beside model and optimizer.

        Tensors, numbers and strings only, so `torch.load(weights_only=True)` reads it. The tensors are the live ones,
        as in torch's own state dicts: clone them to keep their values. A split master is a pair: weight and bits.
        """
        self._check_open()
        self._settle(None)
        self._masters.rename(self._named())
        return {
            "version": checks.STATE_VERSION,
            "policy": str(self.policy),
            "losses": self._losses.state_dict(),
            "masters": self._masters.named(),
            "steps": self._attempts,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave; before or after the model's and the optimizer's own state.

        Masters may have been kept in another form (`master=` of the optimizer); then load the model's state first. The
        same holds if parameters are frozen now that had masters: they take their values.

        Args:
            state: A `state_dict` of a session with the same policy.

        Raises:
            StateError: For another version, policy, set of losses or of masters; nothing has changed.
        """
        self._check_open()
        checks.check_state(state, str(self.policy), self._losses)
        self._gradients.rest()
        self._masters.load(state["masters"], self._named())
        before = self._losses.shared.current(self._gradients.device)
        self._losses.load_state_dict(state["losses"])
        ratio = self._losses.shared.current(self._gradients.device) / before
        if self._pending.running:
            self._pending.rescale(ratio, [o for o in self._optimizers.values() if not self._pending.has_stepped(o)])
        self._attempts, self._losses.skips = int(state["steps"]), Skips(int(state["skipped"]))
        self._steps.loads += 1
        self._pending.clear()

    def close(self) -> None:
        """Restore model, optimizer and torch; the second call does nothing."""
        if not self._closed:
            self._closed = True
            restore(self)

    __iter__ = checks.not_unpacked

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        level = self.policy.level
        state = "closed" if self._closed else f"{self._attempts} steps"
        why = f"; auto: {self._why}" if self._why else ""
        return f"Session({level or 'custom'} on {self.device_type}, {state}: {self.policy}{why})"

    def __getstate__(self) -> NoReturn:
        raise SessionError("a session belongs to its models and optimizers: save state_dict(), and prepare() anew")

    # -- inside

    def _reshard(self) -> None:
        """Drop what FSDP2 has gathered (`sharding.reshard`)."""
        for part in self._parts:
            part.reshard()

    def _named(self) -> Any:
        """Parameters with their paths; of a sharded model its first ones, as it has others while it is gathered."""
        return checks.named_parameters(self._models) if self._shards is None else self._shards

    @uncompiled
    def _check_open(self) -> None:
        """Check that the session is open, and undo what an interrupted `full_precision` has left."""
        if self._closed:
            raise SessionError(_CLOSED)
        if self._full.begun and not self._full.depth:
            self._full.leave()
        if not self._attempts and not self._sharded:
            checks.check_sharded_late(self._models.values())

    def _needs_gradients(self, call: str) -> None:
        self._check_open()
        if self._released is not None:
            self._released.refuse(call)

    def _check_stepping(self, parameters: Sequence[nn.Parameter]) -> None:
        """Check the parameters that have gradients, before they are stepped."""
        if self.policy.params is torch.float32:
            checks.check_not_cast(parameters, self._named)
        self._order.check_gradients(parameters)

    def _settle(self, name: str | None) -> None:
        """Update the scale of a loss, or all, from the steps since then."""
        if self._pending.due:
            self._pending.settle(name, lambda: first_nonfinite(self._named()))


def _go_back(masters: Masters, loss: Tensor, *args: Any, inputs: Any = None, **kwargs: Any) -> None:
    """`loss.backward`, where `inputs` that are parameters may be other tensors in its graph."""
    if inputs is not None:
        given = [inputs] if isinstance(inputs, Tensor) else inputs
        kwargs["inputs"] = [each for one in given for each in masters.behind(one)]
    loss.backward(*args, **kwargs)

"""A whole training step as one CUDA graph: forward, backward, scaling, optimizer, all without the host.

For networks whose kernels are shorter than the time Python takes to launch them. It works because a session's step has
no host sync, and keeps all that it changes (scales, counts of skips, masters, states) in tensors with fixed addresses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import PreampWarning, SessionError
from ..kernels.triton.tables import ready_for_capture
from ..ledger import parameters_of
from ..optim import FusedOptimizer
from ..tree import map_tensors, tensors
from ._step import needs_host

_PLAIN = (bool, int, float, str, type(None), tuple)
_NOTED = "initial_lr"
"""An entry that schedulers write into a group, and no step reads."""


class CapturedStep:
    """A function of tensors that trains one step; made by `Session.capture`.

    A capture may load no kernels and read nothing from the device. So it only records what the call before it did,
    which ran as written: with the same hyper-parameters, the same states, and arguments of the same shapes.
    """

    def __init__(self, session: Any, function: Callable[..., Any], warmup: int) -> None:
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 1:
            raise SessionError(f"warmup={warmup!r}: at least one call has to run before a capture, to make all states")
        self._session, self._function, self._warmup = session, function, warmup
        self._graph: Any = None
        self._inputs: tuple[Any, dict[str, Any]] = ((), {})
        self._outputs: Any = None
        self._steps = self._changes = 0
        self._hyper: list[dict[str, Any]] | None = None
        self._ran: tuple[Any, ...] | None = None
        """The tensors of the last call, if it ran as written."""
        self._stream: Any = None
        self._loads = session._steps.loads
        self._eager = session.device_type != "cuda"
        places = sorted({str(p.device) for o in session.optimizers.values() for p in parameters_of(o)})
        if not self._eager and len(places) > 1:
            raise SessionError(
                f"parameters lie on {' and '.join(places)}, and a CUDA graph holds the kernels of one GPU: capture "
                "nothing here, or train each GPU's part in a process (DistributedDataParallel, fully_shard)"
            )
        if self._eager:
            warnings.warn(
                f"capture() makes CUDA graphs, and this session is on {session.device_type}: the step runs as written",
                PreampWarning,
                stacklevel=3,
            )

    @property
    def captured(self) -> bool:
        """Whether calls replay a graph."""
        return self._graph is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train one step on these arguments; tensors must keep the shapes, dtypes and devices of the captured call."""
        self._session._check_open()
        if self._eager:
            return self._function(*args, **kwargs)
        self._look_at_hyper()
        if self._loads != self._session._steps.loads:  # states and counts are in other tensors now
            self._loads = self._session._steps.loads
            self.reset()
        if self._graph is not None:
            self._copy_in(args, kwargs)
            self._session._attempts += self._steps  # the host's part of steps that a graph takes
            self._session._losses.replayed(self._steps, lambda: None)
        elif self._may_be_captured(args, kwargs):
            self._capture(args, kwargs)
        else:
            return self._as_written(args, kwargs)
        self._graph.replay()
        if self._session.last_step is not None:
            self._session.last_step = self._session.last_step.after_replay(self._session._attempts - 1)
        return map_tensors(Tensor.clone, self._outputs)

    def reset(self) -> None:
        """Forget the graph and free its memory; the next call runs as written, and the one after it is captured."""
        self._graph, self._outputs, self._inputs, self._ran = None, None, ((), {}), None

    def _look_at_hyper(self) -> None:
        """Move learning rates into tensors, where they may change, and drop the graph if anything else has changed."""
        optimizers = list(self._session.optimizers.values())
        if not any(_refuses(o, self._session._steps.skip) for o in optimizers):
            self._session._rates.become_tensors(optimizers, self._session._gradients.device)
        before, self._hyper = self._hyper, _hyper_of(optimizers)
        changed = "" if before is None else _changed(before, self._hyper)
        if not changed:
            self._changes = 0
            return
        self.reset()
        self._changes += 1
        if self._changes == 3:
            warnings.warn(
                f"session.capture(): {changed} changed before each of the last three calls, so that no "
                "graph was replayed. Only learning rates may change freely; a OneCycleLR leaves the others alone "
                "with cycle_momentum=False",
                PreampWarning,
                stacklevel=3,
            )

    def _may_be_captured(self, args: Any, kwargs: Any) -> bool:
        """Whether a call would do what the last one did, which ran as written; also records its tensors."""
        optimizers = self._session.optimizers.values()
        states = [len(state) for optimizer in optimizers for state in optimizer.state.values()]
        shapes = [(t.shape, t.dtype, t.device) for t in tensors((args, kwargs))]
        before, self._ran = self._ran, (states, shapes)
        self._warmup -= 1
        first = any(isinstance(o, FusedOptimizer) and o.unstarted for o in optimizers)  # reads the device
        return self._warmup < 0 and not first and before == self._ran

    def _as_written(self, args: Any, kwargs: Any) -> Any:
        """Run on a side stream, as torch requires before a capture, with memory that calls share."""
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            results = self._function(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(self._stream)
        return results

    def _capture(self, args: Any, kwargs: Any) -> None:
        session = self._session
        waiting = [type(o).__name__ for o in session.optimizers.values() if _refuses(o, session._steps.skip)]
        if waiting:
            raise SessionError(
                f"{', '.join(waiting)} cannot step inside a graph as it is: use preamp.optim, make it with "
                "capturable=True (fused=True may stay), or prepare(..., skip='device') if it has no such argument"
            )
        torch.clear_autocast_cache()
        self._inputs = map_tensors(Tensor.clone, (args, kwargs))
        before = session.steps
        ready_for_capture()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._outputs = self._function(*self._inputs[0], **self._inputs[1])
        torch.clear_autocast_cache()
        self._steps = session.steps - before
        if self._steps == 0:
            raise SessionError("the captured function takes no session.step(): capture a whole training step")
        self._graph = graph

    def _copy_in(self, args: Any, kwargs: Any) -> None:
        kept, given = list(tensors(self._inputs)), list(tensors((args, kwargs)))
        if len(kept) != len(given):
            raise SessionError(f"the captured step was given {len(kept)} tensors, and this call gives {len(given)}")
        for index, (mine, theirs) in enumerate(zip(kept, given, strict=True)):
            if mine.shape != theirs.shape or mine.dtype is not theirs.dtype:
                raise SessionError(
                    f"tensor {index} of the captured step is {mine.dtype} of shape {tuple(mine.shape)}, and of this "
                    f"call {theirs.dtype} of shape {tuple(theirs.shape)}: drop or pad the last batch, or call reset()"
                )
        for mine, theirs in zip(kept, given, strict=True):
            mine.copy_(theirs, non_blocking=True)


def _hyper_of(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """The hyper-parameters of all groups: numbers, which a graph freezes, and tensors."""
    groups = (group.items() for optimizer in optimizers for group in optimizer.param_groups)
    return [{k: v for k, v in own if isinstance(v, (*_PLAIN, Tensor)) and k != _NOTED} for own in groups]


def _differ(old: Any, new: Any) -> bool:
    """Whether a hyper-parameter is another one; a tensor may have another value."""
    return old is not new if isinstance(old, Tensor) or isinstance(new, Tensor) else bool(old != new)


def _changed(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> str:
    """The names of the hyper-parameters that differ; "" if none does."""
    pairs = zip(before, now, strict=False)
    names = {key for old, new in pairs for key in old.keys() | new.keys() if _differ(old.get(key), new.get(key))}
    return ", ".join(sorted(names)) or ("the list of groups" if len(before) != len(now) else "")


def _refuses(optimizer: Optimizer, skip: str) -> bool:
    """Whether an optimizer's step needs the host, or torch requires capturable=True for it in a graph."""
    told = [group["capturable"] for group in optimizer.param_groups if "capturable" in group]
    return needs_host(optimizer, skip) or (not isinstance(optimizer, FusedOptimizer) and not all(told))


class Rates:
    """The learning rates that optimizers had before the capture, and the tensors in their place."""

    def __init__(self) -> None:
        self._given: dict[tuple[Optimizer, int], float | Tensor] = {}
        self._ours: dict[tuple[Optimizer, int], Tensor] = {}

    def become_tensors(self, optimizers: Iterable[Optimizer], device: torch.device) -> None:
        """Make every group's rate a tensor on `device`; a number set since then is copied into the earlier tensor.

        A tensor that is already on the device is kept.
        """
        for optimizer in optimizers:
            for index, group in enumerate(optimizer.param_groups):
                rate = group["lr"]
                if isinstance(rate, Tensor) and rate.device == device:
                    continue
                place = (optimizer, index)
                if place not in self._given or not isinstance(rate, Tensor):  # else loaded, from the CPU
                    self._given[place] = rate
                ours = self._ours.get(place)
                if ours is None or ours.device != device:
                    ours = self._ours[place] = torch.full((), float(rate), dtype=torch.float32, device=device)
                else:
                    ours.fill_(float(rate))
                group["lr"] = ours

    def restore(self) -> None:
        """Turn rates into numbers again, or the caller's tensors, with their current values.

        Also rates that were loaded since, from a state with tensors. A host sync.
        """
        for (optimizer, index), given in self._given.items():
            group = optimizer.param_groups[index] if index < len(optimizer.param_groups) else {}
            if not isinstance(now := group.get("lr"), Tensor):  # set after the last call
                continue
            if isinstance(given, Tensor):
                group["lr"] = given.copy_(now)
            else:
                unchanged = torch.equal(now.detach().cpu(), torch.tensor(given, dtype=now.dtype, device="cpu"))
                group["lr"] = given if unchanged else float(now)  # the tensor has fewer digits

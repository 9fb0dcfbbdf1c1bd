"""A whole training step as one CUDA graph: forward, backward, scaling, optimizer, all without the host.

For networks whose kernels are shorter than the time Python takes to start them. It works because nothing in a step of a
session waits for the device, and because all that a step changes (scales, counts of skips, masters, states) lies in
tensors that stay where they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import PreampWarning, SessionError
from ..optim import FusedOptimizer
from ..tree import map_tensors, tensors
from ._parameters import parameters_of
from ._step import needs_host

if TYPE_CHECKING:
    from ._session import Session

_PLAIN = (bool, int, float, str, type(None), tuple)


class CapturedStep:
    """A function of tensors that trains one step; made by `Session.capture`.

    The first `warmup` calls run as written. The next one is captured, and from then on calls copy their arguments into
    the tensors that were captured, start the graph, and return copies of its results.
    """

    def __init__(self, session: Session, function: Callable[..., Any], warmup: int) -> None:
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 1:
            raise SessionError(f"warmup={warmup!r}: at least one call has to run before a capture, to make all states")
        self._session, self._function, self._warmup = session, function, warmup
        self._graph: Any = None
        self._inputs: tuple[Any, dict[str, Any]] = ((), {})
        self._outputs: Any = None
        self._steps = 0
        self._hyper: list[dict[str, Any]] = []
        self._changes = 0
        self._loads = session._loads
        self._eager = session.device_type != "cuda"
        places = sorted({str(p.device) for o in session.optimizers.values() for p in parameters_of(o)})
        if not self._eager and len(places) > 1:
            raise SessionError(
                f"parameters lie on {' and '.join(places)}, and a CUDA graph holds the kernels of one GPU: capture "
                "nothing here, or train each GPU's part in a process (DistributedDataParallel, fully_shard)"
            )
        if self._eager:
            warnings.warn(
                f"session.capture() makes CUDA graphs, and this session is on {session.device_type}: the step runs as "
                "it is written",
                PreampWarning,
                stacklevel=3,
            )

    @property
    def captured(self) -> bool:
        """Whether calls replay a graph by now."""
        return self._graph is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train one step on these arguments; tensors must keep the shapes, dtypes and devices of the captured call."""
        self._session._check_open()
        if self._eager:
            return self._function(*args, **kwargs)
        if self._loads != self._session._loads:  # states and counts lie in other tensors now: make all of them first
            self.reset()
            self._loads, self._warmup = self._session._loads, max(self._warmup, 1)
        if self._graph is None and self._warmup > 0:
            self._warmup -= 1
            return self._on_side_stream(args, kwargs)
        if self._graph is None or self._hyper != (now := self._hyper_now()):
            if self._graph is not None:
                self._warn_of_changes(now)
            self._capture(args, kwargs)
        else:
            self._changes = 0
            self._copy_in(args, kwargs)
            self._session._replayed(self._steps)
        self._graph.replay()
        self._session._after_replay()
        return map_tensors(Tensor.clone, self._outputs)

    def reset(self) -> None:
        """Forget the graph and free its memory; the next call captures anew."""
        self._graph, self._outputs, self._inputs = None, None, ((), {})

    def _on_side_stream(self, args: Any, kwargs: Any) -> Any:
        """Torch wants the calls before a capture off the default stream."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results = self._function(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(stream)
        return results

    def _capture(self, args: Any, kwargs: Any) -> None:
        self.reset()
        session = self._session
        waiting = [type(o).__name__ for o in session.optimizers.values() if _refuses(o, session._skip)]
        if waiting:
            raise SessionError(
                f"{', '.join(waiting)} cannot step inside a graph as it is: use preamp.optim, make it with "
                "capturable=True (fused=True may stay), or prepare(..., skip='device') if it has no such argument"
            )
        torch.clear_autocast_cache()
        device = session._device()
        for optimizer in session.optimizers.values():
            for group in optimizer.param_groups:  # a number would be frozen; schedulers write into a tensor
                if not isinstance(group["lr"], Tensor) or group["lr"].device != device:
                    group["lr"] = torch.tensor(float(group["lr"]), device=device)
        self._hyper = self._hyper_now()
        self._inputs = map_tensors(Tensor.clone, (args, kwargs))
        before = session.steps
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
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

    def _warn_of_changes(self, now: list[dict[str, Any]]) -> None:
        """Warn when a hyper-parameter changes call by call, so that every call is captured and none replayed."""
        self._changes += 1
        if self._changes == 3:
            pairs = zip(self._hyper, now, strict=False)
            names = sorted(
                {key for old, new in pairs for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
            )
            warnings.warn(
                f"session.capture(): {', '.join(names) or 'the list of groups'} changed before each of the last three "
                "calls, and each was captured anew, which costs more than it saves. Only learning rates may change "
                "freely; a OneCycleLR leaves the others alone with cycle_momentum=False",
                PreampWarning,
                stacklevel=3,
            )

    def _hyper_now(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if isinstance(value, _PLAIN)}
            for optimizer in self._session.optimizers.values()
            for group in optimizer.param_groups
        ]


def _refuses(optimizer: Optimizer, skip: str) -> bool:
    """Whether an optimizer asks the host whether to step, or is one of torch's that want capturable=True in a graph."""
    told = [group["capturable"] for group in optimizer.param_groups if "capturable" in group]
    return needs_host(optimizer, skip) or (not isinstance(optimizer, FusedOptimizer) and not all(told))

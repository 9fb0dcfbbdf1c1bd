"""Why a step was not finite: the step is done again under observation, and nothing is left of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..report import Finding
from ._entries import attributes_of, put_back
from ._names import Names
from ._origin import Origin, trace
from ._places import Places
from ._random import random_state, set_random_state
from ._tape import Tape


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """An origin, and whether only the loss scale brings it about."""

    origin: Origin
    by_scale: bool
    samples: tuple[int, ...] = ()
    """Positions along the first dimension of the input that holds a value that is not finite."""

    def finding(self, step: int) -> Finding:
        """PA201, or PA207 for what came in with a batch; a damaged weight did not."""
        found = self.origin.finding(step)
        source = self.origin.source
        if source is not None:
            when = f"the step before, {step - 1}," if step else "whoever made or loaded it"
            found = replace(
                found, code="PA201",
                message=f"parameter or buffer {source!r} was {self.origin.kind} before step {step} began: {when} left "
                f"it so; {self.origin.op} is the first to compute with it",
            )  # fmt: skip
        if self.samples:
            evidence = dict(found.evidence) if isinstance(found.evidence, dict) else {}
            found = replace(found, evidence={**evidence, "entries of the batch": list(self.samples)})
        return found

    def place(self) -> dict[str, Any]:
        """Where it is, for a record."""
        one = self.origin
        return {"module": one.module, "op": one.op, "direction": one.direction, "file": one.file, "line": one.line}


def diagnose(
    tape: Tape, names: Names, losses: Sequence[Tensor], scale: float, parameters: Sequence[Tensor]
) -> Diagnosis | None:
    """Replay the step that led to `losses`; None where it cannot be replayed or is sound when it is.

    `scale`: what is on the loss. An overflow that is gone without it is the scale's doing.
    """
    known = [loss for loss in losses if tape.knows(loss)]
    if not known:
        return None
    models = names.models or {str(i): m for i, m in enumerate(tape.models())}
    before = random_state()
    flags = {part: attributes_of(part) for model in tape.models() for part in model.modules()}

    def look(seed: float) -> Origin | None:
        def run(places: Places) -> list[Tensor]:
            return [tape.replay(loss, places, names.get) for loss in known]

        return trace(run, models, lambda loss: _backward(loss, seed, parameters))

    try:
        with torch.utils._python_dispatch._disable_current_modes():
            origin = look(1.0)
            by_scale = False
            if origin is not None and scale != 1.0 and not origin.from_data:
                by_scale = look(1.0 / scale) is None
    except Exception:  # a model that cannot be called a second time
        return None
    finally:
        set_random_state(before)
        put_back(flags)
    if origin is None:
        return None
    if origin.file is None and origin.module is not None:
        # A model made of torch's modules only: the line that called it, which a replay does not run.
        file, line = tape.called_at(origin.module, names.get)
        origin = replace(origin, file=file, line=line)
    return Diagnosis(origin, by_scale, samples(tape) if origin.from_data else ())


def _backward(loss: Tensor, seed: float, parameters: Sequence[Tensor]) -> None:
    """Gradients without the hooks of those who wait for gradients, such as DistributedDataParallel's."""
    wanted = [p for p in parameters if p.requires_grad]
    grown = torch.full_like(loss, seed)
    if _goes_back_inside(loss):
        torch.autograd.backward(loss, grown)
        return
    grads = torch.autograd.grad(loss, wanted, grown, allow_unused=True)
    for parameter, grad in zip(wanted, grads, strict=True):
        if grad is not None:
            parameter.grad = grad.to(parameter.dtype)


def _goes_back_inside(loss: Tensor) -> bool:
    """Whether reentrant checkpointing is in the graph: it refuses `torch.autograd.grad`, half way through."""
    seen: set[Any] = set()
    queue: list[Any] = [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return True
        queue += [before for before, _ in node.next_functions]
    return False


def samples(tape: Tape, *, masks: bool = True) -> tuple[int, ...]:
    """Positions along the first dimension of the first input of the step that is not finite; of 16 at the most.

    Without `masks`, -inf does not count: it is what attention masks are made of.
    """
    for _, tensor in tape.inputs():
        if not tensor.is_floating_point() or not tensor.dim():
            continue
        values = tensor.detach()
        sick = ~torch.isfinite(values) if masks else values.isnan() | (values == torch.inf)
        if bool(sick.any()):
            return tuple(int(i) for i in sick.reshape(tensor.shape[0], -1).any(dim=1).nonzero().flatten()[:16])
    return ()

"""A replay of a step under observation: why it was not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..findings.pa201 import Diagnosis, Origin
from ..names import Names
from ..places import Places, graph_of
from .origin import trace
from .tape import Tape
from .trials import Trials


def diagnose(
    tape: Tape,
    names: Names,
    losses: Sequence[Tensor],
    scale: float,
    parameters: Sequence[Tensor],
    seed: float = 1.0,
    *,
    in_session: bool = False,
) -> Diagnosis | None:
    """Replay the step that led to `losses`; None where it cannot be replayed or is sound when it is.

    `scale`: what is on the backward pass. An overflow that is gone without it is the scale's doing. `seed`: how much of
    that is the gradient the pass began with, and not on the losses.
    """
    known = [loss for loss in losses if tape.knows(loss)]
    if not known:
        return None
    models = names.models or {str(i): m for i, m in enumerate(tape.models())}

    def origin_at(seed: float) -> Origin | None:
        def run(places: Places) -> list[Tensor]:
            return [tape.replay(loss, places) for loss in known]

        return trace(run, models, lambda loss: _backward(loss, seed, parameters))

    try:
        with tape.replaying():
            origin = origin_at(seed)
            by_scale = False
            # a scale that has halved down to 0 is not what makes an inf, and nothing can be divided by it
            if origin is not None and scale not in (0.0, 1.0) and not origin.from_data:
                by_scale = origin_at(seed / scale) is None
    except Exception:  # a model that cannot be called a second time
        return None
    if origin is None:
        return None
    if origin.file is None and origin.module is not None:
        # A model made of torch's modules only: the line that called it, which a replay does not run.
        file, line = tape.called_at(origin.module, names.get)
        origin = replace(origin, file=file, line=line)
    if origin.from_data or by_scale:
        return Diagnosis(origin, by_scale, samples(tape) if origin.from_data else ())
    return _with_cause(Diagnosis(origin, by_scale), Trials(tape, names, losses, seed), in_session)


def _with_cause(found: Diagnosis, trials: Trials, in_session: bool) -> Diagnosis:
    """The same, with what float32 does there, what led to it, and a fix that was tried."""
    origin, plain = found.origin, trials.plain
    if plain is None:
        return replace(found, tried="the step cannot be done again, so no fix was tried")
    line = origin.file, origin.line
    known = [fact for place, fact in plain.shadowed.broke if (place.file, place.line) == line]
    known += [fact for fact in plain.facts if (fact.place.file, fact.place.line) == line]
    if not known:
        not_there = "float32 is not finite there either: no matter of precision"
        return replace(found, tried="no line was found that leads there" if plain.meant else not_there)
    fact = known[0]
    fix, tried = trials.cure(fact, in_session)
    return replace(found, fact=fact, fix=fix, tried=tried)


def _backward(loss: Tensor, seed: float, parameters: Sequence[Tensor]) -> None:
    """Gradients without hooks on their accumulation, such as DistributedDataParallel's."""
    wanted = [p for p in parameters if p.requires_grad]
    grown = torch.full_like(loss, seed)
    # Reentrant checkpointing refuses `torch.autograd.grad`, half way through.
    if any(node.name() == "CheckpointFunctionBackward" for node in graph_of(loss)):
        torch.autograd.backward(loss, grown)
        return
    grads = torch.autograd.grad(loss, wanted, grown, allow_unused=True)
    for parameter, grad in zip(wanted, grads, strict=True):
        if grad is not None:
            parameter.grad = grad.to(parameter.dtype)


def samples(tape: Tape, *, masks: bool = True) -> tuple[int, ...]:
    """Positions along the first dimension of the first input of the step that is not finite; of 16 at the most.

    Without `masks`, -inf does not count: it is what attention masks are made of.
    """
    for tensor in tape.inputs():
        if not tensor.is_floating_point() or not tensor.dim():
            continue
        values = tensor.detach()
        sick = ~torch.isfinite(values) if masks else values.isnan() | (values == torch.inf)
        if bool(sick.any()):
            return tuple(int(i) for i in sick.reshape(tensor.shape[0], -1).any(dim=1).nonzero().flatten()[:16])
    return ()

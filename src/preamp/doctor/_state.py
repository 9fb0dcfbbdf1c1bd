"""What an optimizer is about to step for the first time: PA101, PA111 and PA112."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..policy import policy
from ..report import Finding
from ..session import Session
from ..tree import tensors
from ._lint_eps import optimizer_eps
from ._lint_state import norm_statistics, not_finite

if TYPE_CHECKING:
    from ._watch import Watch


def before_first_step(watch: Watch, optimizer: Optimizer) -> Iterator[Finding]:
    """Findings about an optimizer and the models, just before its first step."""
    if is_well_known(optimizer) and not _keeps_masters(optimizer, watch.scaling.sessions):
        yield from _of_low_parameters(watch, optimizer)
    for path_model in watch.names.models.values():
        yield from (*norm_statistics(path_model, policy("O0")), *not_finite(path_model))
    yield from _of_no_model(watch, optimizer, *watch.places.get(id(optimizer), (None, None)))


def after_first_step(watch: Watch, optimizer: Optimizer) -> Iterator[Finding]:
    """The same of an optimizer that somebody wrote: what it keeps is known once it has kept something."""
    if is_well_known(optimizer):
        return
    kept = [t for t in tensors(list(optimizer.state.values())) if t.dim() and t.dtype is torch.float32]
    halves = [p.detach() for group in optimizer.param_groups for p in group["params"] if p.dtype is torch.float16]
    if halves and not any(_is_master(t, half) for half in halves for t in kept):
        yield from _of_low_parameters(watch, optimizer)


def is_well_known(optimizer: Optimizer) -> bool:
    """Whether it is torch's, ours or Apex's: one that keeps its state in its parameters' dtype unless it says so."""
    return type(optimizer).__module__.partition(".")[0] in ("torch", "preamp", "apex", "transformers")


def _is_master(kept: Tensor, half: Tensor) -> bool:
    return kept.shape == half.shape and bool((kept.to(half.dtype) == half).all())


def _of_low_parameters(watch: Watch, optimizer: Optimizer) -> Iterator[Finding]:
    """PA101 and PA111 of an optimizer without masters."""
    file, line = watch.places.get(id(optimizer), (None, None))
    half = [p for group in optimizer.param_groups for p in group["params"] if p.dtype is torch.float16]
    for finding in optimizer_eps(optimizer, policy("O3" if half else "O0")):
        yield replace(finding, file=file, line=line)
    if half:
        name = watch.names.parameter(half[0])[1]
        yield Finding(
            "PA111", "warning",
            f"{type(optimizer).__name__} steps {len(half)} float16 parameters ({name} first) without float32 "
            "masters: an update below 2**-12 of a weight changes nothing",
            module=watch.names.common(half), op=type(optimizer).__name__, file=file, line=line,
            evidence={"parameters": len(half), "first": name, "dtype": "fp16", "masters": False},
            fix="session = preamp.prepare(model.float(), optimizer, level='O2')  # float32 masters\n"
            "# or leave the model in float32, under torch.autocast",
        )  # fmt: skip


def _of_no_model(watch: Watch, optimizer: Optimizer, file: str | None, line: int | None) -> Iterator[Finding]:
    """Parameters without gradients that no model holds, while the model's own have some and nobody steps them."""
    groups = (g for other in watch.optimizers.values() for g in other.param_groups)
    stepped = {id(p) for group in groups for p in group["params"]}
    lost = [p for group in optimizer.param_groups for p in group["params"] if p.grad is None]
    total = sum(len(group["params"]) for group in optimizer.param_groups)
    if not lost or len(lost) < total:
        return
    watch.names.look(())
    orphans = [p for p in watch.names.parameters() if p.grad is not None and id(p) not in stepped]
    if not orphans:
        return
    yield Finding(
        "PA112", "error",
        f"the {total} parameters of {type(optimizer).__name__} get no gradients, and {len(orphans)} of the model get "
        "some and are never stepped: the model was cast or wrapped after the optimizer was made",
        module=watch.names.common(orphans), op=type(optimizer).__name__, file=file, line=line,
        evidence={"stepped": total, "with gradients": len(orphans)},
        fix="model = model.to(...)  # casts and wrappers first\noptimizer = torch.optim.Adam(model.parameters())",
    )  # fmt: skip


def _keeps_masters(optimizer: Optimizer, sessions: Iterable[Session]) -> bool:
    """True for the optimizer of a session whose policy has masters, and for one that Apex initialised."""
    if hasattr(optimizer, "_amp_stash"):
        return True
    return any(optimizer in one.optimizers.values() and one.policy.masters for one in sessions)

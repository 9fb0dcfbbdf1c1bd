"""What an optimizer is about to step for the first time: PA101, PA111 and PA112."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from ..policy import policy
from ..report import Finding
from ..session import Session
from ._lint_eps import optimizer_eps
from ._lint_state import norm_statistics, not_finite

if TYPE_CHECKING:
    from ._watch import Watch


def before_first_step(watch: Watch, optimizer: Optimizer) -> Iterator[Finding]:
    """Findings about an optimizer and the models, just before its first step."""
    file, line = watch.places.get(id(optimizer), (None, None))
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    mastered = _keeps_masters(optimizer, watch.scaling.sessions)
    if not mastered:
        half = [p for p in stepped if p.dtype is torch.float16]
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
    for path_model in watch.names.models.values():
        for finding in (*norm_statistics(path_model, policy("O0")), *not_finite(path_model)):
            yield finding
    yield from _of_no_model(watch, optimizer, file, line)


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

"""PA112: an order that defeats the precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...formats import name_of
from ...report import Finding
from .check import Check, on
from .events import FirstStep, ModuleCast, Recomputed


class PA112(Check):
    """Casts, wrappers, optimizers and checkpoints that come before or after what they should."""

    @on(ModuleCast)
    def cast(self, event: ModuleCast) -> Iterator[Finding]:
        """A cast of a model that is wrapped for parallel training already."""
        if event.is_wrapper and not event.in_region:
            yield self.finding(
                "warning",
                f"{event.op}() after {event.kind}: the wrapper made its buckets and hooks for the dtype that the "
                "parameters had before",
                "model = model.bfloat16()  # first\nmodel = DistributedDataParallel(model)  # then",
                module=event.module,
                op=event.op,
                at=event.at,
            )

    @on(FirstStep)
    def of_no_model(self, event: FirstStep) -> Iterator[Finding]:
        """Parameters without gradients that no model holds, while the model's own have some and are not stepped."""
        optimizer, names = event.optimizer, event.names
        own = [p for group in optimizer.param_groups for p in group["params"]]
        if not own or any(p.grad is not None for p in own):
            return
        names.search(())
        stepped = {id(p) for each in event.optimizers for group in each.param_groups for p in group["params"]}
        orphans = [p for p in names.parameters() if p.grad is not None and id(p) not in stepped]
        if orphans:
            kind = type(optimizer).__name__
            yield self.finding(
                "error",
                f"the {len(own)} parameters of {kind} get no gradients, and {len(orphans)} of the model get some and "
                "are never stepped: the model was cast or wrapped after the optimizer was made",
                "model = model.to(...)  # casts and wrappers first\noptimizer = torch.optim.Adam(model.parameters())",
                module=names.common(orphans),
                op=kind,
                at=event.at,
                evidence={"stepped": len(own), "with gradients": len(orphans)},
            )

    @on(Recomputed)
    def recomputed(self, event: Recomputed) -> Iterator[Finding]:
        """A forward pass that is recomputed for the backward one, in another precision than the first time."""
        before, now = _spell(event.before), _spell(event.now)
        yield self.finding(
            "warning",
            f"the forward pass of this module ran in {before} and is recomputed for the backward pass in {now}: its "
            "gradients belong to other numbers than its output",
            "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # keeps the autocast region\n"
            "# or decorate the autograd.Function's methods: torch.amp.custom_fwd and torch.amp.custom_bwd",
            module=event.module,
            direction="backward",
            at=event.at,
            evidence={"forward": before, "recomputed": now},
        )


def _spell(dtypes: Sequence[torch.dtype]) -> str:
    return f"an autocast region for {' and '.join(map(name_of, dtypes))}" if dtypes else "float32, outside any region"

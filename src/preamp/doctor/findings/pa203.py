"""PA203: a scale that collapses or oscillates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from ...report import Finding
from ..records import Rank
from .check import Check

START = 5
"""Skips in a row at the start by which a scale that began too high finds its place, and a schedule loses little."""
COLLAPSED = 1.0
"""A scale at or below this protects nothing."""
OFTEN = 5
"""One step of so many that is skipped after the start is too many."""
FEWEST = 6
"""Steps from which that is judged."""


class PA203(Check):
    """The loss scale over a whole run, and over processes that must agree on it."""

    def at_end(self, rank: Rank) -> Iterator[Finding]:
        """All steps skipped, a collapse, or skips without end. An update that is missing is PA107's."""
        steps = rank.steps
        scales = [step["scale"] for step in steps if step["scale"]]
        if not scales:
            return
        made = sum(step.get("scalers", 0) for step in steps)
        if len(steps) >= FEWEST and made > len(steps) / 2:
            skipped = sum(step["skipped"] for step in steps)
            yield self.finding(
                "error" if 2 * skipped > len(steps) else "warning",
                f"{made} scalers were made in {len(steps)} steps: each begins at its first scale and forgets what the "
                "one before has learnt, so the scale never adapts, and where it is too large every step is skipped",
                "scaler = torch.amp.GradScaler()  # once, before the loop",
                at=rank.scaler_at,
                evidence={"scalers": made, "steps": len(steps), "skipped": skipped},
            )
            return
        start, skips = rank.first_taken, [step["step"] for step in steps if step["skipped"]]
        first, last = scales[0], scales[-1]
        where = self._where(rank)
        where["evidence"] = {"first scale": first, "last scale": last, "skipped": len(skips), "steps": len(steps)}
        unattended = longest_without_update(rank)
        if start == len(steps) and len(steps) >= START and not unattended:
            lower = "; if there is none, begin lower:\nscaler = torch.amp.GradScaler(init_scale=2.0**10)"
            yield self.finding(
                "error",
                f"all {len(steps)} steps were skipped: the scale went from {first:g} to {last:g} and nothing was "
                "trained",
                "# find what overflows whatever the scale: see PA201" + (lower if last > 2.0**10 else ""),
                step=steps[0]["step"],
                **where,
            )
        elif last <= COLLAPSED < first and len(skips) >= START:
            yield self.finding(
                "error",
                f"the scale collapsed from {first:g} to {last:g} by {len(skips)} skips: gradients are not protected "
                "from underflow any more",
                "# find what overflows (PA201), or train in bfloat16; preamp.GradScaler(min_scale=1.0) stops the fall",
                step=skips[-1],
                **where,
            )
        elif not unattended:
            yield from self._oscillates(scales, len(steps), start, [step for step in skips if step >= start], where)

    def _oscillates(
        self, scales: list[float], count: int, start: int, later: list[int], where: dict[str, Any]
    ) -> Iterator[Finding]:
        if count < FEWEST or len(later) <= max(2, count // OFTEN):
            return
        many = f"{len(later)} of {count - start} steps after the start were skipped"
        if any(after > before for before, after in pairwise(scales)):
            message = f"the scale oscillates: {many}"
            fix = "scaler = torch.amp.GradScaler(growth_interval=2000)  # growth by 2 in 2000 clean steps"
        else:
            fell = f"never grows back, from {scales[0]:g} to {scales[-1]:g}"
            message = f"the scale {fell if scales[-1] < scales[0] else f'stays at {scales[-1]:g}'}: {many}"
            fix = "# find what overflows whatever the scale: see PA201, PA207"
        yield self.finding("warning", message, fix, step=later[0], **where)

    def _where(self, rank: Rank) -> dict[str, Any]:
        """The place of the last overflow that was replayed; where only gradients overflow, that of the loss."""
        lows = rank.many.get("overflow", [])
        found = {name: lows[-1].get(name) if lows else None for name in ("module", "op", "direction", "file", "line")}
        at = (found.pop("file"), found.pop("line"))
        loss = next((step for step in reversed(rank.steps) if step["skipped"] and step.get("loss_at")), None)
        return {**found, "at": at if at[1] is not None or loss is None else tuple(loss["loss_at"])}

    def among(self, ranks: Sequence[Rank]) -> Iterator[Finding]:
        """One process skips a step that another takes, or scales by another number: their weights part."""
        by_rank = {rank.rank: rank for rank in ranks}
        for field, message in (
            ("skipped", "some ranks skipped the step and others took it"),
            ("scale", "ranks scale by different numbers"),
        ):
            steps = zip(*(rank.steps for rank in by_rank.values()), strict=False)
            for step, each in enumerate(steps):
                values = dict(zip(by_rank, (one[field] for one in each), strict=True))
                if len(set(map(str, values.values()))) > 1:
                    yield self.finding(
                        "error",
                        f"{message}: from here on each trains weights of its own",
                        "# FSDP: torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler() in place of "
                        "GradScaler\n"
                        "# DDP: no_sync() around all backward passes but the last of a step, on every rank alike",
                        step=step,
                        evidence={f"rank {rank}": f"{field} {value}" for rank, value in values.items()},
                    )
                    return


def longest_without_update(rank: Rank) -> range | None:
    """The longest run of skipped steps between which the script never updated its scaler, of START or more."""
    end = rank.facts.get("end", {})
    updates = [step["updates"] for step in rank.steps[1:]] + [end.get("updates", 0)]
    if rank.scaler_at[0] is None or not sum(updates):
        return None
    longest = range(0)
    first = 0
    for index, step in enumerate(rank.steps):
        if not step["skipped"] or updates[index]:
            first = index + 1
        elif index + 1 - first > len(longest):
            longest = range(first, index + 1)
    return longest if len(longest) >= START else None

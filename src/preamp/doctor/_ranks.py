"""Findings of several processes as one list: who had them first, and where processes disagree that must not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..report import Finding
from ._judge import judge
from ._records import Rank


def all_findings(ranks: list[Rank], base: Path) -> tuple[Finding, ...]:
    """Findings of all processes, most harmful first; one that several have is told once, of the earliest step."""
    found: dict[Any, list[tuple[Finding, int]]] = {}
    for rank in ranks:
        for finding in (*rank.findings, *(_relative(one, base) for one in judge(rank))):
            key = (finding.code, finding.severity, finding.module, finding.op, finding.file, finding.line)
            found.setdefault(key, []).append((finding, rank.rank))
    several = len({rank.rank for rank in ranks}) > 1
    told = [_as_one(same) if several else same[0][0] for same in found.values()]
    return tuple(sorted((*told, *disagreements(ranks))))


def _as_one(same: list[tuple[Finding, int]]) -> Finding:
    finding, first = min(same, key=lambda one: (one[0].step is None, one[0].step or 0, one[1]))
    evidence = dict(finding.evidence) if isinstance(finding.evidence, dict) else {"seen": finding.evidence}
    evidence["ranks"] = sorted({rank for _, rank in same})
    if len({one.step for one, _ in same}) > 1:
        evidence["first on rank"] = first
    return replace(finding, evidence=evidence)


def disagreements(ranks: list[Rank]) -> Iterator[Finding]:
    """PA203 where one process skips a step that another takes, or scales by another number: their weights part."""
    by_rank = {rank.rank: rank for rank in ranks if rank.steps}
    if len(by_rank) < 2:
        return
    for what, field in (("skipped", "skipped"), ("scale", "scale")):
        steps = zip(*(rank.steps for rank in by_rank.values()), strict=False)
        for step, each in enumerate(steps):
            values = dict(zip(by_rank, (one[field] for one in each), strict=True))
            if len(set(map(str, values.values()))) > 1:
                yield _parted(step, what, values)
                return


def _parted(step: int, what: str, values: dict[int, Any]) -> Finding:
    said = "some ranks skipped the step and others took it" if what == "skipped" else "ranks scale by different numbers"
    return Finding(
        "PA203", "error",
        f"{said}: from here on each trains weights of its own",
        step=step, evidence={f"rank {rank}": f"{what} {value}" for rank, value in values.items()},
        fix="# FSDP: torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler() in place of GradScaler\n"
        "# DDP: no_sync() around all backward passes but the last of a step, on every rank alike",
    )  # fmt: skip


def _relative(finding: Finding, base: Path) -> Finding:
    if finding.file is None:
        return finding
    below = os.path.relpath(finding.file, base)
    return finding if below.startswith("..") else replace(finding, file=below)

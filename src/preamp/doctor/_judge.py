"""Findings that only the whole run shows: PA203 of the loss scale, PA108 of schedules, PA107 of updates, PA211."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from ..report import Finding
from ._records import Rank

START = 5
"""Skips in a row at the start by which a scale that began too high finds its place, and a schedule loses little."""
FROZEN = 0.5
"""Share of the second moments that a step leaves as they were, from which it is reported. In float32, or with a beta2
of 0.95, it is a few percent at the most; from half on what Adam divides by is mostly a memory of the first steps."""
COLLAPSED = 1.0
"""A scale at or below this protects nothing."""


def judge(rank: Rank) -> Iterator[Finding]:
    """All of them, from the steps that one process recorded."""
    steps = rank.steps
    if not steps:
        return
    yield from _scale(rank)
    yield from _schedule(steps)
    yield from _updates(rank)
    yield from _unexplained(rank)
    yield from _moments(rank)


def _started(steps: list[dict[str, Any]]) -> int:
    """How many steps were skipped before the first one that was taken."""
    return next((i for i, step in enumerate(steps) if not step["skipped"]), len(steps))


def _scale(rank: Rank) -> Iterator[Finding]:
    steps = rank.steps
    scales = [step["scale"] for step in steps if step["scale"]]
    if not scales:
        return
    start, skips = _started(steps), [step["step"] for step in steps if step["skipped"]]
    later = [number for number in skips if number >= start]
    lows = rank.many.get("overflow", [])
    where = lows[-1] if lows else {}
    evidence = {"first scale": scales[0], "last scale": scales[-1], "skipped": len(skips), "steps": len(steps)}
    named = {name: where.get(name) for name in ("module", "op", "direction", "file", "line")}
    loss_at = next((step["loss_at"] for step in reversed(steps) if step["skipped"] and step.get("loss_at")), None)
    if named["line"] is None and loss_at is not None:  # nothing but gradients overflows: the loss is too large
        file, _, line = loss_at.rpartition(":")
        named |= {"file": file, "line": int(line)}
    if start == len(steps) and len(steps) >= START and not _without_update(rank):
        yield Finding(
            "PA203", "error",
            f"all {len(steps)} steps were skipped: the scale went from {scales[0]:g} to {scales[-1]:g} and nothing was "
            "trained",
            step=steps[0]["step"], evidence=evidence, **named,
            fix="# find what overflows whatever the scale: see PA201" + (
                "; if there is none, begin lower:\nscaler = torch.amp.GradScaler(init_scale=2.0**10)"
                if scales[-1] > 2.0**10 else ""
            ),
        )  # fmt: skip
    elif scales[-1] <= COLLAPSED < scales[0] and len(skips) >= START:
        yield Finding(
            "PA203", "error",
            f"the scale collapsed from {scales[0]:g} to {scales[-1]:g} by {len(skips)} skips: gradients are not "
            "protected from underflow any more",
            step=skips[-1], evidence=evidence, **named,
            fix="# find what overflows (PA201), or train in bfloat16; preamp.GradScaler(min_scale=1.0) stops the fall",
        )  # fmt: skip
    elif _without_update(rank):
        return  # the scale cannot do what is expected of it: PA107 tells
    elif len(steps) >= 6 and len(later) > max(2, len(steps) // 5):
        grows = any(after > before for before, after in pairwise(scales))
        many = f"{len(later)} of {len(steps) - start} steps after the start were skipped"
        if not grows:
            yield Finding(
                "PA203", "warning",
                f"the scale never grows back, from {scales[0]:g} to {scales[-1]:g}: {many}",
                step=later[0], evidence=evidence, **named,
                fix="# find what overflows whatever the scale: see PA201, PA207",
            )  # fmt: skip
            return
        yield Finding(
            "PA203", "warning", f"the scale oscillates: {many}",
            step=later[0], evidence=evidence, **named,
            fix="scaler = torch.amp.GradScaler(growth_interval=2000)  # growth by 2 in 2000 clean steps\n"
            "# or preamp.GradScaler(schedule='window'), which sees an overflow coming",
        )  # fmt: skip


def _schedule(steps: list[dict[str, Any]]) -> Iterator[Finding]:
    moved = [step for index, step in enumerate(steps) if step["skipped"] and _schedules_after(steps, index)]
    if not moved:
        return
    start = _started(steps)
    later = [step for step in moved if step["step"] >= start]
    lost = max(len(moved) - START, len(later))
    many = lost > 0.02 * len(steps) and (len(later) > 1 or len(moved) > START)
    place = next((s["schedule_at"] for s in reversed(steps) if s["schedule_at"]), None)
    file, _, line = (place or "").rpartition(":")
    yield Finding(
        "PA108", "warning" if many else "info",
        f"the learning rate schedule moved on in {len(moved)} skipped steps, of {len(steps)} in all: warm-up and decay "
        "run ahead of training",
        file=file or None, line=int(line) if line.isdigit() else None, step=moved[0]["step"],
        evidence={"moved while skipped": len(moved), "at the start": len(moved) - len(later), "steps": len(steps)},
        fix="before = scaler.get_scale()\nscaler.step(optimizer)\nscaler.update()\n"
        "if scaler.get_scale() >= before:  # not skipped\n    scheduler.step()",
    )  # fmt: skip


def _schedules_after(steps: list[dict[str, Any]], index: int) -> bool:
    """Whether a schedule moved between this attempt and the next."""
    return index + 1 < len(steps) and bool(steps[index + 1]["schedules"])


def _updates(rank: Rank) -> Iterator[Finding]:
    end = rank.facts.get("end", {})
    made = end.get("scaler_at")
    if not made or not any(step["scale"] for step in rank.steps) or len(rank.steps) < 2:
        return
    if sum(step["updates"] for step in rank.steps) + end.get("updates", 0) == 0:
        file, _, line = made.rpartition(":")
        yield Finding(
            "PA107", "error", "scaler.update() is never called: the scale neither falls after an overflow nor grows",
            file=file, line=int(line), evidence={"steps": len(rank.steps), "updates": 0},
            fix="scaler.step(optimizer)\nscaler.update()  # once a step",
        )  # fmt: skip
    elif stuck := _without_update(rank):
        file, _, line = made.rpartition(":")
        scale = rank.steps[stuck[0]]["scale"]
        yield Finding(
            "PA107", "error",
            f"{len(stuck)} steps in a row were skipped and scaler.update() was not called after any of them: the scale "
            f"stays at {scale or 0:g}, at which gradients overflow",
            file=file, line=int(line), step=rank.steps[stuck[0]]["step"],
            evidence={"skipped": len(stuck), "scale": scale, "steps": len(rank.steps)},
            fix="scaler.step(optimizer)  # also where gradients are not finite: it skips by itself\n"
            "scaler.update()  # in every branch, whether the step was taken or not",
        )  # fmt: skip


def _without_update(rank: Rank) -> range | None:
    """The longest run of skipped steps between which the script never updated its scaler, of START or more."""
    end = rank.facts.get("end", {})
    updates = [step["updates"] for step in rank.steps[1:]] + [end.get("updates", 0)]
    if not end.get("scaler_at") or not sum(updates):
        return None
    longest = range(0)
    first = 0
    for index, step in enumerate(rank.steps):
        if not step["skipped"] or updates[index]:
            first = index + 1
        elif index + 1 - first > len(longest):
            longest = range(first, index + 1)
    return longest if len(longest) >= START else None


def _unexplained(rank: Rank) -> Iterator[Finding]:
    """PA201 without an origin: a step taken with what is not finite, that could not be done again."""
    taken = {step["step"]: step["bad"] for step in rank.steps if step["bad"] and not step["skipped"]}
    known = any(finding.severity == "error" and finding.code != "PA101" for finding in rank.findings)
    first = next((one for one in rank.many.get("unexplained", []) if one["step"] in taken), None)
    if first is None or known:
        return
    file, line = first["at"]
    what = "loss was" if first["what"] == "loss" else "gradients were"
    yield Finding(
        "PA201", "error",
        f"the {what} not finite and the step was taken; it could not be done again, so its origin is not known",
        file=file, line=line, step=first["step"], direction="forward" if first["what"] == "loss" else "backward",
        fix="origin = preamp.doctor.find_origin(lambda: loss_fn(model(x), y), models=model)  # where it can be called",
    )  # fmt: skip


def _moments(rank: Rank) -> Iterator[Finding]:
    """PA211, of each optimizer, by the last step that was looked at."""
    by_optimizer: dict[Any, list[dict[str, Any]]] = {}
    for one in rank.many.get("moments", []):
        if one["total"]:
            by_optimizer.setdefault((one["optimizer"], one["file"], one["line"]), []).append(one)
    for (optimizer, file, line), seen in by_optimizer.items():
        last, shares = seen[-1], {one["step"]: one["same"] / one["total"] for one in seen}
        if shares[last["step"]] < FROZEN:
            continue
        evidence = {"moments unchanged": {f"step {step}": round(share, 3) for step, share in _some(shares)}}
        evidence["dtype"] = last["dtype"]
        far = ""
        if last["stored"] and last["exact"]:
            ratio = last["stored"] / last["exact"]
            evidence["stored mean over that in float32"] = round(ratio, 3)
            far = f"; on average they are {ratio:.2g} times what the same gradients give in float32"
        yield Finding(
            "PA211", "warning",
            f"step {last['step']} left {shares[last['step']]:.0%} of the second moments with a gradient as they were: "
            f"{last['dtype']} cannot hold changes as small as 1 - beta2 of them, so they hardly fall any more{far}",
            module=last["module"], op=optimizer, file=file, line=line,
            step=next(step for step, share in shares.items() if share >= FROZEN), evidence=evidence,
            fix="session = preamp.prepare(model.float(), optimizer, level='O5')  # masters and moments in float32\n"
            "# or preamp.optim.AdamW in place of torch.optim.AdamW",
        )  # fmt: skip


def _some(shares: dict[int, float]) -> list[tuple[int, float]]:
    """Up to five, spread evenly, the last among them."""
    rows = list(shares.items())
    return rows[:: -max(1, len(rows) // 4)][:5][::-1]

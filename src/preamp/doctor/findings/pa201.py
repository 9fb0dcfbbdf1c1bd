"""PA201: where the first non-finite value came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...report import Finding
from ...report.finding import Severity
from ..records import Line, Rank
from ..shadow.facts import Fact, spelled
from .check import Check, on, with_evidence
from .pa207 import PA207

_WHOLE = 256
"""Whole numbers up to here are dimensions, sizes and exponents, and break nothing."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor that went in or came out: range over its finite entries (None without any), counts of the others."""

    dtype: str
    shape: tuple[int, ...]
    min: float | None
    max: float | None
    inf: int
    nan: int

    def __str__(self) -> str:
        """Dtype, shape and range in one line."""
        span = "nothing finite" if self.min is None else f"{self.min:.4g} to {self.max:.4g}"
        bad = "".join(f", {count} {name}" for name, count in (("inf", self.inf), ("nan", self.nan)) if count)
        return f"{self.dtype}{list(self.shape)} {span}{bad}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the first non-finite value came from.

    `module`: path of `named_modules` (root "", `name:path` with several models), None outside of all models; `op`:
    aten overload; `file`, `line`: the user's line that ran it, for a backward operator the forward line that made
    its node; `inputs`, `output`: what it read and the first non-finite tensor it wrote; `constants`: numbers among
    its arguments; `kind`: of the output, NaN before inf; `carriers`: (module, op, direction) of those that passed it
    on, in order, each once, at most 20; `from_data`: the value was there before any operator, in `source` (a
    parameter's or buffer's path, None for an input), and module and op are its first consumer; `own`: (file, line)
    inside a backward written in Python.
    """

    module: str | None
    op: str
    direction: Literal["forward", "backward"]
    file: str | None
    line: int | None
    inputs: tuple[Operand, ...]
    output: Operand
    kind: Literal["inf", "nan"]
    carriers: tuple[tuple[str | None, str, str], ...] = ()
    from_data: bool = False
    source: str | None = None
    constants: tuple[float, ...] = ()
    own: tuple[str, int] | None = None

    @property
    def where(self) -> dict[str, Any]:
        """The place, as fields of a finding."""
        at = (self.file, self.line)
        return {"module": self.module, "op": spelled(self.op), "direction": self.direction, "at": at}

    def finding(self, step: int | None = None) -> Finding:
        """PA201, or PA207 when the value came with the data; `step` counts optimizer-step attempts from 0."""
        where = "outside the models" if self.module is None else f"in module {self.module or '(root)'!r}"
        evidence: dict[str, Any] = {f"input {i}": str(operand) for i, operand in enumerate(self.inputs)}
        evidence["output"] = str(self.output)
        if told := [number for number in self.constants if not -_WHOLE <= number <= _WHOLE or number % 1]:
            evidence["constants"] = told
        if self.own:
            evidence["backward written at"] = f"{self.own[0]}:{self.own[1]}"
        if self.carriers:
            evidence["carried by"] = [f"{m or '(root)'} {spelled(op)} ({way})" for m, op, way in self.carriers]
        if self.from_data:
            came = "nan" if any(i.nan for i in self.inputs) else "inf" if any(i.inf for i in self.inputs) else self.kind
            return PA207.came_in(came, self.source, where, **self.where, step=step, evidence=evidence)
        masked = "softmax" in self.op and any(operand.inf for operand in self.inputs)
        values = "a row that is masked whole" if masked else "finite values"
        if spelled(self.op) == "a cast" and self.inputs and self.inputs[0].max is not None:
            largest = max(self.inputs[0].max, -(self.inputs[0].min or 0.0))
            values = f"numbers up to {largest:.5g}: the largest of float16 is 65504"
        fix = "torch.finfo(scores.dtype).min  # instead of -inf in the mask" if masked else None
        message = f"{spelled(self.op)} ({self.direction}) {where} made {self.kind} out of {values}"
        return PA201.finding("error", message, fix, **self.where, step=step, evidence=evidence)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the replay of a step shows that was not finite."""

    origin: Origin
    step: int
    by_scale: bool = False
    """Whether the loss scale alone brings it about."""
    samples: Sequence[int] = ()
    """Positions along the first dimension of the input that holds a value that is not finite."""
    cast: tuple[Line, float] | None = None
    """Where the script cast to float16 what came in, and the largest number that it cast."""
    fact: Fact | None = None
    """What went wrong before it, or there: float32 would have got it right."""
    fix: str | None = None
    """What to write, tried."""
    tried: str | None = None
    """What happened when the step was done again with it, or why it was not."""

    def finding(self) -> Finding:
        """PA201, or PA207 for what came in with a batch; a parameter or buffer that is not finite did not."""
        step, source, fact = self.step, self.origin.source, self.fact
        found = self.origin.finding(step)
        if self.tried is not None:
            found = with_evidence(replace(found, fix=self.fix or found.fix), tried=self.tried)
        if fact is not None and fact.kind != "not finite":
            place, lost = fact.place, "zero" if fact.kind == "lost" else fact.off
            message = (
                f"{fact.name} ({fact.place.direction}) is {lost} in {fact.dtype}, and {spelled(self.origin.op)} at "
                f"line {self.origin.line} makes {self.origin.kind} of it"
            )
            if fact.constant is not None:
                at = "" if self.origin.line == place.line else f" at line {self.origin.line}"
                message = f"{fact.vanished}, and {spelled(self.origin.op)}{at} makes {self.origin.kind} of it"
            if fact.code in ("PA114", "PA115"):
                found = replace(found, code=fact.code, op=fact.name)
            found = replace(found, message=message, file=place.file, line=place.line, module=place.module)
        if source is not None:
            when = f"the step before, {step - 1}," if step else "whoever made or loaded it"
            message = (
                f"parameter or buffer {source!r} was {self.origin.kind} before step {step} began: {when} left "
                f"it so; {spelled(self.origin.op)} is the first to compute with it"
            )
            found = replace(found, code="PA201", message=message)
        if self.cast is not None:
            (file, line), largest = self.cast
            what = "numbers" if source is None else f"buffer {source!r}, numbers"
            message = (
                f"{what} up to {largest:.5g}, cast to float16 at line {line}: its largest is 65504, they become "
                f"infinite, and {spelled(self.origin.op)} is the first to compute with them"
            )
            fix = f"# scale or bound them before the cast at line {line}, or leave them in float32"
            found = replace(found, code="PA201", message=message, fix=fix)
            if source is None:
                found = replace(found, file=file, line=line, module=None, op="a cast")
        if self.samples:
            found = with_evidence(found, **{"entries of the batch": list(self.samples)})
        return found


class PA201(Check):
    """The origin of what is not finite in a replayed step; infinities that leave no trace; steps not replayed."""

    @on(Diagnosis)
    def diagnosed(self, event: Diagnosis) -> Iterator[Finding]:
        """Whatever came first."""
        yield event.finding()

    def told(self, fact: Fact) -> tuple[Severity, str]:
        """Something not finite of which another operator made finite numbers again, and wrong ones."""
        then = f"{spelled(fact.hidden_by)} makes other numbers of it" if fact.hidden_by else "the script reads it"
        return "error", (
            f"{fact.name} ({fact.place.direction}) makes inf or nan of finite {fact.dtype} values where float32 is "
            f"finite, and {then}: no step is skipped for that"
        )

    def at_end(self, rank: Rank) -> Iterator[Finding]:
        """A step taken with non-finite values that could not be replayed; other errors would explain it."""
        taken = {step["step"]: step["bad"] for step in rank.steps if step["bad"] and not step["skipped"]}
        first = next((one for one in rank.many.get("unexplained", []) if one["step"] in taken), None)
        if first is None or any(finding.severity == "error" and finding.code != "PA101" for finding in rank.findings):
            return
        is_loss = first["what"] == "loss"
        yield self.finding(
            "error",
            f"the {'loss was' if is_loss else 'gradients were'} not finite and the step was taken; it could not be "
            "done again, so its origin is not known",
            "with torch.autograd.detect_anomaly():  # names the backward operator that makes the first NaN\n"
            "    loss.backward()",
            at=tuple(first["at"]),
            step=first["step"],
            direction="forward" if is_loss else "backward",
        )

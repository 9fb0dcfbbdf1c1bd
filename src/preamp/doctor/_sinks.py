"""Where records go besides the report: TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..formats import FP16
from ._magnitudes import rows_of


class TensorBoard:
    """A sink: loss, scale and skips as scalars, magnitudes as scalars and histograms, findings as text.

    `writer`: a `torch.utils.tensorboard.SummaryWriter`, or anything with its `add_scalar`, `add_histogram_raw` and
    `add_text`; it is not closed. Histograms are over powers of two: the bucket of exponent e is [2^e, 2^(e+1)), drawn
    at e, of magnitudes without the loss scale; zeros are left out.
    """

    def __init__(self, writer: Any, prefix: str = "preamp") -> None:
        for name in ("add_scalar", "add_histogram_raw", "add_text"):
            if not callable(getattr(writer, name, None)):
                raise TypeError(
                    f"TensorBoard() takes a torch.utils.tensorboard.SummaryWriter; a {type(writer).__name__} has no "
                    f"{name}()"
                )
        self._writer, self._prefix = writer, prefix
        self._skips = 0

    def write(self, kind: str, facts: Mapping[str, Any]) -> None:
        """One record."""
        if kind == "step":
            self._step(facts)
        elif kind == "telemetry":
            self._telemetry(facts)
        elif kind == "finding":
            where = f"{facts['file']}:{facts['line']}" if facts["file"] else facts["module"] or ""
            text = f"**{facts['severity']} {facts['code']}** {facts['message']}\n\n{where}\n\n    {facts['fix'] or ''}"
            self._writer.add_text(f"{self._prefix}/findings", text, facts["step"] or 0)

    def _step(self, facts: Mapping[str, Any]) -> None:
        step = facts["step"]
        self._skips += bool(facts["skipped"])
        for name in ("loss", "scale"):
            if isinstance(facts[name], (int, float)):  # JSON spells infinity and NaN as words
                self._writer.add_scalar(f"{self._prefix}/{name}", facts[name], step)
        self._writer.add_scalar(f"{self._prefix}/skipped", self._skips, step)

    def _telemetry(self, facts: Mapping[str, Any]) -> None:
        step = facts["step"]
        for row in rows_of(facts):
            tag = f"{row.kind}/{row.module or '(root)'}"
            used, true = row.in_backward, row.true
            below, room = used.flushed(FP16) + used.subnormal(FP16), used.headroom(FP16)
            self._writer.add_scalar(f"{self._prefix}/below float16/{tag}", below, step)
            if room is not None:
                self._writer.add_scalar(f"{self._prefix}/headroom/{tag}", room, step)
            if true.counts:
                exponents = range(true.first, true.first + len(true.counts))
                total = sum(e * n for e, n in zip(exponents, true.counts, strict=True))
                squares = sum(e * e * n for e, n in zip(exponents, true.counts, strict=True))
                self._writer.add_histogram_raw(
                    f"{self._prefix}/exponents/{tag}", min=exponents[0], max=exponents[-1] + 1, num=sum(true.counts),
                    sum=total, sum_squares=squares, bucket_limits=[e + 1 for e in exponents],
                    bucket_counts=list(true.counts), global_step=step,
                )  # fmt: skip

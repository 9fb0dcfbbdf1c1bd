"""A schedule that looks at the gradients' magnitudes, and moves the scale before anything overflows.

In powers of two, for true gradients g, over the last `window` good steps:

    limit = log2(65504 / max |g|)                 at 2**limit the largest gradient would just fit float16
    spare = log2(tolerance / share) / 2           within [0, reserve]; share: of non-zero gradients that are subnormal
    top   = floor(limit - max(headroom + spare, learned))
    base  = floor(limit - max(headroom + reserve, learned))

The scale rises to `base` when anything is subnormal in float16. Above, what it gains is weighed against the risk: it
goes on to `top`, one power of two a step, where the more is lost to underflow the less is kept free. It falls back to
`top` as soon as less than 0.1 of a power of two is left.

The weights' gradients do not show everything: activations' may overflow first. So `learned` is what overflows taught:
one at the scale 2**k makes it at least limit - k + 1, and it shrinks by one every `growth_interval` good steps. Bad
steps in a row lower the scale by 1, 2, 3, ... powers of two, or by 4, 5, 6, ... as long as no step was good. The next
good step tells the limit, and the scale goes back up to `base`: straight while no overflow contradicted the weights'
gradients, else by half of what is missing.

Window maxima for a scale are known from float8 training (NVIDIA's Transformer Engine calls it delayed scaling); that
zeros alone mislead, and subnormals do not, follows from the histograms of Micikevicius et al. 2018, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ScaleError, StateError
from ..formats import FP16
from ._checks import PATIENCE, check_count, check_number
from ._dynamic import Moving

if TYPE_CHECKING:
    from ..kernels import Reading

_LONGEST = 10_000
"""The largest `window`: limits are on the device, and every step reads all of them."""

_LIMIT = math.log2(FP16.max)

_BLIND = 16
"""While every gradient is 0, maybe flushed, the scale rises to 2**16, where others start; by _STRIDE a step."""
_STRIDE = 4

_MOST_LEARNED = 24.0
"""Bits of learned headroom: with more the largest gradient would lie below 2**-8, and most of the rest be flushed."""

_LEFT = 0.1
"""The scale falls when the largest gradient comes as near to float16's maximum as this, in powers of two."""

_MEMORY = 8
"""Steps over which the share of subnormal entries is averaged (exponentially)."""


class WindowScale(Moving):
    """A power of two chosen by the largest gradient of the last steps, before anything overflows.

    For float16. It needs a reading with statistics after each step (a session makes it; on CUDA the check for inf
    gives it for nothing); without one it backs off and grows as `DynamicScale` does, by factors of 2.

    `init_scale`: where it starts, a power of two; a bad guess costs a few steps. `window`: good steps whose largest
    gradient counts (>= 1). `headroom`: powers of two kept free above that gradient when the scale rises (>= 0).
    `reserve`: more of them, all while next to nothing is subnormal, none once `tolerance` (in (0, 1)) of the non-zero
    gradients is. `growth_interval`: good steps after which one power of two that an overflow taught is forgotten.
    `min_scale`, `max_scale`: bounds (None: the limits of float32). `patience`: skipped steps in a row after which the
    session raises `ScaleCollapse` (None: never). Raises `ScaleError` for anything out of range.
    """

    kind = "window"
    needs_statistics = True

    def __init__(
        self,
        init_scale: float = 2.0**16,
        window: int = 10,
        headroom: float = 0.75,
        reserve: float = 3.0,
        tolerance: float = 1e-4,
        growth_interval: int = 2000,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        patience: int | None = PATIENCE,
    ) -> None:
        super().__init__(init_scale, min_scale, max_scale, patience)
        if math.frexp(self._start)[0] != 0.5:
            below = 2.0 ** (math.frexp(self._start)[1] - 1)
            raise ScaleError(
                f"init_scale={init_scale!r}: this schedule moves in powers of two, which scale without rounding; "
                f"write {below!r} or {2 * below!r}"
            )
        self.window = check_count(window, "window", "it counts the steps whose largest gradient is remembered")
        if window > _LONGEST:
            raise ScaleError(f"window={window!r} is above {_LONGEST}: each of its steps is remembered, on the device")
        self.headroom = _in_range(headroom, "headroom", 0.0, 30.0, "it counts powers of two, of float16's 30")
        self.reserve = _in_range(reserve, "reserve", 0.0, 30.0, "it counts powers of two, of float16's 30")
        self.tolerance = _in_range(tolerance, "tolerance", 1e-12, 1.0, "it is a share of the non-zero gradients")
        self.growth_interval = check_count(growth_interval, "growth_interval", "it counts good steps")
        self._left = min(_LEFT, self.headroom)
        self._lowest = math.ceil(math.log2(self._floor))
        self._highest = math.floor(math.log2(self._ceiling))
        counts = {name: torch.zeros((), dtype=torch.int32, device="cpu") for name in ("good_steps", "bad_steps")}
        shares = {name: torch.zeros((), dtype=torch.float32, device="cpu") for name in ("learned", "subnormal")}
        self._state |= counts | shares
        self._state["places"] = torch.arange(window, dtype=torch.int32, device="cpu")  # the next to write is 0
        self._state["limits"] = torch.full((window,), math.inf, dtype=torch.float32, device="cpu")

    def after_step(self, found_inf: Tensor, reading: Reading | None = None) -> None:
        """Choose the next step's scale. Without a reading that has statistics: back off, or count a good step."""
        state = self._on(found_inf.device)
        bad = found_inf > 0
        exponent = (state["scale"].view(torch.int32) >> 23) - 127
        if reading is None or reading.amax is None or reading.subnormals is None or reading.zeros is None:
            wanted = self._without_reading(state, bad, exponent)
        else:
            there = [part.to(found_inf.device) for part in (reading.amax, reading.subnormals, reading.zeros)]
            wanted = self._with_reading(state, bad, exponent, reading.entries, *there)
        state["bad_steps"].copy_((state["bad_steps"] + 1) * bad)
        # The bits of a power of two, so that it is exact on every device.
        bits = (wanted.clamp(self._lowest, self._highest).to(torch.int32) + 127) << 23
        state["scale"].copy_(bits.view(torch.float32))

    def _without_reading(self, state: dict[str, Tensor], bad: Tensor, exponent: Tensor) -> Tensor:
        good = (state["good_steps"] + 1) * ~bad
        grows = good == self.growth_interval
        state["good_steps"].copy_(good * ~grows)
        return exponent - bad.int() + grows.int()

    def _with_reading(
        self, state: dict[str, Tensor], bad: Tensor, exponent: Tensor, entries: int,
        amax: Tensor, subnormals: Tensor, zeros: Tensor,
    ) -> Tensor:  # fmt: skip
        limits, places, learned, bad_steps = (state[name] for name in ("limits", "places", "learned", "bad_steps"))
        good = ~bad
        seen = (amax > 0) & (amax < math.inf) & good

        # What an overflow teaches. Only the first of several in a row: the others may come from the same bad data.
        known = limits.amin()  # infinite before the first good step
        informed = known < math.inf
        taught = bad & (bad_steps == 0) & informed
        kept = learned - good / self.growth_interval
        learned.copy_(torch.where(taught, torch.maximum(kept, known - exponent + 1), kept).clamp_(0.0, _MOST_LEARNED))

        # What a good step teaches.
        limits.copy_(torch.where(seen & (places == 0), _LIMIT + exponent - amax.log2(), limits))
        places.copy_((places - seen.int()) % self.window)
        limit = limits.amin()
        share = subnormals / (entries - zeros).clamp(min=1)
        average = torch.lerp(state["subnormal"], share, 1 / _MEMORY)
        spare = (0.5 * (self.tolerance / average).log2_()).clamp_(0.0, self.reserve)
        top = (limit - torch.maximum(learned, spare + self.headroom)).floor_()
        hold = (limit - learned.clamp(min=self.headroom) + (self.headroom - self._left)).floor_()
        base = (limit - learned.clamp(min=self.headroom + self.reserve)).floor_()

        gap = base - exponent
        rise = torch.where(learned > 0, (gap / 2).ceil_(), gap) * (subnormals > 0)
        up = exponent + torch.where(gap > 0, rise, exponent < top)
        after_good = torch.where(exponent > hold, top, up)
        blind = (exponent + _STRIDE).clamp_(max=_BLIND).maximum(exponent)
        after_bad = torch.minimum(top, exponent - bad_steps - (_STRIDE - (_STRIDE - 1) * informed.int()))
        wanted = torch.where(bad, after_bad, torch.where(seen, after_good, blind))
        state["subnormal"].copy_(average * (exponent - wanted).clamp_(max=0).exp2_())  # fewer at a larger scale
        state["good_steps"].mul_(good)
        return wanted

    def state_dict(self) -> dict[str, Any]:
        """Every field as plain numbers and lists; reads them from the device."""
        limits = self._state["limits"].tolist()
        oldest_first = sorted(zip(self._state["places"].tolist(), limits, strict=True))
        return {
            "kind": self.kind,
            "scale": float(self._state["scale"]),
            "good_steps": int(self._state["good_steps"]),
            "bad_steps": int(self._state["bad_steps"]),
            "learned": float(self._state["learned"]),
            "subnormal": float(self._state["subnormal"]),
            "limits": [limit for _, limit in oldest_first if limit != math.inf],
            **self._arguments(),
        }

    def _arguments(self) -> dict[str, Any]:
        names = ("window", "headroom", "reserve", "tolerance", "growth_interval")
        return {**{name: getattr(self, name) for name in names}, **super()._arguments()}

    def _from_state(self, state: Mapping[str, Any]) -> WindowScale:
        made = WindowScale(state["scale"], **{name: state[name] for name in self._arguments()})
        for name in ("good_steps", "bad_steps"):
            made._set_count(state, name)
        for name, most in (("learned", _MOST_LEARNED), ("subnormal", 1.0)):
            value = check_number(state[name], name)
            if not 0 <= value <= most:
                raise StateError(f"the checkpoint's window loss scale has {name}={value!r}, outside [0, {most:g}]")
            made._state[name].fill_(value)
        limits = state["limits"]
        if not isinstance(limits, list) or len(limits) > made.window:
            raise StateError(f"the checkpoint's window loss scale has limits={limits!r}: a list of up to {made.window}")
        for place, limit in enumerate(limits):
            made._state["limits"][place] = check_number(limit, "limits")
        made._state["places"].copy_((made._state["places"] - len(limits)) % made.window)
        return made


def _in_range(value: Any, name: str, low: float, high: float, why: str) -> float:
    number = check_number(value, name)
    if not low <= number < high:
        raise ScaleError(f"{name}={value!r} must lie in [{low:g}, {high:g}): {why}")
    return number

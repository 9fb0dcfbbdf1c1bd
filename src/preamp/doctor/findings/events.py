"""What happens in a training run, as values: `follow` and `lint` make them, findings are judged from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..records import Line
from ..shadow.facts import Fact

if TYPE_CHECKING:  # a report is made from records by a process that needs no torch
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from ...policy import Policy
    from ..handled import Handled
    from ..names import Names
    from ..operators import Products


class Examined(NamedTuple):
    """A model, its optimizer and a policy, before the first step; `products` of one forward pass, if there was one."""

    model: nn.Module
    optimizer: Optimizer | None
    policy: Policy
    products: Products | None


class FirstStep(NamedTuple):
    """An optimizer is about to step for the first time."""

    optimizer: Optimizer
    at: Line
    """Where it was made."""
    optimizers: Sequence[Optimizer]
    names: Names


class WithoutMasters(NamedTuple):
    """An optimizer steps the parameters themselves, and keeps no float32 copies of them."""

    optimizer: Optimizer
    at: Line
    names: Names


class RegionMade(NamedTuple):
    """A `torch.autocast` was made."""

    device_type: str
    dtype: torch.dtype | None
    requested: bool
    """Whether it was to be on."""
    enabled: bool
    """Whether it is."""
    is_preamps: bool
    at: Line


class ModuleCast(NamedTuple):
    """A module is cast to 16 bits by hand."""

    kind: str
    """Name of its class."""
    module: str | None
    op: str
    in_region: bool
    is_wrapper: bool
    """Whether it is a wrapper for parallel training."""
    at: Line


class WeightsChanged(NamedTuple):
    """A model runs again in an autocast region that keeps casts of weights, which were changed since."""

    changes: int
    at: Line


class RanInThread(NamedTuple):
    """A part of a model runs in another thread than the region that was entered for it."""

    module: str


class Recomputed(NamedTuple):
    """A forward pass is recomputed for the backward pass, with autocast for other dtypes than before."""

    module: str
    before: tuple[torch.dtype, ...]
    now: tuple[torch.dtype, ...]
    at: Line


class Prepared(NamedTuple):
    """Models of a session: the paths of their parts, and what its policy says."""

    paths: frozenset[str]
    compute: torch.dtype
    masters: bool


class Observed(NamedTuple):
    """All operators of a step's forward pass were observed, and some of its backward pass."""

    products: Products
    modules: Mapping[str, nn.Module]
    handled: Handled
    scale: float
    """On gradients that are still scaled."""
    prepared: Sequence[Prepared]


class LossNotScaled(NamedTuple):
    """A loss went back through float16 and nothing had scaled it."""

    scaler_at: Line
    """Where a scaler was made."""
    is_scaled_elsewhere: bool
    by_session: bool
    """Whether a session without a scale did it."""
    has_half_session: bool
    at: Line
    has_half_parameters: bool
    """Whether the parameters are float16 themselves: then their gradients are, and torch's scaler refuses those."""


Clipper = Literal["apex", "session"] | None
"""Whose loss scale is on the gradients: Apex's, a session's, or that of a scaler of torch's."""


class GradientsClipped(NamedTuple):
    """Gradients are clipped that are still multiplied by the loss scale."""

    op: str
    scale: float
    within: Clipper
    at: Line


class StepBegins(NamedTuple):
    """An optimizer is about to step, by way of a scaler or past it, with gradients that are not as they should be."""

    optimizer: str
    at: Line
    scale: float
    is_scaled: bool = False
    """Whether its gradients are still multiplied by the scale, and it steps past the scaler."""
    mixed: int = 0
    """How many gradients are a sum of scaled and unscaled ones."""
    factor: float | None = None
    """The factor by which the script itself multiplied the loss; it is still on the gradients."""
    is_again: bool = False
    """Whether a scaler has just stepped with the same gradients, or skipped them."""
    is_unguarded: bool = False
    """Whether gradients were unscaled, are not finite, and are stepped past the scaler."""
    updated_at: Line | None = None
    """Where the scale was updated since the backward pass."""


class Deviated(NamedTuple):
    """A result that is wrong although what went in is right; float32 would have got it right."""

    fact: Fact
    fix: str | None = None
    """What to write, tried."""
    tried: str | None = None
    """What happened when the step was done again with it, or why it was not."""

    @property
    def where(self) -> dict[str, Any]:
        """The place, as fields of a finding."""
        return self.fact.place.where(self.fact.name)

    @property
    def evidence(self) -> dict[str, Any]:
        """What was measured."""
        fact = self.fact
        words = {"made": "error of the result", "lost": "share lost to zero", "decided": "share that differs"}
        words["added up"] = "error of all gradients"
        found: dict[str, Any] = (
            {"dtype": fact.dtype, "shape": list(fact.shape)} if fact.shape else {"dtype": fact.dtype}
        )
        if fact.kind in words:
            found[words[fact.kind]] = float(f"{fact.error:.3g}")
        inputs = {"error of the inputs": float(f"{fact.inputs:.2g}"), "largest input": float(f"{fact.largest:.4g}")}
        return found | (inputs if fact.kind != "added up" else {}) | ({"tried": self.tried} if self.tried else {})


class BatchNotFinite(NamedTuple):
    """A step that was not finite cannot be replayed, and its input was not finite."""

    entries: Sequence[int]
    at: Line


class Raised(NamedTuple):
    """An error came up in a model, its loss, a scaler or the script."""

    kind: str
    text: str
    at: Line
    module: str | None = None

"""PA109: mixed precision asked for and not in effect."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Sequence

import torch

from ...formats import LOW_DTYPES, name_of
from ...report import Finding
from ..operators import Product
from ..records import NOWHERE, Line
from .check import Check, on
from .events import Examined, Observed, Prepared, RanInThread, RegionMade
from .pa111 import kept_full

_REMEMBERED = 20
_REGION = "with torch.autocast(x.device.type, dtype=torch.bfloat16): ..."


class PA109(Check):
    """Regions that torch has switched off, that another region overrules, or in which nothing ran in 16 bits."""

    def __init__(self) -> None:
        self._regions: list[RegionMade] = []
        self._foreign: dict[torch.dtype, Line] = {}
        """Dtypes of regions that are not preamp's, and where the first of each was made."""

    @on(RegionMade)
    def region_made(self, event: RegionMade) -> Iterator[Finding]:
        """One that this machine cannot have: torch warns, and goes on in float32."""
        if event.enabled and event.dtype is not None and not event.is_preamps:
            self._foreign.setdefault(event.dtype, event.at)
        self._regions = [*self._regions[-_REMEMBERED:], event]
        if event.requested and not event.enabled and event.at[0] is not None:
            seen = {"device type": event.device_type, "dtype": str(event.dtype), "CUDA": torch.cuda.is_available()}
            yield self.finding(
                "warning",
                f"autocast({event.device_type!r}) was asked for and torch has switched it off: this machine cannot, so "
                "everything inside runs in float32",
                _REGION,
                at=event.at,
                evidence=seen,
            )

    @on(RanInThread)
    def ran_in_thread(self, event: RanInThread) -> Iterator[Finding]:
        """Regions are a thread's own."""
        region = next((one for one in reversed(self._regions) if one.enabled), None)
        dtype, at = (None, NOWHERE) if region is None else (region.dtype, region.at)
        yield self.finding(
            "warning",
            f"{event.module or 'the model'} runs in another thread than the autocast region that was entered for it: "
            "autocast holds for its own thread only, so it ran in full precision",
            "with torch.autocast(...):  # inside the function that the threads run\n    return module(x)",
            module=event.module,
            direction="forward",
            at=at,
            evidence={"asked for": None if dtype is None else name_of(dtype)},
        )

    @on(Observed)
    def observed(self, event: Observed) -> Iterator[Finding]:
        """The dtypes in which products ran, against those asked for."""
        for prepared in event.prepared:
            yield from self._overruled(prepared, event.products.all)
        if event.products.flops and not event.products.low:
            outside = [one for one in event.prepared if one.compute in LOW_DTYPES]
            if outside and not any(region.is_preamps for region in self._regions):
                yield self._outside(outside[0], _names(event.products.all))
            else:
                yield from self._in_vain(_names(event.products.all))

    def _outside(self, prepared: Prepared, observed: list[str]) -> Finding:
        """A session that casts in its regions, and a loop that enters none."""
        return self.finding(
            "warning",
            f"the session was prepared to compute in {name_of(prepared.compute)}, and every matmul and conv ran in "
            f"{' and '.join(observed)}: the model is called outside of session.autocast()",
            "with session.autocast():  # around the forward pass and the loss\n    loss = loss_fn(model(x), y)",
            module=min(prepared.paths, key=len),
            direction="forward",
            evidence={"asked for": name_of(prepared.compute), "observed": observed},
        )

    def _overruled(self, prepared: Prepared, products: Sequence[Product]) -> Iterator[Finding]:
        """A region that is not the session's has its models compute in another dtype."""
        flops: dict[torch.dtype, float] = {}
        for product in products:
            if product.module in prepared.paths:
                flops[product.dtype] = flops.get(product.dtype, 0.0) + product.flops
        wanted, masters = prepared.compute, prepared.masters
        for dtype in sorted((flops.keys() & self._foreign.keys() & set(LOW_DTYPES)) - {wanted}, key=str):
            seen, share = name_of(dtype), flops[dtype] / sum(flops.values())
            level = {torch.float16: "O2" if masters else "O1"}.get(dtype, "O5" if masters else "O4")
            fix = (
                "# switch the framework's own mixed precision off: Accelerator(mixed_precision='no'), bf16=False, "
                "precision='32-true'"
            )
            file, line = self._foreign[dtype]
            if "autocast" in linecache.getline(file or "", line or 0):
                fix = "with session.autocast():  # in place of torch.autocast(...)"
            yield self.finding(
                "error" if dtype is torch.float16 else "warning",  # what was prepared for bfloat16 has no loss scale
                f"the session was prepared to compute in {name_of(wanted)}, and {share:.0%} of its products ran in "
                f"{seen}: an autocast region of {seen} that is not the session's lies around the model's call, and the "
                "innermost region decides",
                f"{fix}\n# or: session = preamp.prepare(model, optimizer, level={level!r})  # {seen}",
                module=min(prepared.paths, key=len),
                direction="forward",
                at=(file, line),
                evidence={"prepared for": name_of(wanted), "observed": seen},
            )

    def _in_vain(self, observed: list[str]) -> Iterator[Finding]:
        """Precision asked for, by a framework or for another device, and products that all ran in float32."""
        ran_in = " and ".join(observed)
        state = sys.modules.get("accelerate.state")
        shared = getattr(getattr(state, "AcceleratorState", None), "_shared_state", {}) if state else {}
        wanted = str(shared.get("_mixed_precision", "no"))
        if wanted in ("fp16", "bf16"):
            yield self.finding(
                "warning",
                f"Accelerate was asked for mixed_precision={wanted!r}, and every matmul and conv ran in {ran_in}: on "
                "this device it does nothing, and says nothing",
                "Accelerator(mixed_precision='bf16')  # on the CPU; float16 there only by preamp or torch.autocast",
                evidence={"asked for": wanted, "observed": observed},
            )
            return
        any_enabled = any(region.enabled for region in self._regions)
        for region in reversed(self._regions):
            if region.dtype not in LOW_DTYPES or region.at[0] is None or region.enabled is not any_enabled:
                continue
            evidence = {"asked for": name_of(region.dtype), "observed": observed}
            if any_enabled:
                message = (
                    f"autocast({region.device_type!r}, {region.dtype}) was entered, and every matmul and conv ran in "
                    f"{ran_in}"
                )
                yield self.finding("warning", message, _REGION, at=region.at, evidence=evidence)
            else:
                message = f"every autocast region for {region.dtype} has enabled=False: all of it runs in {ran_in}"
                fix = "with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=True): ..."
                yield self.finding("info", message, fix, at=region.at, evidence=evidence)
            return

    @on(Examined)
    def examined(self, event: Examined) -> Iterator[Finding]:
        """A 16-bit compute dtype, and no product in 16 bits among those that the policy does not keep full."""
        if event.products is None or event.policy.compute not in LOW_DTYPES:
            return
        products = [p for p in event.products.all if not kept_full(p.module or "", event.policy)]
        if not products or any(p.dtype in LOW_DTYPES for p in products):
            return
        worst, wanted, seen = max(products, key=lambda p: p.flops), name_of(event.policy.compute), _names(products)
        yield self.finding(
            "warning",
            f"the policy asks for {wanted}, and all {len(products)} kinds of matmul and conv ran in "
            f"{' and '.join(seen)}: the policy makes no regions, autocast was off where they ran, or rules keep them",
            "# remove torch.autocast(..., enabled=False) from the model's forward, and ops=none or rules 'full' from "
            "the policy; autocast leaves float64 alone: model.float()",
            module=worst.module,
            op=worst.op,
            direction="forward",
            at=worst.at,
            evidence={"asked for": wanted, "observed": seen},
        )


def _names(products: Sequence[Product]) -> list[str]:
    return sorted({name_of(product.dtype) for product in products})

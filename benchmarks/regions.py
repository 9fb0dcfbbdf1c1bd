"""The suites `regions` and `sessions`: what preamp's cost the host over torch's own, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preamp.autocast import autocast
from preamp.zoo.bert import Attention, Layer

from .harness import Row, Setting
from .race import Entry, race, without_rules
from .trainers import BF16, Contender, entry
from .works import Work

Region = Callable[..., Any]  # torch.autocast, or ours
InRegion = Callable[[Region], None]


class AttentionByHand(Attention):
    """Attention with its softmax written out, so that the rule for softmax is at work too."""

    softmax_dtype: torch.dtype | None = None

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Three times (N, heads, T, hidden / heads) to the same, once."""
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        mixed: Tensor = scores.softmax(-1, dtype=self.softmax_dtype) @ value
        return mixed


def transformer(layers: int = 12, width: int = 256, heads: int = 4, *, by_hand: bool = False) -> nn.Sequential:
    """A pre-norm encoder; `by_hand`: with `AttentionByHand`."""
    torch.manual_seed(0)
    encoder = [Layer(width, heads) for _ in range(layers)]
    for layer in encoder if by_hand else ():
        layer.attention = AttentionByHand(width, heads)
    return nn.Sequential(*encoder)


def _training(setting: Setting, *, by_hand: bool = False, same: bool = False) -> InRegion:
    """`same`: for torch the model itself asks for what preamp's rule does: the cost without the meaning."""
    layers, batch, device = 1 if setting.tiny else 12, 1 if setting.tiny else 4, setting.device
    model, x = transformer(layers, by_hand=by_hand).to(device), torch.randn(batch, 64, 256, device=device)

    def step(region: Region) -> None:
        AttentionByHand.softmax_dtype = torch.float32 if same and region is torch.autocast else None
        with region(device.type, dtype=BF16):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        model.zero_grad()

    return step


def _operator(call: Callable[[Tensor], Tensor], dtype: torch.dtype, setting: Setting, *, times: int = 200) -> InRegion:
    x = torch.randn(8, 8, device=setting.device, dtype=dtype)

    def repeat(region: Region) -> None:
        with region(setting.device.type, dtype=BF16):
            for _ in range(times):
                call(x)

    return repeat


MAKERS: dict[str, tuple[str, int, Callable[[Setting], InRegion]]] = {
    "transformer step": ("12 layers, width 256, batch 4 x 64, forward and backward", 3, _training),
    "transformer step, attention by hand": ("the same with its softmax written out, which torch leaves in bfloat16 on "
                                            "a CPU", 3, partial(_training, by_hand=True)),
    "transformer step, the same casts": ("attention by hand again; for torch the model itself asks for softmax in "
                                         "float32", 3, partial(_training, by_hand=True, same=True)),
    "empty region": ("enter and leave", 500, partial(_operator, F.gelu, BF16, times=0)),
    "unruled operator": ("200 x gelu of 8x8", 20, partial(_operator, F.gelu, BF16)),
    "low operator": ("200 x mm of 8x8", 20, partial(_operator, lambda x: x.mm(x), torch.float32)),
    "full operator": ("200 x softmax of 8x8", 20, partial(_operator, lambda x: x.softmax(-1), BF16)),
}  # fmt: skip
"""What is done in a region, how many times at once, and what makes the work."""


def region_rows(setting: Setting) -> Iterator[Row]:
    """A region of ours beside torch's, which has no rules of preamp in the dispatcher."""
    for name, (what, _, _) in MAKERS.items():
        yield Row(suite="regions", name=name, what=what, measure=partial(_measure, name), seconds=10)


def _measure(name: str, setting: Setting) -> dict[str, Any]:
    _, number, make = MAKERS[name]
    run = make(setting)
    entries = [
        Entry("torch.autocast", lambda _: partial(run, torch.autocast), without_rules, before=3, number=number),
        Entry("preamp.autocast", lambda _: partial(run, autocast), before=3, number=number),
    ]
    try:
        return {"contenders": race(entries, setting)}
    finally:
        autocast.uninstall()


def session_rows(setting: Setting) -> Iterator[Row]:
    """Whole training steps through a session against the same loop written for torch.amp."""
    work = Work(
        name="training step", what="4 layers, width 256, batch 4 x 64, AdamW(fused), clipping",
        build=lambda: transformer(1 if setting.tiny else 4),
        batch=lambda rng, count: (torch.randn(count, 64, 256, generator=rng, device=rng.device),) * 2,
        loss=lambda output, _: output.float().pow(2).mean(), count=4, optimizer="AdamW", clip=1.0,
    )  # fmt: skip
    contenders = [Contender(name="torch.amp", dtype=BF16)]
    for level in ("O4", "O5"):
        contenders.append(Contender(name=f"preamp {level}", level=level, torchs_optimizer=True))
        contenders.append(Contender(name=f"preamp {level}, preamp.optim", level=level))

    def measure(setting: Setting) -> dict[str, Any]:
        return {"contenders": race([entry(each, work, setting.device) for each in contenders], setting)}

    yield Row(suite="sessions", name=work.name, what=work.what, measure=measure, seconds=10)

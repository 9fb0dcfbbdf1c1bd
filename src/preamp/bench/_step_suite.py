"""The step suite: scaler and optimizer alone, without forward and backward, on lists of tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, ParameterList

from .. import optim
from ..scaling import DynamicScale, GradScaler
from ..session import prepare
from ._counting import count, counted_launches
from ._race import race, race_row
from ._results import EVERYTHING, Missing, Row, failure

Step = Callable[[], None]

WHAT = "scaler.step and update"


def bert_shapes(layers: int, width: int) -> list[tuple[int, ...]]:
    """The parameter tensors of a BERT encoder with its masked-language head (Devlin et al. 2019)."""
    vocabulary, positions = 30522, 512
    shapes: list[tuple[int, ...]] = [(vocabulary, width), (positions, width), (2, width), (width,), (width,)]
    for _ in range(layers):
        shapes += [(width, width), (width,)] * 4 + [(width,)] * 4
        shapes += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [*shapes, (width, width), (width,), (width,), (width,), (vocabulary,)]


LISTS: dict[str, tuple[list[tuple[int, ...]], int]] = {
    "150 x 1k": ([(25, 40)] * 150, 20),
    "1500 x 1k": ([(25, 40)] * 1500, 4),
    "150 x 100k": ([(250, 400)] * 150, 3),
    "1500 x 100k": ([(250, 400)] * 1500, 1),
    "BERT-base": (bert_shapes(12, 768), 1),
    "BERT-large": (bert_shapes(24, 1024), 1),
}
"""Shapes, and how many steps are timed at once."""

TINY: dict[str, tuple[list[tuple[int, ...]], int]] = {"8 x 60": ([(6, 10)] * 8, 20)}
"""In their place where it is to be seen that a suite works."""

KINDS: dict[str, dict[str, Any]] = {"Adam": {"lr": 1e-9}, "SGD": {"lr": 1e-9, "momentum": 0.9}}

LARGEST_ON_CPU = 200_000_000
"""Lists with more entries are left to accelerators: contenders' states would not fit a small machine."""


def step(
    device: torch.device, rounds: int, tell: Callable[[str], None], *,
    size: str | None = None, missing: Missing = EVERYTHING,
) -> Iterator[Row]:  # fmt: skip
    """`scaler.step(optimizer); scaler.update()`, torch's and ours, and the same for 16-bit parameters with masters."""
    lists = TINY if size == "tiny" else LISTS
    works = _works(device, rounds, lists).items()
    for place, (name, (make, few, number)) in missing.numbered(works, lambda work: work[0]):
        tell(f"{name} ({place})")
        try:
            yield _row(name, make(), few, number, device)
        except Exception as error:  # the rows that follow are as good as without it
            yield Row(name=name, what=WHAT, about={"error": failure(name, error, tell)})
        gc.collect()


def _works(
    device: torch.device, rounds: int, lists: Mapping[str, tuple[list[tuple[int, ...]], int]]
) -> dict[str, tuple[Callable[[], dict[str, Step]], int, int]]:
    """By name, what makes the contenders, how many rounds they have, and how many steps are timed at once."""
    found: dict[str, tuple[Callable[[], dict[str, Step]], int, int]] = {}
    for kind, arguments in KINDS.items():
        for name, (shapes, number) in lists.items():
            entries = sum(torch.Size(shape).numel() for shape in shapes)
            if device.type == "cpu" and entries > LARGEST_ON_CPU:
                continue
            few = max(rounds // 2, 3) if device.type == "cpu" and entries > 50_000_000 else rounds
            given = (kind, arguments, shapes, device)
            found[f"{kind}, {name}"] = (partial(_float32, *given), few, number)
            if (kind == "Adam" and entries <= 20_000_000) or device.type == "cuda":
                found[f"{kind}, {name}, 16-bit parameters"] = (partial(_low, *given), few, number)
    return found


def _row(name: str, contenders: Mapping[str, Step], rounds: int, number: int, device: torch.device) -> Row:
    for contender in contenders.values():  # states are made, lists are cached
        contender()
        contender()
    counts = {who: {**count(work).to_dict(), **counted_launches(work)} for who, work in contenders.items()}
    return race_row(name, WHAT, race(contenders, rounds=rounds, number=number, device=device), counts)


def _leaves(shapes: list[tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> list[Parameter]:
    """Parameters with gradients, which the contenders of a row share: each has states of its own only."""
    torch.manual_seed(0)
    leaves = []
    for shape in shapes:
        leaf = Parameter(torch.randn(shape, device=device, dtype=dtype) * 0.02)
        leaf.grad = torch.randn_like(leaf) * 1e-3
        leaves.append(leaf)
    return leaves


def _float32(
    kind: str, arguments: dict[str, Any], shapes: list[tuple[int, ...]], device: torch.device
) -> dict[str, Step]:
    leaves = _leaves(shapes, device, torch.float32)
    # preamp keeps records of parameters, which two optimizers must not share
    stepped, prepared = _leaves(shapes, device, torch.float32), _leaves(shapes, device, torch.float32)
    of_torch, ours = getattr(torch.optim, kind), getattr(optim, kind)
    return {
        "GradScaler + fused": _scaled(torch.amp.GradScaler, of_torch(leaves, fused=True, **arguments), device),
        "GradScaler + foreach": _scaled(torch.amp.GradScaler, of_torch(leaves, foreach=True, **arguments), device),
        "preamp.GradScaler + fused": _scaled(GradScaler, of_torch(leaves, fused=True, **arguments), device),
        "preamp.GradScaler + preamp.optim": _scaled(GradScaler, ours(stepped, **arguments), device),
        "Session + preamp.optim": _in_session(ours(prepared, **arguments), prepared, device),
    }


def _in_session(optimizer: torch.optim.Optimizer, leaves: list[Parameter], device: torch.device) -> Step:
    """The same by a session, which tells the norm of the gradients too. Its backward pass is that of one number."""
    session = prepare(ParameterList(leaves), optimizer, policy="O0", scale=DynamicScale(1.0))
    loss = torch.zeros((), device=device, requires_grad=True)

    def go() -> None:
        session.backward(loss * 1.0)
        session.step()

    return go


def _low(kind: str, arguments: dict[str, Any], shapes: list[tuple[int, ...]], device: torch.device) -> dict[str, Step]:
    """Master weights by hand with torch.amp, the way O2 was written for Apex, against one call of ours."""
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    leaves = _leaves(shapes, device, dtype)
    masters = [Parameter(leaf.detach().float()) for leaf in leaves]
    inner = _scaled(torch.amp.GradScaler, getattr(torch.optim, kind)(masters, fused=True, **arguments), device)

    @torch.no_grad()
    def by_hand() -> None:
        for leaf, master in zip(leaves, masters, strict=True):
            master.grad = leaf.grad.float() if leaf.grad is not None else None
        inner()
        torch._foreach_copy_(list[Tensor](leaves), list[Tensor](masters))

    twins = _leaves(shapes, device, dtype)
    ours = _scaled(GradScaler, getattr(optim, kind)(twins, **arguments), device)
    return {"masters by hand": by_hand, "preamp.GradScaler + preamp.optim": ours}


def _scaled(kind: type[torch.amp.GradScaler], optimizer: torch.optim.Optimizer, device: torch.device) -> Step:
    scaler = kind(device.type, init_scale=1.0)  # gradients are unscaled in place by some, and must not shrink
    scaler.scale(torch.zeros((), device=device))

    def go() -> None:
        scaler.step(optimizer)
        scaler.update()

    return go

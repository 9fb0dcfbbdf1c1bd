"""Operators whose rule torch's own autocast does not follow on CUDA, though its table says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import preamp

pytestmark = pytest.mark.gpu

LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def logits(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (4 * torch.randn(shape, generator=generator)).bfloat16().half().to("cuda")


def classes(*shape: int) -> Tensor:
    return torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(4)).to("cuda")


LOSSES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "classes": ((5, 7), lambda x: F.cross_entropy(x, classes(5))),
    "one": ((7,), lambda x: F.cross_entropy(x, classes(1)[0])),
    "pixels": ((2, 7, 3, 4), lambda x: F.cross_entropy(x, classes(2, 3, 4), reduction="none")),
    "weights": ((5, 7), lambda x: F.cross_entropy(x, classes(5), torch.arange(1.0, 8.0, device="cuda"))),
    "16-bit weights": ((5, 7), lambda x: F.cross_entropy(x, classes(5), torch.arange(1, 8, device="cuda").to(x))),
    "left out": ((5, 7), lambda x: F.cross_entropy(x, classes(5), ignore_index=2, reduction="sum")),
    "smoothed": ((5, 7), lambda x: F.cross_entropy(x, classes(5), label_smoothing=0.1)),
    "probabilities": ((5, 7), lambda x: F.cross_entropy(x, torch.full((5, 7), 1 / 7, device="cuda"))),
    "no rows": ((0, 7), lambda x: F.cross_entropy(x, classes(0), reduction="sum")),
    "module": ((5, 7), lambda x: torch.nn.CrossEntropyLoss()(x, classes(5))),
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", LOSSES)
def test_cross_entropy_is_float32(name: str, low: str) -> None:
    """Of the same logits in float32; log-probabilities in 16 bits would be on a grid of 2**-7 or 2**-4 around 10."""
    shape, loss = LOSSES[name]
    x = logits(*shape).to(LOW[low])
    given, wide = x.clone().requires_grad_(), x.float().requires_grad_()
    with preamp.autocast("cuda", dtype=LOW[low]):
        result = loss(given)
    wanted = loss(wide)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)
    result.sum().backward()
    wanted.sum().backward()
    assert given.grad is not None and wide.grad is not None
    close = 2 * torch.finfo(LOW[low]).eps  # a unit in the last place, since kernels may add in another order
    torch.testing.assert_close(given.grad.float(), wide.grad, rtol=close, atol=1e-6)


def test_torchs_own_region_stays_as_it_is() -> None:
    x = logits(64, 7)
    with preamp.autocast("cuda", dtype=torch.float16):
        ours = F.cross_entropy(x, classes(64), reduction="none")
    with torch.autocast("cuda", dtype=torch.float16):
        theirs = F.cross_entropy(x, classes(64), reduction="none")
    assert torch.equal(theirs, theirs.half().float())
    assert not torch.equal(ours, ours.half().float())


@pytest.mark.parametrize("low", LOW)
def test_wrong_targets_are_refused_as_in_float32(low: str) -> None:
    x = logits(5, 7)
    for target in (classes(5, 7), classes(4), torch.ones(5, device="cuda")):
        messages = []
        for value in (x.float(), x.to(LOW[low])):
            with preamp.autocast("cuda", dtype=LOW[low]), pytest.raises((RuntimeError, ValueError)) as raised:
                F.cross_entropy(value, target)
            messages.append(type(raised.value))
        assert messages[0] is messages[1]

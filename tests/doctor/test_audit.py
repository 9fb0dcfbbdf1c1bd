"""What is told of a run: dtypes, shapes, tensor cores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import preamp
from tests.doctor._kept import Kept


class Net(nn.Module):
    """A convolution, a grouped one, a recurrent layer and two linear layers, the second not a multiple of eight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.depth = nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3, groups=16)
        self.rnn = nn.LSTM(16, 24, batch_first=True)
        self.even, self.odd = nn.Linear(24, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        images = self.depth(self.conv(x)).mean(-1).transpose(1, 2)
        return self.odd(self.even(self.rnn(images)[0].mean(1)))


def watched(low: torch.dtype | None, steps: int = 1) -> tuple[dict[str, Any], Net]:
    torch.manual_seed(0)
    net, kept = Net(), Kept()
    optimizer = torch.optim.AdamW(net.parameters())
    with preamp.doctor.watch(net, every=1, sinks=[kept]):
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
                loss = net(torch.randn(4, 8, 12, 12)).float().square().mean()
            loss.backward()
            optimizer.step()
    return last(kept), net


def last(kept: Kept) -> dict[str, Any]:
    return dict(kept.records)


def test_flops_and_their_share_in_16_bits() -> None:
    facts, _ = watched(torch.bfloat16)
    flops = {  # by hand: 2 for each weight and each place that it meets
        "conv": 2 * (16 * 8 * 9) * 4 * 10 * 10, "depth": 2 * (16 * 9) * 4 * 8 * 8,
        "rnn": 2 * (96 * 16 + 96 * 24) * 4 * 8, "even": 2 * 24 * 32 * 4, "odd": 2 * 32 * 10 * 4,
    }  # fmt: skip
    assert facts["audit"]["flops"] == sum(flops.values())
    assert (facts["audit"]["low_share"], facts["audit"]["low"]) == (1, ["bfloat16"])
    full, _ = watched(None)
    assert (full["audit"]["low_share"], full["audit"]["low"]) == (0, [])

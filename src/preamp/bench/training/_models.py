"""The networks that the zoo does not have: a plain feed-forward one, ResNet-50, and a decoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ...zoo.bert import Layer, Shape, waves


def feed_forward(width: int, layers: int = 5) -> nn.Sequential:
    """`layers` times Linear and ReLU at one width, and one output: (N, width) to (N, 1)."""
    hidden: list[nn.Module] = []
    for _ in range(layers):
        hidden += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, 1))


class _Bottleneck(nn.Module):
    """1x1, 3x3 (which has the stride), 1x1 to four times the width, beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.narrow = _conv(inputs, width, 1)
        self.look = _conv(width, width, 3, stride)
        self.widen = _conv(width, outputs, 1)
        same = stride == 1 and inputs == outputs
        self.shortcut: nn.Module = nn.Identity() if same else _conv(inputs, outputs, 1, stride)
        norm = self.widen[1]
        assert isinstance(norm, nn.BatchNorm2d)
        nn.init.zeros_(norm.weight)  # a block begins as its shortcut (Goyal et al. 2017)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, 4 * width, H / stride, W / stride)."""
        inner = self.widen(F.relu(self.look(F.relu(self.narrow(x)))))
        return F.relu(inner + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet with bottlenecks (He et al. 2016), the stride in the 3x3 convolution: (N, 3, H, W) to (N, classes).

    `blocks`: how many in each of the four stages, whose width doubles from `base` on; (3, 4, 6, 3) with base 64 and
    1000 classes is ResNet-50.
    """

    def __init__(self, blocks: Sequence[int] = (3, 4, 6, 3), base: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = _conv(3, base, 7, 2)
        stages: list[nn.Module] = []
        channels = base
        for stage, count in enumerate(blocks):
            width = base * 2**stage
            for block in range(count):
                stages.append(_Bottleneck(channels, width, 2 if block == 0 and stage > 0 else 1))
                channels = 4 * width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes)."""
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)
        logits: Tensor = self.head(self.stages(x).mean((2, 3)))
        return logits


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Gpt(nn.Module):
    """A decoder with norms before each block (Radford et al. 2019): int64 ids (N, T) to logits (N, T, vocabulary).

    What stands at a position says what comes next. The output layer shares the embedding's weight; no dropout.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.pieces = nn.Embedding(shape.vocabulary, hidden)
        self.positions = nn.Parameter(waves(shape.positions, hidden))
        self.layers = nn.Sequential(*(Layer(hidden, shape.heads, causal=True) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(hidden)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=hidden**-0.5 / 2)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (N, T, vocabulary)."""
        x = self.norm(self.layers(self.pieces(ids) + self.positions[: ids.shape[1]]))
        return F.linear(x, self.pieces.weight)

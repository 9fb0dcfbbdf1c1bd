"""What is trained: networks, most of them the zoo's, with synthetic data that is made on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preamp.zoo.bert import IGNORED, Attention, Bert, Shape
from preamp.zoo.seresnext import SHAPES, SEResNeXt
from preamp.zoo.seresnext import Shape as ImageShape
from preamp.zoo.unet import UNet

Batch = tuple[Tensor, Tensor]
MakeBatch = Callable[[torch.Generator, int], Batch]  # on the generator's device, of so many samples


@dataclass(frozen=True, kw_only=True)
class Work:
    """A network, its data and its optimizer, a name in `torch.optim` and `preamp.optim`."""

    name: str
    what: str
    build: Callable[[], nn.Module]
    batch: MakeBatch
    loss: Callable[[Tensor, Tensor], Tensor]
    count: int  # samples a batch
    apart: int = 0  # the step between the batches that are tried in memory; 0: the network is another work's
    optimizer: str = "Adam"
    lr: float = 1e-3
    clip: float | None = None
    images: bool = False  # which may lie channels last

    def model(self, device: torch.device, seed: int = 0) -> nn.Module:
        """The network with weights of a seed, made on the device."""
        torch.manual_seed(seed)
        with torch.device(device):
            return self.build()

    def data(self, device: torch.device, index: int, seed: int = 0, count: int | None = None) -> Batch:
        """Batch number `index`: the same for every contender."""
        generator = torch.Generator(device).manual_seed(1_000_003 * (seed + 1) + index)
        return self.batch(generator, count or self.count)


def decoder(shape: Shape) -> Bert:
    """A network of BERT's layers in which each position sees those before it, as a GPT's does."""
    model = Bert(shape)
    for module in model.modules():
        if isinstance(module, Attention):
            module.mix = partial(F.scaled_dot_product_attention, is_causal=True)  # type: ignore[method-assign]
    return model


def feed_forward(width: int, layers: int = 5) -> nn.Sequential:
    """`layers` times Linear and ReLU at one width, and one output: (N, width) to (N, 1)."""
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 1))


# -- data: learnable, so that runs of two precisions can be compared by where they arrive


def _rows(width: int) -> MakeBatch:
    def make(generator: torch.Generator, count: int) -> Batch:
        x = torch.randn(count, width, generator=generator, device=generator.device)
        return x, (x[:, :1] * x[:, 1:2] + x[:, 2:3].abs()).detach()

    return make


def _below(limit: int, generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(limit, shape, generator=generator, device=generator.device)


def _text(vocabulary: int, length: int, causal: bool) -> MakeBatch:
    """Sequences that count up in steps of their own, some pieces at random; the next piece is asked for at each
    position, or one in seven that is masked.
    """
    used, mask = min(vocabulary - 1, 512), vocabulary - 1

    def make(generator: torch.Generator, count: int) -> Batch:
        long = length + causal
        start, stride = _below(used, generator, count, 1), _below(8, generator, count, 1) + 1
        ids = (start + stride * torch.arange(long, device=generator.device)) % used
        odd = _below(20, generator, count, long) == 0
        ids = torch.where(odd, _below(used, generator, count, long), ids)
        if causal:
            return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        asked = _below(7, generator, count, length) == 0
        return torch.where(asked, mask, ids), torch.where(asked, ids, IGNORED)

    return make


def _scenes(side: int) -> MakeBatch:
    """Noise with a brighter disc in it, and the disc as the mask."""

    def make(generator: torch.Generator, count: int) -> Batch:
        device = generator.device
        x = torch.randn(count, 3, side, side, generator=generator, device=device)
        place = torch.rand(count, 3, 1, 1, generator=generator, device=device)
        axis = torch.linspace(0, 1, side, device=device)
        distance = (axis[:, None] - place[:, :1]) ** 2 + (axis - place[:, 1:2]) ** 2
        inside = (distance < (0.1 + 0.2 * place[:, 2:]) ** 2).float()
        return x + inside, inside

    return make


def _pictures(side: int, classes: int) -> MakeBatch:
    def make(generator: torch.Generator, count: int) -> Batch:
        target = _below(classes, generator, count)
        x = torch.randn(count, 3, side, side, generator=generator, device=generator.device)
        return x + (target / classes)[:, None, None, None], target

    return make


# -- the works


def _transformer(name: str, shape: Shape, count: int, apart: int = 0, *, causal: bool = False) -> Work:
    return Work(
        name=name, what=f"{shape.layers} layers, width {shape.hidden}, batch {count} x {shape.length}, AdamW, clipping",
        build=lambda: decoder(shape) if causal else Bert(shape), batch=_text(shape.vocabulary, shape.length, causal),
        loss=lambda logits, y: F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), ignore_index=IGNORED),
        count=count, apart=apart, optimizer="AdamW", lr=1e-4, clip=1.0,
    )  # fmt: skip


def _images(name: str, shape: ImageShape, side: int, count: int, apart: int, clip: float | None = None) -> Work:
    return Work(
        name=name, what=f"{count} x 3 x {side} x {side}, SGD with momentum", build=lambda: SEResNeXt(shape),
        batch=_pictures(side, shape.classes), loss=lambda logits, y: F.cross_entropy(logits.float(), y),
        count=count, apart=apart, optimizer="SGD", lr=0.05, clip=clip, images=True,
    )  # fmt: skip


def _shape(hidden: int, layers: int, heads: int, length: int, vocabulary: int = 30522) -> Shape:
    positions = max(length, 512 if vocabulary > 1000 else 16)
    return Shape(
        vocabulary=vocabulary, pieces=vocabulary, hidden=hidden, layers=layers, heads=heads, positions=positions,
        length=length,
    )  # fmt: skip


def works(tiny: bool = False) -> dict[str, Work]:
    """The works by name, in their real sizes or `tiny`, for a test of the harness itself."""
    full = not tiny
    base = _shape(768, 12, 12, 128) if full else _shape(32, 1, 2, 16, 61)
    large = _shape(1024, 24, 16, 512) if full else _shape(48, 2, 3, 16, 61)
    gpt = _shape(2048, 4, 16, 1024, 50304) if full else _shape(64, 1, 2, 16, 64)
    width, rows = (512, 1024) if full else (32, 16)
    channels, levels, side, images = (32, 5, 256, 16) if full else (4, 2, 16, 2)
    square, pictures, grouped = (224, 128, 64) if full else (32, 2, 2)
    gated = SHAPES["full"] if full else replace(SHAPES["full"], blocks=(1, 1), width=16, first=8, groups=4)
    plain = replace(gated, width=64, first=64) if full else replace(gated, width=4, first=4, classes=10)
    every = (
        Work(
            name="feed-forward", what=f"5 layers of width {width}, batch {rows}, Adam",
            build=lambda: feed_forward(width), batch=_rows(width), count=rows, apart=2**17,
            loss=lambda output, target: F.mse_loss(output.float(), target),
        ),
        _transformer("BERT-base b4", base, 4 if full else 1),
        _transformer("BERT-base b32", base, 32 if full else 2, 32),
        _transformer("BERT-large b16", large, 16 if full else 2, 4),
        _transformer("GPT-2048 b4", gpt, 4 if full else 2, 2, causal=True),
        Work(
            name="UNet", what=f"base {channels}, {levels} levels, {images} x 3 x {side} x {side}, Adam",
            build=lambda: UNet(channels=3, base=channels, levels=levels), batch=_scenes(side),
            loss=lambda logits, target: F.binary_cross_entropy_with_logits(logits.float(), target),
            count=images, apart=16, images=True,
        ),
        _images("ResNet-50", replace(plain, expansion=4, groups=1, gated=False), square, pictures, 64),
        _images("SE-ResNeXt-50", gated, square, grouped, 32, clip=1.0),
    )  # fmt: skip
    return {work.name: work for work in every}

"""What is trained: networks with synthetic data of a fixed seed, made on the device, and how each is optimized.

Most are those of the zoo; a decoder and a feed-forward network are added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ...zoo.bert import IGNORED, Bert, Layer, Shape, waves
from ...zoo.seresnext import SHAPES, SEResNeXt
from ...zoo.unet import UNet

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A network, its data and its optimizer. `batch(generator, count)` makes inputs and targets on its device."""

    name: str
    what: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    count: int
    """Samples a batch."""
    optimizer: str = "Adam"
    """A name in `torch.optim` and `preamp.optim`."""
    lr: float = 1e-3
    clip: float | None = None
    images: bool = False
    """Whether inputs are images, which may lie channels last."""
    deeper: Callable[[int], Work] | None = None
    """The same with so many layers, where it is made of equal ones."""

    def model(self, device: torch.device, seed: int = 0) -> nn.Module:
        """The network with weights of a seed, made on the device."""
        torch.manual_seed(seed)
        with torch.device(device):
            return self.build()

    def data(self, device: torch.device, index: int, seed: int = 0, count: int | None = None) -> Batch:
        """Batch number `index`: the same for every contender."""
        generator = torch.Generator(device).manual_seed(1_000_003 * (seed + 1) + index)
        return self.batch(generator, count or self.count)

    @property
    def parameters(self) -> int:
        """Entries of all parameters."""
        return sum(p.numel() for p in _on_meta(self).parameters())

    def flop(self) -> int:
        """Floating-point operations of matrix products and convolutions in one step, forward and backward."""
        return _flop(self)


@lru_cache(maxsize=16)
def _on_meta(work: Work) -> nn.Module:
    return work.model(torch.device("meta"))


@lru_cache(maxsize=16)
def _flop(work: Work) -> int:
    """Counted on the meta device, where nothing is computed; the inputs are those of a real batch of one sample."""
    x, y = (t.to("meta") for t in work.data(torch.device("cpu"), 0, count=1))
    counter = FlopCounterMode(display=False)
    model = work.model(torch.device("meta"))
    with counter:
        work.loss(model(x), y).backward()
    return counter.get_total_flops() * work.count


# -- networks that the zoo does not have


def feed_forward(width: int, layers: int = 5) -> nn.Sequential:
    """`layers` times Linear and ReLU at one width, and one output: (N, width) to (N, 1)."""
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 1))


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


# -- data: learnable, so that runs of two precisions can be compared by where they arrive


def _rows(width: int) -> Callable[[torch.Generator, int], Batch]:
    def make(generator: torch.Generator, count: int) -> Batch:
        x = torch.randn(count, width, generator=generator, device=generator.device)
        return x, (x[:, :1] * x[:, 1:2] + x[:, 2:3].abs()).detach()

    return make


def _below(limit: int, generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(limit, shape, generator=generator, device=generator.device)


def _counting(generator: torch.Generator, count: int, length: int, used: int) -> Tensor:
    """Sequences that count up in steps of their own, some pieces at random: int64 (count, length) below `used`."""
    start, stride = _below(used, generator, count, 1), _below(8, generator, count, 1) + 1
    ids = (start + stride * torch.arange(length, device=generator.device)) % used
    odd = _below(20, generator, count, length) == 0
    return torch.where(odd, _below(used, generator, count, length), ids)


def _masked_text(vocabulary: int, length: int) -> Callable[[torch.Generator, int], Batch]:
    """One piece in seven is masked and asked for."""
    used, mask = min(vocabulary - 1, 512), vocabulary - 1

    def make(generator: torch.Generator, count: int) -> Batch:
        ids = _counting(generator, count, length, used)
        asked = _below(7, generator, count, length) == 0
        return torch.where(asked, mask, ids), torch.where(asked, ids, IGNORED)

    return make


def _next_text(vocabulary: int, length: int) -> Callable[[torch.Generator, int], Batch]:
    """At each position the next piece is asked for."""

    def make(generator: torch.Generator, count: int) -> Batch:
        ids = _counting(generator, count, length + 1, min(vocabulary, 512))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return make


def _scenes(side: int) -> Callable[[torch.Generator, int], Batch]:
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


def _pictures(side: int, classes: int) -> Callable[[torch.Generator, int], Batch]:
    def make(generator: torch.Generator, count: int) -> Batch:
        device = generator.device
        target = torch.randint(classes, (count,), generator=generator, device=device)
        x = torch.randn(count, 3, side, side, generator=generator, device=device)
        return x + (target / classes)[:, None, None, None], target

    return make


def _text_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), ignore_index=IGNORED)


def _class_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


# -- the works


def _transformer(name: str, shape: Shape, count: int, *, causal: bool = False) -> Work:
    """BERT, or if `causal` a GPT."""
    text = _next_text if causal else _masked_text
    return Work(
        name=name, what=f"{shape.layers} layers, width {shape.hidden}, batch {count} x {shape.length}, AdamW, clipping",
        build=lambda: Gpt(shape) if causal else Bert(shape), batch=text(shape.vocabulary, shape.length),
        loss=_text_loss, count=count, optimizer="AdamW", lr=1e-4, clip=1.0,
        deeper=lambda layers: _transformer(name, replace(shape, layers=layers), count, causal=causal),
    )  # fmt: skip


def _shape(hidden: int, layers: int, heads: int, length: int, vocabulary: int = 30522) -> Shape:
    return Shape(
        vocabulary=vocabulary, pieces=vocabulary, hidden=hidden, layers=layers, heads=heads,
        positions=max(length, 512 if vocabulary > 1000 else 16), length=length,
    )  # fmt: skip


def works(size: str) -> dict[str, Work]:
    """The works by key, "full" as the protocol has them or "tiny" for a test of the suite itself."""
    full = size == "full"
    base = _shape(768, 12, 12, 128) if full else _shape(32, 1, 2, 16, 61)
    large = _shape(1024, 24, 16, 512) if full else _shape(48, 2, 3, 16, 61)
    decoder = _shape(2048, 4, 16, 1024, 50304) if full else _shape(64, 1, 2, 16, 64)
    width, rows = (512, 1024) if full else (32, 16)
    channels, levels, side, images = (32, 5, 256, 16) if full else (4, 2, 16, 2)
    square, classes, pictures, grouped = (224, 1000, 128, 64) if full else (32, 10, 2, 2)
    gated = SHAPES["full"] if full else replace(SHAPES["full"], blocks=(1, 1), width=16, first=8, groups=4)
    plain = replace(gated, width=64, first=64) if full else replace(gated, width=4, first=4, classes=classes)
    resnet = replace(plain, expansion=4, groups=1, gated=False)
    return {
        "feed-forward": Work(
            name="feed-forward", what=f"5 layers of width {width}, batch {rows}, Adam",
            build=lambda: feed_forward(width), batch=_rows(width), count=rows,
            loss=lambda output, target: F.mse_loss(output.float(), target),
        ),
        "bert-base b4": _transformer("BERT-base b4", base, 4 if full else 1),
        "bert-base b32": _transformer("BERT-base b32", base, 32 if full else 2),
        "bert-large": _transformer("BERT-large b16", large, 16 if full else 2),
        "gpt": _transformer("GPT-2048 b4", decoder, 4 if full else 2, causal=True),
        "unet": Work(
            name="UNet", what=f"base {channels}, {levels} levels, {images} x 3 x {side} x {side}, Adam",
            build=lambda: UNet(channels=3, base=channels, levels=levels), batch=_scenes(side),
            loss=lambda logits, target: F.binary_cross_entropy_with_logits(logits.float(), target),
            count=images, images=True,
        ),
        "resnet": Work(
            name="ResNet-50", what=f"{pictures} x 3 x {square} x {square}, SGD with momentum",
            build=lambda: SEResNeXt(resnet), batch=_pictures(square, classes), loss=_class_loss,
            count=pictures, optimizer="SGD", lr=0.05, images=True,
        ),
        "se-resnext": Work(
            name="SE-ResNeXt-50", what=f"32x4d, {grouped} x 3 x {square} x {square}, SGD with momentum",
            build=lambda: SEResNeXt(gated), batch=_pictures(square, classes), loss=_class_loss,
            count=grouped, optimizer="SGD", lr=0.05, clip=1.0, images=True,
        ),
    }  # fmt: skip

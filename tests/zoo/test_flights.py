"""Flights: nothing known only after departure, whole days held out, and AUC against its definition."""

from __future__ import annotations

import pandas
import pytest
import torch

from preamp.zoo import flights as data
from preamp.zoo.flights import auc

AFTER_DEPARTURE = {"dep_time", "dep_delay", "arr_time", "arr_delay", "air_time", "tailnum"}


def brute_force_auc(scores, labels):
    positive, negative = scores[labels == 1], scores[labels == 0]
    difference = positive[:, None] - negative[None, :]
    return ((difference > 0).double() + 0.5 * (difference == 0).double()).mean().item()


@pytest.mark.parametrize("levels", [2, 7, 10_000])
def test_auc_is_the_share_of_pairs_in_order(levels):
    generator = torch.Generator().manual_seed(levels)
    scores = torch.randint(levels, (301,), generator=generator).double() / levels
    labels = (torch.rand(301, generator=generator) < 0.3).double()
    assert auc(scores, labels) == pytest.approx(brute_force_auc(scores, labels), abs=1e-12)


def test_auc_at_its_ends():
    labels = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert auc(torch.tensor([1.0, 2.0, 3.0, 4.0]), labels) == 1.0
    assert auc(torch.tensor([4.0, 3.0, 2.0, 1.0]), labels) == 0.0
    assert auc(torch.full((4,), float("nan")), labels) == 0.5
    assert auc(torch.tensor([1.0, float("-inf"), float("inf"), 2.0]), labels) == 1.0


def test_auc_needs_both_labels():
    with pytest.raises(ValueError, match="0 positives and 3 negatives"):
        auc(torch.rand(3), torch.zeros(3))


def test_no_feature_is_known_only_after_departure():
    features = {*data.CATEGORICAL, *data.NUMERIC}
    assert not features & AFTER_DEPARTURE
    assert set(data.READ) & AFTER_DEPARTURE == {"arr_delay"}  # the target


def test_no_number_gives_the_target_away():
    flights = data.load()
    for column, name in enumerate(data.NUMERIC):
        assert 0.3 < auc(flights.numbers[:20_000, column], flights.late[:20_000]) < 0.7, name


@pytest.mark.slow
def test_held_out_days_are_whole():
    flights = data.load()
    place = [data.NUMERIC.index("season_sin"), data.NUMERIC.index("season_cos")]
    days = [set(map(tuple, flights.numbers[rows][:, place].tolist())) for rows in (flights.held_out, ~flights.held_out)]
    assert not days[0] & days[1]
    assert len(days[0]) + len(days[1]) == 365
    assert 0.08 < flights.held_out.float().mean() < 0.12


def test_numbers_are_normalised_and_codes_in_range():
    flights = data.load()
    train = flights.numbers[~flights.held_out]
    assert flights.numbers.isfinite().all()
    assert train.mean(0).abs().max() < 0.1
    assert flights.numbers.abs().max() <= 8
    assert (flights.categories.amax(0) + 1).tolist() == list(flights.cardinalities)
    assert flights.categories.min() == 0
    assert 0.2 < flights.late.mean() < 0.3


def test_the_weather_is_that_of_the_hour_before(tmp_path):
    hours = [f"2013-01-01T{hour:02d}:00:00Z" for hour in (9, 10, 11)]
    zeros = dict.fromkeys(data.WEATHER, 0.0)
    rows = [
        {"origin": o, "time_hour": h, **zeros, "temp": t}
        for o, t0 in (("JFK", 0), ("EWR", 50))
        for t, h in enumerate(hours, t0)
    ]
    pandas.DataFrame(rows).to_csv(tmp_path / "weather.csv", index=False)
    flights = pandas.DataFrame({"origin": ["EWR", "JFK", "JFK"], "time_hour": [hours[1], hours[2], hours[0]]})
    temperature = data._weather_before(pandas, flights, tmp_path / "weather.csv")["temp"]
    assert temperature.tolist()[:2] == [50.0, 1.0]
    assert temperature.isna().tolist() == [False, False, True]

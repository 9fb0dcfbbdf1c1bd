"""Contenders of a race: in which order they run, and what is made of their times."""

from __future__ import annotations

import gc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from preamp.bench._race import orders, race, spread


@pytest.mark.parametrize("number", range(1, 12))
def test_each_follows_every_other_equally_often_and_none_itself(number: int) -> None:
    rounds = orders(number)
    assert all(sorted(order) == list(range(number)) for order in rounds)
    within = Counter(pair for order in rounds for pair in pairwise(order))
    if number > 2:
        assert len(within) == number * (number - 1) and len(set(within.values())) == 1
        places = Counter((place, one) for order in rounds for place, one in enumerate(order))
        assert len(set(places.values())) == 1
        endless = [one for order in rounds * 2 for one in order]
        assert all(one != other for one, other in pairwise(endless))


def test_every_contender_runs_as_often_in_every_round() -> None:
    ran: list[str] = []
    contenders = {name: (lambda name=name: ran.append(name)) for name in "abcd"}
    outcomes = race(contenders, rounds=5, number=3)
    assert [outcome.name for outcome in outcomes] == list("abcd")
    assert ran[:4] == list("abcd")  # to warm up
    for index in range(5):
        told = ran[4 + 12 * index : 16 + 12 * index]
        assert Counter(told) == dict.fromkeys("abcd", 3) and all(told[i] == told[i + 1] for i in range(0, 12, 3))
    reference = outcomes[0]
    assert set(reference.ratios) == {1.0} and all(len(outcome.seconds) == 5 for outcome in outcomes)
    other = outcomes[2]
    expected = [one / two for one, two in zip(reference.seconds, other.seconds, strict=True)]
    assert list(other.ratios) == expected and other.to_dict()["ratio"]["median"] == sorted(expected)[2]


def test_a_contender_that_fails_ends_the_race_and_leaves_the_collector_as_it_was() -> None:
    calls = iter([None, None])
    with pytest.raises(StopIteration):
        race({"a": lambda: None, "b": lambda: next(calls)}, rounds=3)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"),
    [(1, 1, 1, 0.0), (5, 1, 5, 0.9375), (7, 1, 7, 0.984), (9, 2, 8, 0.961), (15, 4, 12, 0.965), (35, 12, 24, 0.959)],
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(count: int, low: int, high: int, confidence: float) -> None:
    found = spread([*range(count, 0, -1)])
    assert (found["low"], found["high"]) == (low, high)  # of the numbers 1 to n: as in tables of the sign test
    assert found["confidence"] == pytest.approx(confidence, abs=5e-4)
    assert (found["median"], found["min"], found["max"]) == ((count + 1) / 2, 1, count)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    random = np.random.default_rng(0).lognormal(size=(2000, 9))  # skewed, with a median of 1
    found = [spread(list(ratios)) for ratios in random]
    share = sum(each["low"] <= 1 <= each["high"] for each in found) / len(found)
    assert share == pytest.approx(found[0]["confidence"], abs=0.015)

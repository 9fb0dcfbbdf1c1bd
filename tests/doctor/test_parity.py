"""The verdict of a comparison, from losses alone."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp.doctor.command.run import printed_numbers
from preamp.doctor.findings.pa206 import Pair, parity, quantile, result
from preamp.doctor.tell.comparison import Ran, failures

# Quantiles at 0.95 by degrees of freedom, as printed in any table of Student's t.
TABLE = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 7: 1.895, 10: 1.812, 20: 1.725, 30: 1.697}


@pytest.mark.parametrize(("degrees", "value"), TABLE.items())
def test_quantiles_are_those_of_the_table(degrees: int, value: float) -> None:
    assert quantile(degrees) == pytest.approx(value, abs=1e-3)


def test_the_interval_holds_the_mean_as_often_as_it_says() -> None:
    draw = random.Random(0)
    inside = 0
    for _ in range(600):
        pairs = [Pair([1 + draw.gauss(0.3, 1)], [1.0 + 0 * k]) for k in range(4)]
        low, high = parity(pairs).interval or (0, 0)
        inside += low <= 0.3 <= high
    assert 0.86 <= inside / 600 <= 0.94


def runs(shift: float, noise: float, seeds: int = 4, steps: int = 50) -> list[Pair]:
    draw = random.Random(1)
    made = []
    for _ in range(seeds):
        level = draw.gauss(1.0, 0.02)
        full = [level + math.exp(-step / 5) for step in range(steps)]
        mixed = [loss + shift * min(step / 20, 1) + draw.gauss(0, noise) for step, loss in enumerate(full)]
        made.append(Pair(mixed, full))
    return made


def test_verdicts() -> None:
    assert parity(runs(0.0, 0.001)).verdict == "equivalent"
    worse = parity(runs(0.5, 0.001))
    assert worse.verdict == "worse"
    assert worse.parted is not None
    assert 0 < worse.parted < 20
    assert parity(runs(-0.5, 0.001)).verdict == "better"
    assert parity(runs(0.04, 0.4)).verdict == "undecided"
    assert parity(runs(0.0, 0.001)[:1]).verdict == "undecided", "one pair has no spread"
    assert parity(runs(0.0, 0.0)).verdict == "identical"


def test_losses_that_come_to_nothing() -> None:
    healthy, sick = [1.0] * 20, [1.0] * 10 + [math.nan] * 10
    assert parity([Pair(sick, healthy), Pair(healthy, healthy)]).verdict == "worse"
    assert parity([Pair(sick, healthy)]).parted == 10
    assert parity([Pair(healthy, sick), Pair(healthy, healthy)]).verdict == "undecided", "no question of 16 bits"
    assert result([]) == result([1.0, math.inf]) == math.inf
    with pytest.raises(ValueError, match="no pair"):
        parity([])


def test_a_run_that_ended_early_is_compared_as_far_as_it_went() -> None:
    full = [1.0 / (step + 1) for step in range(40)]
    found = parity([Pair(full[:10], full), Pair([v + 1e-9 for v in full], full)])
    assert found.verdict == "equivalent"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)), min_size=2, max_size=6), st.floats(0, 1))
def test_a_given_margin_is_a_share_of_the_loss(ends: list[tuple[float, float]], margin: float) -> None:
    found = parity([Pair([a], [b]) for a, b in ends], margin)
    assert found.margin == pytest.approx(margin * statistics.fmean(b for _, b in ends))
    assert found.difference == pytest.approx(statistics.fmean(a - b for a, b in ends), abs=1e-12)
    low, high = found.interval or (0, 0)
    if found.verdict == "equivalent":
        assert -found.margin < low <= high < found.margin
    if found.verdict == "worse":
        assert low > 0


def test_printed_numbers() -> None:
    text = "epoch 3 step: 12 loss: 0.5\nepoch=4 val_acc: 93.5% f1=0.8 lr: 1e-3\nloss: nan time: 3.2\n"
    found = printed_numbers(text)
    assert math.isnan(found.pop("loss"))
    assert found == {"val_acc": 0.935, "f1": 0.8}


def test_runs_that_trained_nothing_are_said_to() -> None:
    ran = [Ran("mixed-0", False, 0, 0, 1.0, [1.0, 0.5], 2), Ran("full-0", True, 0, 0, 1.0, [1.0, 0.9], 0)]
    assert failures(ran) == "1 of 2 runs trained nothing: all 2 steps of mixed-0 were skipped. "
    assert failures([replace(one, skipped=1) for one in ran]) == ""
    assert "ended with status 1" in failures([replace(ran[0], status=1), ran[1]])

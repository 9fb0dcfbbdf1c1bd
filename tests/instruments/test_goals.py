"""The goals of speed, memory and parity, judged from rows of the benchmarks."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.lists import COPY
from tools.goals import goals

Suite = tuple[str, dict[str, Any]]


def measured(name: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "seconds": [seconds] * 3, **more}


def row_of(suite: str, name: str, *contenders: dict[str, Any], **about: Any) -> Suite:
    return suite, {
        "name": name,
        "what": "",
        "contenders": list(contenders),
        "measured on": {"device": "NVIDIA H200"},
        **about,
    }


def suites(*rows: Suite) -> dict[str, list[dict[str, Any]]]:
    return {suite: [row for its, row in rows if its == suite] for suite, _ in rows}


def judged(*rows: Suite) -> dict[tuple[str, str], dict[str, Any]]:
    return {(g["goal"], g["what"]): g for g in goals(suites(*rows))}


def test_goals_of_speed_and_memory() -> None:
    found = judged(
        row_of("lists", "Adam, BERT-large", measured("torch.amp fp16", 0.010), measured("preamp O2", 0.006),
               measured("torch.amp fp16, foreach", 0.018), measured(COPY, 0.0056),
               measured("preamp O5, split masters, 8-bit states", 0.005)),
        row_of("steps", "BERT-large b16", measured("torch.amp fp16", 0.010, **{"peak bytes": 100}),
               measured("preamp O2", 0.0091, **{"peak bytes": 70}), measured("preamp O1", 0.0103)),
        row_of("steps", "feed-forward", measured("torch.amp fp16", 0.010), measured("preamp O2, captured", 0.002)),
        row_of("compiled", "BERT-base b32", measured("torch.amp fp16", 0.010),
               measured("torch.amp fp16, compiled", 0.0075), measured("preamp O2, compiled", 0.007)),
        row_of("steps", "UNet", measured("torch.amp fp16", 0.010), measured("torch.amp fp16, NCHW", 0.014),
               measured("preamp O2", 0.0095)),
    )  # fmt: skip
    by_name = {f"{goal} {what}": (g["measured"], g["met"]) for (goal, what), g in found.items()}
    assert by_name["G1 optimizer and casts, BERT-large"] == (pytest.approx(10 / 6), True)
    assert by_name["G1 the same with clipping"] == (None, None)
    assert by_name["G1b the same, against foreach"] == (pytest.approx(3.0), True)
    assert by_name["G1c share of copy bandwidth"] == (pytest.approx(56 / 60), True)
    assert by_name["G2 8-bit states"] == (pytest.approx(2.0), False)
    assert by_name["G3 step, BERT-large"] == (pytest.approx(1.0989, rel=1e-3), False)
    assert by_name["G3b compiled against eager, BERT-base b32"] == (pytest.approx(1.4286, rel=1e-3), True)
    assert by_name["G3c compiled against compiled, BERT-base b32"] == (pytest.approx(1.0714, rel=1e-3), True)
    assert by_name["G4 captured step, feed-forward"] == (pytest.approx(5.0), True)
    assert by_name["G5 UNet against NCHW"] == (pytest.approx(1.4737, rel=1e-3), False)
    assert by_name["G7 peak memory, BERT-large, O2"] == (0.7, True)
    slowest = found[("G9", "never slower than torch.amp alike, least ratio")]
    assert slowest["met"] is False and "BERT-large b16, preamp O1" in slowest["note"]


@pytest.mark.parametrize(
    ("gap", "band", "skips", "met"),
    [(0.004, 0.0, [3], True), (0.01, 0.02, [], True), (0.01, 0.002, [], False), (0.0, 0.0, [80], False)],
)
def test_goals_of_parity(gap: float, band: float, skips: list[int], met: bool) -> None:
    row = row_of(
        "losses", "UNet", {"name": "fp32", "against fp32": 0.0, "skips": []},
        {"name": "fp32, another seed", "against fp32": -band, "skips": []},
        {"name": "torch.amp fp16", "against fp32": 0.0, "skips": [0, 1]},
        {"name": "preamp O1", "against fp32": gap, "skips": skips}, {"name": "preamp O2", "error": "gone"},
        **{"settled after": 50},
    )  # fmt: skip
    assert judged(row)[("G10", "final loss against fp32, largest gap")]["met"] is met

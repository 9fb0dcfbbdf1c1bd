"""Findings of the whole run, from the steps that were recorded."""

from __future__ import annotations

import pytest

from preamp.doctor.records import Rank
from preamp.doctor.tell.report import judge


def rank_of(skipped: str, updated: str, scales: list[float] | None = None) -> Rank:
    """`skipped`: s for each step that was; `updated`: u where the scaler was updated after it."""
    rank = Rank(0)
    for index, letter in enumerate(skipped):
        rank.write("step", {
            "step": index, "scale": scales[index] if scales else 1024.0, "skipped": letter == "s", "bad": None,
            "schedules": 0, "updates": int(index > 0 and updated[index - 1] == "u"),
        })  # fmt: skip
    rank.write("end", {"scaler_at": ["train.py", 3], "updates": int(updated[-1] == "u")})
    return rank


@pytest.mark.parametrize(("skipped", "updated", "code"), [
    ("..." + "s" * 9, "uuu" + "." * 9, "PA107"),
    ("." + "s" * 11, "u" + "." * 11, "PA107"),
    ("..s..s..s..s", "uu.uu.uu.uu.", None),  # one at a time, with good steps between: judged by how many were skipped
    ("ssssssssssss", "uuuuuuuuuuuu", "PA203"),
    ("............", "uuuuuuuuuuuu", None),
])  # fmt: skip
def test_a_scale_that_one_branch_never_updates(skipped: str, updated: str, code: str | None) -> None:
    found = judge([rank_of(skipped, updated)])
    if code is None:
        assert not [one for one in found if one.code == "PA107"]
        return
    assert [one.code for one in found] == [code]
    if code == "PA107":
        assert (found[0].file, found[0].line) == ("train.py", 3)
        assert "was not called after any of them" in found[0].message and "oscillates" not in found[0].message


def test_two_optimizers_that_share_an_update_are_updated() -> None:
    found = judge([rank_of("ss" * 8, ".u" * 8)])
    assert not [one for one in found if one.code == "PA107"]

"""Descriptions that once raised something else than a PolicyError, or did not read back."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import preamp
from preamp.errors import PolicyError
from preamp.policy import Policy
from preamp.rules import OpRules

TEXTS = [
    "O1,self=x",
    "self=1",
    "modules=head",
    "O1; a{99999999999999999999} -> full",
    "O1; [[a] -> full",
    "O1; " + "(" * 5000 + ")" * 5000 + " -> full",
    "O1; op \ud800::x -> low",
    "O1; op x\0 -> low",
    "O1; head -> fp64",
]
MAPPINGS: list[dict[Any, Any]] = [
    {1: 2},
    {"self": 1},
    {"modules": 5},
    {"modules": ["ab"]},
    {"modules": {"(": "full"}},
    {"modules": {5: "full"}},
    {"modules": [("a", torch.int64)]},
    {"scale": 10**400},
    {"scale": True},
]


@pytest.mark.parametrize("description", TEXTS + MAPPINGS, ids=lambda d: repr(d)[:30])
def test_only_a_policy_error(description: Any) -> None:
    with pytest.raises(PolicyError):
        preamp.policy(description)


@pytest.mark.parametrize("scale", [True, False, 10**400, [1], b"dynamic"])
def test_a_bad_scale_is_refused_however_it_comes(scale: Any) -> None:
    for attempt in (lambda: Policy(scale=scale), lambda: Policy().replace(scale=scale)):
        with pytest.raises(PolicyError, match="finite number above 0"):
            attempt()


@pytest.mark.parametrize(
    ("pattern", "advice"),
    [("op head", "write [ ]"), (" head", "write [ ]"), ("head ", "write [ ]"), ("", "write (?:)"), ("(", "missing )")],
)
def test_a_pattern_that_could_not_be_read_back_is_refused(pattern: str, advice: str) -> None:
    for attempt in (lambda: Policy().override(pattern, "full"), lambda: Policy(modules=((pattern, "full"),))):
        with pytest.raises(PolicyError, match=re.escape(advice)):
            attempt()


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=8))
def test_every_pattern_that_is_accepted_reads_back(pattern: str) -> None:
    try:
        found = preamp.policy("O1").override(pattern, "full")
    except PolicyError:
        return
    assert preamp.policy(str(found)) == found


@pytest.mark.parametrize("name", ["mean.default", "sum.default", "cat.default", "add.Tensor"])
def test_a_rule_for_one_overload_reads_back_as_that_one(name: str) -> None:
    ops = OpRules().with_banned(name)
    assert len(ops.changes) == 1
    assert preamp.policy(str(Policy(ops=ops))).ops == ops


def test_fields_given_to_the_class_are_understood_alike() -> None:
    assert Policy(params="fp16", compute="fp16", norms="fp16", output="fp32", ops="none").level == "O3"
    assert Policy(modules=[("head", torch.float32)]).modules == (("head", "full"),)  # type: ignore[arg-type]
    assert Policy(masters="no") == Policy()  # type: ignore[arg-type]

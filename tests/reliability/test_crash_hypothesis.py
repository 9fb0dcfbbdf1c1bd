"""Whatever is written into policies and states: it works, or the error is one of preamp's own."""

from __future__ import annotations

import contextlib
import copy
import string
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import preamp
from preamp.errors import PreampError
from preamp.scaling import SCHEDULES, StaticScale

from ..session.toys import mlp
from .runs import Run, alike

# -- what is thrown at preamp

ODD_NUMBERS = st.sampled_from(
    [
        0, -1, 1, 2**31 - 1, 2**31, 2**63, 10**400, -(10**400), 0.0, -0.0, 0.5, 1e-46, 2.0**-126, 2.0**127, 2.0**128,
        1e300, float("inf"), float("-inf"), float("nan"), True, False,
    ]
)  # fmt: skip
ODD_TENSORS = st.sampled_from(
    [
        torch.zeros(0), torch.ones(()), torch.ones(2, 3), torch.tensor([1, 2]), torch.tensor(1j), torch.ones(2).bool(),
        torch.eye(2).to_sparse(), torch.empty(3, device="meta"), torch.full((16, 6), float("nan")), torch.ones(16, 6),
    ]
)  # fmt: skip
ODD = st.one_of(
    ODD_NUMBERS, ODD_TENSORS, st.none(), st.text(max_size=8), st.integers(), st.floats(), st.binary(max_size=4),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=4) | st.integers(), st.integers(), max_size=3),
    st.builds(object), st.sampled_from([torch.float16, torch.device("cpu"), int, len, "dynamic", "kind", "loss"]),
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, made: Callable[[], Any]) -> Any:
    """A good state with up to three places in it changed, dropped, added or replaced by something else."""
    state = made()
    for _ in range(draw(st.integers(1, 3))):
        where, parent = state, None
        while isinstance(where, dict) and where and (parent is None or draw(st.integers(0, 3))):
            key = draw(st.sampled_from(sorted(where, key=str)))
            parent, where = where, where[key]
        if parent is None:
            return draw(ODD)
        action = draw(st.sampled_from(["change", "change", "change", "drop", "add"]))
        if action == "change":
            parent[key] = draw(ODD)
        elif action == "drop":
            del parent[key]
        else:
            parent[draw(st.text(max_size=6) | st.integers())] = draw(ODD)
    return state


FIELDS = st.sampled_from(
    ["params", "compute", "norms", "output", "masters", "scale", "ops", "modules", "level", "", "x"]
)
VALUES = st.one_of(
    st.sampled_from(["fp16", "bf16", "fp32", "fp64", "rules", "as-is", "yes", "no", "none", "dynamic", "hysteresis"]),
    st.text(string.printable, max_size=8), ODD_NUMBERS.map(str),
)  # fmt: skip
NAMES = st.sampled_from(
    ["softmax", "conv", "gelu", "softmax.int", "mylib::attention", "aten::exp", "layer", "0", "__x"]
)
SUBJECTS = st.one_of(
    NAMES, NAMES.map("op {}".format), st.sampled_from([r"\d", "(", "a|b", ".*", "head", "[", "*"]), st.text(max_size=8)
)
MEANINGS = st.sampled_from(["full", "low", "promote", "banned", "as-is", "fp16", "fp64", "", "->", "full -> low"])
POLICIES = st.one_of(
    st.text(max_size=40),
    st.builds(
        lambda head, fields, rules: "; ".join([",".join([*head, *(f"{k}={v}" for k, v in fields)]), *rules]),
        st.lists(st.sampled_from(["O0", "O1", "O2", "o5", "O9", "fp16", "bf16-master", "auto", " "]), max_size=2),
        st.lists(st.tuples(FIELDS, VALUES), max_size=4),
        st.lists(st.builds(lambda s, m: f"{s} -> {m}", SUBJECTS, MEANINGS) | st.text(max_size=8), max_size=3),
    ),
)

# -- what has to hold


def policies(text: str) -> None:
    try:
        made = preamp.policy(text)
    except PreampError:
        return
    assert preamp.policy(str(made)) == made
    with contextlib.suppress(PreampError):
        preamp.prepare(mlp(), None, policy=made).close()


SCALES = {**SCHEDULES, "static": lambda: StaticScale(512.0)}


def scales(case: tuple[str, Any]) -> None:
    kind, state = case
    scale = SCALES[kind]()  # type: ignore[operator]
    before = scale.state_dict()
    if not isinstance(state, Mapping):
        return
    try:
        scale.load_state_dict(state)
    except PreampError:
        assert alike(scale.state_dict(), before)
        return
    twin = SCALES[kind]()  # type: ignore[operator]
    twin.load_state_dict(scale.state_dict())
    for found in (0.0, 1.0, 0.0):
        for each in (scale, twin):
            each.after_step(torch.tensor(found))
        assert 2.0**-126 <= float(scale.current(torch.device("cpu"))) <= 2.0**127
    assert alike(scale.state_dict(), twin.state_dict())


STATES = st.sampled_from(sorted(SCALES)).flatmap(
    lambda kind: st.tuples(st.just(kind), mutated(lambda: SCALES[kind]().state_dict()))  # type: ignore[operator]
)

_KEPT: dict[str, Run] = {}


def session_of(level: str) -> Run:
    """One session a level for all cases of a test: what a case leaves broken, the next one finds."""
    if level not in _KEPT or _KEPT[level] not in Run.open:
        _KEPT[level] = Run(level)
        _KEPT[level].steps(0, 1)
    return _KEPT[level]


def sessions(case: tuple[str, Any]) -> None:
    level, state = case
    run = session_of(level)
    before = run.state()
    try:
        run.session.load_state_dict(state)
    except PreampError:
        assert alike(run.state(), before)
    else:
        run.session.load_state_dict(run.state()["session"])
        run.session.load_state_dict(before["session"])
    run.step(2)
    run.model.load_state_dict(before["model"])
    run.session.load_state_dict(before["session"])


SESSIONS = st.sampled_from(["O1", "O2", "O5"]).flatmap(
    lambda level: st.tuples(st.just(level), mutated(lambda: copy.deepcopy(session_of(level).session.state_dict())))
)


PROPERTIES: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "policies": (POLICIES, policies),
    "scales": (STATES, scales),
    "sessions": (SESSIONS, sessions),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cases", [100, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PROPERTIES)
def test_only_errors_of_preamps_own(name: str, cases: int) -> None:
    strategy, holds = PROPERTIES[name]
    every = list(HealthCheck)

    @settings(max_examples=cases, deadline=None, derandomize=True, database=None, suppress_health_check=every)
    @given(strategy)
    def always(case: Any) -> None:
        holds(case)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", preamp.PreampWarning)
        always()

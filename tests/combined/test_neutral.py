"""Evaluating, saving, loading, failing and looking on change no bit of a training run, wherever they happen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from .events import BETWEEN, NEUTRAL, STEPS, Program, play
from .training import GROWS, MAKERS, Training, differences

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
AGAIN = ("built_again", "read_from_a_file", "prepared_again")
"""Events after which model, optimizer or session are others."""


@st.composite
def setups(draw: Any) -> tuple[str, str, str]:
    """Level, optimizer, schedule of the scale."""
    level, maker = draw(st.sampled_from(LEVELS)), draw(st.sampled_from(list(MAKERS)))
    if maker == "AdamW, split" and level in ("O2", "O3"):
        level = "O5"
    if maker == "AdamW, by chance" and level in ("O2", "O3"):
        level = "O4"
    return level, maker, draw(st.sampled_from(list(GROWS)))


steps = st.tuples(
    st.sampled_from(list(STEPS)),
    st.lists(st.sampled_from(list(NEUTRAL)), max_size=2),
    st.lists(st.sampled_from(list(BETWEEN)), max_size=1),
)
"""A kind of step, what happens before it, and what between its micro-batches."""


def ran(how: tuple[str, str, str], program: Program, *, with_events: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    run = Training(*how)
    try:
        end = play(run, program, NEUTRAL if with_events else None)
        assert run.model.head.weight is run.model.words.weight
        return end
    finally:
        run.session.close()


def changes_nothing(how: tuple[str, str, str], program: Program) -> None:
    expected = ran(how, program, with_events=False)
    assert differences(expected, ran(how, program, with_events=True)) == []


checks = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


@pytest.mark.slow
@settings(max_examples=500, **checks)
@given(setups(), st.lists(steps, min_size=3, max_size=10))
def test_neutral_events(how: tuple[str, str, str], program: Program) -> None:
    changes_nothing(how, program)


@pytest.mark.parametrize("event", NEUTRAL)
def test_each_event(event: str) -> None:
    how = ("O2", "AdamW", "dynamic") if list(NEUTRAL).index(event) % 2 else ("O3", "NovoGrad", "static")
    between = [event] if event in BETWEEN else []
    changes_nothing(
        how, [("edited", [], []), ("plain", [], []), ("accumulated", [event], between), ("clipped", [event], [])]
    )


def places(run: Training) -> dict[str, int]:
    """Where everything lies that a step reads and writes."""
    held = {**dict(run.model.state_dict(keep_vars=True)), **run.session._masters.named()}
    held |= {f"{i} {name}": v for i, state in enumerate(run.optimizer.state.values()) for name, v in state.items()}
    for loss in run.session._losses:
        held |= getattr(run.session._losses[loss], "_state", {})
    return {name: value.data_ptr() for name, value in held.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize(("level", "maker"), [
    ("O1", "AdamW"), ("O2", "torch AdamW, fused"), ("O3", "AdamW"), ("O5", "torch AdamW, fused"),
])  # fmt: skip
def test_a_graph_finds_everything_where_it_was(level: str, maker: str) -> None:
    """What moves between two steps, a captured step would miss, unless it is told (`OptimizerSteps.loads`)."""
    run = Training(level, maker, "hysteresis")
    try:
        list(STEPS["clipped"](run))
        for event in (name for name in NEUTRAL if name not in AGAIN):
            before, loads = places(run), run.session._steps.loads
            NEUTRAL[event](run)
            assert run.session._steps.loads > loads or places(run) == before, event
            list(STEPS["clipped"](run))
    finally:
        run.session.close()

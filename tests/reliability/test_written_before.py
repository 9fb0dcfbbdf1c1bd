"""Files that preamp has written once: they load, and training goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .before import TRAININGS, continued

FILES = Path(__file__).parent / "written_before"
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # Apex's own, as each of its parts says

LOSSES = json.loads((FILES / "losses.json").read_text(encoding="utf-8"))


def test_every_training_has_a_file() -> None:
    assert set(LOSSES) == set(TRAININGS) == {path.stem for path in FILES.glob("*.pt")}


@pytest.mark.parametrize("name", TRAININGS)
def test_goes_on_from_a_file_of_before(name: str) -> None:
    training = TRAININGS[name]()
    try:
        training.load(FILES / f"{name}.pt")
        assert continued(training) == pytest.approx(LOSSES[name], rel=1e-3), "other losses than of the run that saved"
    finally:
        training.close()


def test_the_losses_tell_a_lost_state(name: str = "o5_adamw") -> None:
    fresh = TRAININGS[name]()
    try:
        assert continued(fresh) != pytest.approx(LOSSES[name], rel=1e-3)
    finally:
        fresh.close()

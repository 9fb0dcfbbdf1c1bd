"""The tables of `preamp levels`, `preamp rules` and `preamp env`."""

from __future__ import annotations

import torch

from ..errors import PreampError
from ..machine import environment
from ..policy import LEVELS, auto_level, cpu_arithmetic, parse_policy
from ..report import Table
from ..rules import OpRules

_ORDER = {"low": 0, "full": 1, "promote": 2, "banned": 3, "as-is": 4}


def levels_table() -> Table:
    """The levels, and which of them suits this machine."""
    auto, why = auto_level()
    shown = ("params", "compute", "norms", "output", "masters", "scale")
    rows = []
    for level in LEVELS:
        fields = dict(part.split("=") for part in str(level.policy).split(",") if "=" in part)
        rows.append((level.name, level.alias, *(fields[name] for name in shown)))
    notes = (*(f"{level.name}: {level.summary}" for level in LEVELS), f"auto is {auto} here: {why}")
    return Table("Levels", ("level", "alias", *shown), rows, notes=notes)  # in 80 columns and 24 lines


def rules_table(policy: str) -> Table:
    """The operator rules of a policy; `PreampError` if it has none."""
    ops = parse_policy(policy).ops
    if ops is None:
        raise PreampError(f"the policy {policy!r} has ops=none: it has no operator rules")
    rows = sorted(OpRules(ops.changes).rows(), key=lambda row: _ORDER[row.category])
    cells = [(row.category, row.family, row.reason, ", ".join(row.ops)) for row in rows]
    notes = ("operators that are not listed run in the dtype of their inputs", "the same on every device")
    return Table("Operator rules", ("runs", "family", "why", "operators"), cells, notes=notes)


def environment_table() -> Table:
    """The machine and the versions."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    auto = ": ".join(auto_level(device.type))
    found = {**environment(device), "16 bits on the CPU": cpu_arithmetic(), "auto level": auto}
    rows = [(name, str(value) if isinstance(value, bool) else value) for name, value in found.items()]
    return Table("Environment", ("what", "value"), rows)

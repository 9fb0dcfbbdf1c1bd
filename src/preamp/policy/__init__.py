"""Policies and levels."""

from ._levels import LEVELS, Level, auto_level, cpu_has_bf16, level_names
from ._parse import policy
from ._policy import Policy, Precision, Scale

__all__ = [
    "LEVELS",
    "Level",
    "Policy",
    "Precision",
    "Scale",
    "auto_level",
    "cpu_has_bf16",
    "level_names",
    "policy",
]

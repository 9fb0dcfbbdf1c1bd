"""Policies and levels."""

from ._levels import auto_level, cpu_has_bf16
from ._parse import parse_policy
from ._policy import LEVELS, Level, Policy, Precision, Scale, level_names

policy = parse_policy
"""The name that users call it by: `preamp.policy("O2")`."""

__all__ = [
    "LEVELS",
    "Level",
    "Policy",
    "Precision",
    "Scale",
    "auto_level",
    "cpu_has_bf16",
    "level_names",
    "parse_policy",
    "policy",
]

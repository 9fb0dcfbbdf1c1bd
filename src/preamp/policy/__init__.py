"""Policies and levels."""

from ._levels import auto_level, cpu_arithmetic
from ._parse import policy
from ._policy import LEVELS, Level, Policy, Precision, Scale, level_names

parse_policy = policy
"""`policy`, for code in which a policy has that name."""

__all__ = [
    "LEVELS",
    "Level",
    "Policy",
    "Precision",
    "Scale",
    "auto_level",
    "cpu_arithmetic",
    "level_names",
    "parse_policy",
    "policy",
]

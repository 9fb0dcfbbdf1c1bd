"""The suite `models`: networks at their real sizes, and a report with pictures."""

from ._report import report
from ._suite import GROUPS, NETWORKS, SIZES, estimates, models

__all__ = ["GROUPS", "NETWORKS", "SIZES", "estimates", "models", "report"]

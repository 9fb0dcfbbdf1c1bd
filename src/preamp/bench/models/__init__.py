"""The suite `models`: networks at their real sizes, and a report with pictures."""

from ._report import report
from ._suite import GROUPS, NETWORKS, models

__all__ = ["GROUPS", "NETWORKS", "models", "report"]

"""Parameters that are asked about together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, is_

from torch import Tensor
from torch.nn import Parameter

from ._entry import Entry

_VERSION, _AGREED, _LOW = attrgetter("_version"), attrgetter("version"), attrgetter("low")


class Column:
    """Some parameters, and what is known of those that have masters, in lists that C code walks.

    The hash of a parameter is a Python function: to look a thousand of them up takes longer than to step them.
    """

    def __init__(self, parameters: Sequence[Parameter], known: Mapping[Parameter, Entry]) -> None:
        self._all = list(parameters)
        self.parameters = [parameter for parameter in parameters if parameter in known]
        self.others = [parameter for parameter in parameters if parameter not in known]
        self.entries = [known[parameter] for parameter in self.parameters]

    def is_of(self, parameters: Sequence[Parameter]) -> bool:
        """Whether these are the parameters, in this order."""
        return len(parameters) == len(self._all) and all(map(is_, parameters, self._all))

    @property
    def agrees(self) -> bool:
        """Whether nothing was written, and nothing lies elsewhere, since masters and parameters last agreed."""
        if list(map(_VERSION, self.parameters)) != list(map(_AGREED, self.entries)):
            return False
        lows = map(_LOW, self.entries)
        return list(map(Tensor.data_ptr, self.parameters)) == list(map(Tensor.data_ptr, lows))

    def agreed(self) -> None:
        """They agree now, where they lie."""
        for entry, version in zip(self.entries, map(_VERSION, self.parameters), strict=True):
            entry.version = version

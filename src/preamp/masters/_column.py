"""Parameters that are asked about together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, is_, itemgetter

from torch import Tensor
from torch.nn import Parameter

from ..multi_tensor import Shown, TensorList
from ._entry import Entry

_VERSION, _MASTER = attrgetter("_version"), attrgetter("master")


class Agreed:
    """What masters and parameters last agreed on, by the number of an entry, in lists that C code walks.

    The hash of a parameter is a Python function, and each entry lies somewhere else in memory: to ask a thousand of
    them takes longer than to step them.
    """

    def __init__(self) -> None:
        self.versions: list[int] = []
        """The parameters' version counters."""
        self.addresses: list[int] = []
        """Where they lay."""
        self.exchanges = 0
        """How often a master was another tensor than before."""
        self.asked = 0
        """How often somebody may have got hold of a master."""

    def add(self, parameter: Parameter) -> int:
        """One more; its number."""
        self.versions.append(parameter._version)
        self.addresses.append(parameter.data_ptr())
        return len(self.versions) - 1

    def note(self, number: int, parameter: Parameter) -> None:
        """A parameter agrees with its master now, as it is."""
        self.versions[number], self.addresses[number] = parameter._version, parameter.data_ptr()

    def holds(self, number: int, parameter: Parameter) -> bool:
        """Whether it was not written since, and lies where it did."""
        return self.versions[number] == parameter._version and self.addresses[number] == parameter.data_ptr()


class Column:
    """Some parameters, those of them that have masters, and these."""

    def __init__(self, parameters: Sequence[Parameter], known: Mapping[Parameter, Entry], agreed: Agreed) -> None:
        self._all, self.made_of = list(parameters), parameters
        """`made_of`: the list that it was last asked about, which its owner may have changed since."""
        self.parameters = [parameter for parameter in parameters if parameter in known]
        self.others = [parameter for parameter in parameters if parameter not in known]
        self.entries = [known[parameter] for parameter in self.parameters]
        self._agreed, self._numbers = agreed, [entry.number for entry in self.entries]
        begin = self._numbers[0] if self._numbers else 0
        run = slice(begin, begin + len(self._numbers))
        self._run = run if self._numbers == list(range(run.start, run.stop)) else None
        self._pick = itemgetter(run) if self._run else itemgetter(*self._numbers)
        self._masters, self._exchanges = TensorList(), -1
        self._shown = Shown((), None, others=1)

    def is_of(self, parameters: Sequence[Parameter]) -> bool:
        """Whether these are the parameters, in this order."""
        return len(parameters) == len(self._all) and all(map(is_, parameters, self._all))

    def was_made_of(self, parameters: Sequence[Parameter]) -> bool:
        """Whether this is the list that was asked about last: to be asked within a step, where nobody changes it."""
        return parameters is self.made_of and len(parameters) == len(self._all)

    def agrees(self, addresses: Sequence[int] | None = None) -> bool:
        """Whether nothing was written, and nothing lies elsewhere, since masters and parameters last agreed.

        `addresses`: where all these parameters lie, if that is known.
        """
        if list(map(_VERSION, self.parameters)) != list(self._pick(self._agreed.versions)):
            return False
        if addresses is None or self.others:
            addresses = list(map(Tensor.data_ptr, self.parameters))
        return list(addresses) == list(self._pick(self._agreed.addresses))

    def agree(self) -> None:
        """They agree now, where they lie."""
        versions = list(map(_VERSION, self.parameters))
        if self._run is not None:
            self._agreed.versions[self._run] = versions
            return
        for number, version in zip(self._numbers, versions, strict=True):
            self._agreed.versions[number] = version

    def masters(self) -> TensorList:
        """The masters of `parameters`, for one step; writes to them are not counted, as nobody computes with them."""
        other = self._exchanges != self._agreed.exchanges
        if other:
            self._masters, self._exchanges = TensorList(map(_MASTER, self.entries)), self._agreed.exchanges
        if other or not self._shown.are_where_they_were(self._masters):
            self._masters.ask_anew(owners=())
            self._shown = Shown(self._masters, self._agreed, others=1)  # those of the entries
        return self._masters

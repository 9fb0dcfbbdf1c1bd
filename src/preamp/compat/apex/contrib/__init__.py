"""Of `apex.contrib`: the optimizers of 2018 and 2019, layer norm, cross entropy and clipping, on torch's operators."""

from typing import NoReturn

from .._modules import no_attribute as _no_attribute


def __getattr__(name: str) -> NoReturn:
    raise _no_attribute(__name__, name)

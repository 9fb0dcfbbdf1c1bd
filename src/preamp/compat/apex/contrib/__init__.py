"""Of `apex.contrib`: the optimizers of 2018 and 2019, layer norm, cross entropy and clipping, on torch's operators."""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from .._modules import no_attribute as _no_attribute


def __getattr__(name: str) -> _ModuleType:
    if name == "optimizers":  # which Apex's amp imports
        return _import_module(f".{name}", __name__)
    raise _no_attribute(__name__, name)

"""Making `import apex` mean `preamp.compat.apex`, in this process or in every process of a script."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import PreampError, PreampWarning

IMPORTABLE = str(Path(__file__).parent / "_importable")
"""The folder to put on PYTHONPATH."""

_OURS = "preamp.compat.apex"
_GRAFTED = ("RNN", "amp", "fp16_utils", "parallel")
"""What NVIDIA removed: it is put on an Apex that is installed without it, whose other parts stay."""
_EXTENSIONS = {
    "amp_C": "._amp_c", "apex_C": ".parallel.distributed", "fused_adam_cuda": "._fused_adam_cuda",
    "fused_layer_norm_cuda": "._fused_layer_norm_cuda",
}  # fmt: skip


def install_as_apex() -> ModuleType:
    """Have `import apex` and `from apex import amp`, ... find `preamp.compat.apex` in this process; returns `apex`.

    Where NVIDIA's Apex is installed, its modules stay, and `amp`, `fp16_utils` and `parallel` come from here. A second
    call changes nothing. Call it before anything imports `apex.amp`; RuntimeError if an `apex.amp` of another origin is
    loaded already. `uninstall_as_apex()` undoes it.
    """
    finder = _installed()
    if finder is not None:
        return sys.modules["apex"]
    loaded = sys.modules.get("apex.amp")
    if loaded is not None:
        raise AlreadyImported(
            f"apex.amp is loaded already, from {getattr(loaded, '__file__', 'elsewhere')}: two amps in one process "
            "would patch torch over one another. Call preamp.install_as_apex() first thing in the script, or start it "
            "with `preamp run`"
        )
    real = _real_apex()
    finder = _Finder(real)
    sys.meta_path.insert(0, finder)
    sys.meta_path.append(_ExtensionFinder())
    if real is None:
        sys.modules["apex"] = importlib.import_module(_OURS)
    else:
        for part in ("amp", "fp16_utils", "parallel"):  # as attributes too, for who only says `import apex`
            importlib.import_module(f"apex.{part}")
    return sys.modules["apex"]


def uninstall_as_apex() -> None:
    """Undo `install_as_apex`: `apex` is found as it was before, or not at all."""
    finder = _installed()
    if finder is None:
        return
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, (_Finder, _ExtensionFinder))]
    real = finder.real
    for name in [*sys.modules]:
        module = sys.modules[name]
        of_ours = name == "apex" or name.startswith("apex.") or name in _EXTENSIONS
        if of_ours and getattr(module, "__name__", "").startswith(_OURS):
            del sys.modules[name]
            if real is not None and name.count(".") == 1:
                vars(real).pop(name.partition(".")[2], None)


def load_extension(name: str) -> None:
    """Put a compiled part of Apex in the place of the file in `IMPORTABLE` that is being imported as `name`.

    NVIDIA's, if it is installed; else ours.
    """
    spec = importlib.machinery.PathFinder.find_spec(name, _elsewhere())
    if spec is None or spec.loader is None:
        install_as_apex()
        sys.modules[name] = importlib.import_module(_EXTENSIONS[name], _OURS)
        return
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _elsewhere() -> list[str]:
    """Where Python looks for modules, without `IMPORTABLE`."""
    return [entry for entry in sys.path if os.path.abspath(entry or ".") != os.path.abspath(IMPORTABLE)]


class AlreadyImported(PreampError, RuntimeError):
    """Another `apex.amp` is in use in this process."""


def environment(base: dict[str, str] | None = None) -> dict[str, str]:
    """A copy of an environment (this process's) in which every Python process can import `apex`."""
    env = dict(os.environ if base is None else base)
    before = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part and part != IMPORTABLE]
    env["PYTHONPATH"] = os.pathsep.join([IMPORTABLE, *before])
    return env


def _installed() -> _Finder | None:
    return next((one for one in sys.meta_path if isinstance(one, _Finder)), None)


def _real_apex() -> ModuleType | None:
    """NVIDIA's Apex, loaded, if it is installed and can be; None for any other package of that name."""
    module = sys.modules.get("apex")
    if module is not None and not _is_stand_in(module):
        return module if _is_nvidias(module.__spec__) else None
    spec = importlib.machinery.PathFinder.find_spec("apex", _elsewhere())
    if spec is None or spec.loader is None or not _is_nvidias(spec):
        return None
    module = importlib.util.module_from_spec(spec)
    stand_in = sys.modules.get("apex")
    sys.modules["apex"] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # an Apex built for another torch or CUDA fails in many ways
        sys.modules.pop("apex")
        for name in [name for name in sys.modules if name.startswith("apex.")]:
            del sys.modules[name]
        if stand_in is not None:
            sys.modules["apex"] = stand_in
        warnings.warn(
            f"the installed apex ({spec.origin}) cannot be imported ({type(error).__name__}: {error}); "
            "preamp.compat.apex takes its place altogether",
            PreampWarning,
            stacklevel=3,
        )
        return None
    return module


def _is_stand_in(module: ModuleType) -> bool:
    return str(getattr(module, "__file__", "")).startswith(IMPORTABLE)


def _is_nvidias(spec: importlib.machinery.ModuleSpec | None) -> bool:
    """Whether a package called apex is the one for training: another of that name is a web framework's add-on."""
    places = (spec.submodule_search_locations if spec is not None else None) or ()
    return any((Path(place) / "multi_tensor_apply").is_dir() for place in places)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `apex.x.y` as `preamp.compat.apex.x.y`: the same module under a second name."""

    def __init__(self, real: ModuleType | None) -> None:
        self.real = real

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        first, _, rest = fullname.partition(".")
        if first != "apex" or (self.real is not None and rest.partition(".")[0] not in _GRAFTED):
            return None
        ours = f"{_OURS}.{rest}" if rest else _OURS
        try:
            module = importlib.import_module(ours)
        except ModuleNotFoundError as missing:
            if missing.name == fullname and self.real is not None:  # `from apex import RNN` would swallow this kind
                raise ImportError(str(missing), name=fullname) from None
            if missing.name != ours:
                raise
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: preamp has apex.amp, fp16_utils, parallel, optimizers, normalization, "
                f"multi_tensor_apply, mlp, fused_dense and some of contrib, and not {rest}. For the rest, install "
                "NVIDIA's Apex; preamp then adds to it what was removed there",
                name=fullname,
            ) from None
        return importlib.machinery.ModuleSpec(
            fullname,
            _ApexAlias(module),
            origin=getattr(module, "__file__", None),
            is_package=hasattr(module, "__path__"),
        )


class _ExtensionFinder(importlib.abc.MetaPathFinder):
    """Finds `amp_C` and its like where nobody else does: Apex's compiled parts, here on torch's operators."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _EXTENSIONS:
            return None
        module = importlib.import_module(_EXTENSIONS[fullname], _OURS)
        return importlib.machinery.ModuleSpec(fullname, Alias(module))


class Alias(importlib.abc.Loader):
    """Loads what is loaded already, under a second name, and leaves the module's own name and spec alone."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: Any) -> ModuleType:
        """The module as it is."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Put its own spec back, which the import has replaced."""
        module.__spec__ = self._spec


class _ApexAlias(Alias):
    """The same, with the modules in it.

    An import of `apex.amp._amp_state` that finds no such module sets it as an attribute of `apex.amp`, where Apex has
    an object of that name; one that is in sys.modules, as it is in Apex once the package was imported, is only found.
    """

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name, inner in [*sys.modules.items()]:
            if name.startswith(f"{module.__name__}.") and inner is not None:
                sys.modules.setdefault(f"apex{name.removeprefix(_OURS)}", inner)

"""Making `import apex` mean `preamp.compat.apex`, in this process or in every process of a script: `preamp run`."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from ..errors import PreampError, PreampWarning
from ._names import OURS, AbsentModules

IMPORTABLE = str(Path(__file__).parent / "_importable")
"""The folder to put on PYTHONPATH."""

_GRAFTED = (".amp", ".fp16_utils", ".parallel")
"""What NVIDIA removed: it is put on an Apex that is installed without it, whose other parts stay."""
_EXTENSIONS = {
    "amp_C": "._amp_c", "apex_C": ".parallel.distributed", "fused_adam_cuda": ".optimizers.fused_adam",
    "fused_layer_norm_cuda": "._fused_layer_norm_cuda",
}  # fmt: skip


def install_as_apex() -> ModuleType:
    """Have `import apex` and `from apex import amp`, ... find `preamp.compat.apex` in this process; returns `apex`.

    Where NVIDIA's Apex is installed, its modules stay, and `amp`, `fp16_utils` and `parallel` come from here. A second
    call changes nothing. Call it before anything imports `apex.amp`; RuntimeError if an `apex.amp` of another origin is
    loaded already. `uninstall_as_apex()` undoes it.

    >>> preamp.install_as_apex()
    >>> from apex import amp
    """
    if _installed() is not None:
        return sys.modules["apex"]
    loaded = sys.modules.get("apex.amp")
    if loaded is not None:
        raise AlreadyImported(
            f"apex.amp is loaded already, from {getattr(loaded, '__file__', 'elsewhere')}: two amps in one process "
            "would patch torch over one another. Call preamp.install_as_apex() first thing in the script, or start it "
            "with `preamp run`"
        )
    real = _real_apex()
    importlib.import_module(OURS)
    for name, module in [*sys.modules.items()]:
        before, ours, inner = name.partition(OURS)
        if ours and not before and (real is None or inner.startswith(_GRAFTED)):
            sys.modules[f"apex{inner}"] = module
    for part in _GRAFTED if real is not None else ():  # as attributes too, for who only says `import apex`
        setattr(real, part[1:], sys.modules[f"apex{part}"])
    for name, inner in _EXTENSIONS.items():
        if name not in sys.modules and importlib.machinery.PathFinder.find_spec(name, _elsewhere()) is None:
            sys.modules[name] = importlib.import_module(inner, OURS)
    sys.meta_path.insert(0, AbsentModules("apex", real))
    return sys.modules["apex"]


def uninstall_as_apex() -> None:
    """Undo `install_as_apex`: `apex` is found as it was before, or not at all.

    >>> preamp.uninstall_as_apex()
    """
    finder = _installed()
    if finder is None:
        return
    sys.meta_path.remove(finder)
    for name, module in [*sys.modules.items()]:
        first, _, inner = name.partition(".")
        if (first == "apex" or name in _EXTENSIONS) and getattr(module, "__name__", "").startswith(OURS):
            del sys.modules[name]
            if finder.real is not None:
                vars(finder.real).pop(inner, None)


def load_extension(name: str) -> None:
    """Put a compiled part of Apex in the place of the file in `IMPORTABLE` that is being imported as `name`.

    NVIDIA's, if it is installed; else ours.
    """
    spec = importlib.machinery.PathFinder.find_spec(name, _elsewhere())
    if spec is None or spec.loader is None:
        install_as_apex()
        sys.modules[name] = importlib.import_module(_EXTENSIONS[name], OURS)
        return
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _elsewhere() -> list[str]:
    """Where Python looks for modules, without `IMPORTABLE`."""
    return [entry for entry in sys.path if os.path.abspath(entry or ".") != os.path.abspath(IMPORTABLE)]


class AlreadyImported(PreampError, RuntimeError):
    """Another `apex.amp` is in use in this process."""


def environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of this process or of `base`, with which every Python process can import `apex`."""
    before = [part for part in base.get("PYTHONPATH", "").split(os.pathsep) if part and part != IMPORTABLE]
    return {**base, "PYTHONPATH": os.pathsep.join([IMPORTABLE, *before])}


def _installed() -> AbsentModules | None:
    return next((one for one in sys.meta_path if isinstance(one, AbsentModules) and one.package == "apex"), None)


def _real_apex() -> ModuleType | None:
    """NVIDIA's Apex, loaded, if it is installed and can be; None for any other package of that name."""
    module = sys.modules.get("apex")
    if module is not None and not str(getattr(module, "__file__", "")).startswith(IMPORTABLE):
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


def _is_nvidias(spec: importlib.machinery.ModuleSpec | None) -> bool:
    """Whether a package called apex is the one for training: another of that name is a web framework's add-on."""
    places = (spec.submodule_search_locations if spec is not None else None) or ()
    return any((Path(place) / "multi_tensor_apply").is_dir() for place in places)


# -- preamp run


class NothingToRun(PreampError, FileNotFoundError):
    """The script to run is not there."""


def command(target: str, arguments: Sequence[str], as_module: bool) -> list[str]:
    """The command line of the interpreter that runs us, flags included. `NothingToRun` if there is no such script."""
    if target.startswith("-"):
        raise NothingToRun(f"there is no option {target}; this command's own are listed by --help, and come first")
    where = "Write its path, as in path/to/script.py, or -m package.module; torchrun is -m torch.distributed.run"
    if not as_module and not Path(target).exists():
        raise NothingToRun(f"there is no script {target!r} in {Path.cwd()}. {where}")
    if target.endswith(".ipynb"):
        watch = "and in the notebook itself preamp.doctor.watch(model) sees what its cells train"
        raise NothingToRun(f"{target} is a notebook: jupyter nbconvert --to script makes a script of it, {watch}")
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, *(["-m"] if as_module else []), target, *arguments]


def run(target: str, arguments: Sequence[str], as_module: bool) -> int:
    """Run it in place of this process (where the system can: then this does not return); its exit status.

    `apex` is importable in that process and in all that it starts: the folder that holds it is on PYTHONPATH.
    """
    line = command(target, arguments, as_module)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        os.execve(line[0], line, environment())
    return subprocess.call(line, env=environment())

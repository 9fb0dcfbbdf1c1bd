"""Runs before a script that `preamp doctor` watches: has the watching begin when that script has imported torch.

Python loads one module of this name. Another one on the path is run as well, so that nothing is missing.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_one_that_we_hide() -> None:
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Steps aside when torch is imported, and has the loader that another finder gives call `begin` afterwards.

    The watching needs preamp whole: where the script imports preamp first, it begins after that.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in ("torch", "preamp"):
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                loader.exec_module = execute
                execute(module)
                from preamp.doctor.command.child import begin

                begin()

            loader.exec_module = exec_module
        return spec


if os.environ.get("PREAMP_DOCTOR"):
    sys.meta_path.insert(0, _AfterTorch())
_run_the_one_that_we_hide()

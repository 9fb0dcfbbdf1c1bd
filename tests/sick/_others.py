"""Runs scripts, each in a process of its own, with somebody else's debugging tool put in.

    python _others.py TOOL FOLDER SCRIPT ...

TOOL is `huggingface` (transformers' DebugUnderflowOverflow, on every trainable model from its first call on) or
`anomaly` (torch.autograd.set_detect_anomaly with its check for nan). In FOLDER, each script leaves what it and the tool
printed in NAME.out and NAME.err, and in NAME.json the exception that ended it, or null: type and text, the script's
lines in the traceback, outermost first, and the file that raised it.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

LIMIT = 200
"""Seconds that a script may take."""


def anomaly() -> Callable[[], None]:
    def attach() -> None:
        torch.autograd.set_detect_anomaly(True, check_nan=True)
        # Lightning would set it to what its Trainer was told, which is False in a script that is run unchanged
        torch.autograd.set_detect_anomaly = lambda *_, **__: contextlib.nullcontext()

    return attach


def huggingface() -> Callable[[], None]:
    """Attaches it as its user would: to the whole model, before its first step."""
    from transformers.debug_utils import DebugUnderflowOverflow

    parents: Any = weakref.WeakKeyDictionary()
    attached: set[nn.Module] = set()

    def registered(parent: nn.Module, name: str, child: Any) -> None:
        if isinstance(child, nn.Module):
            parents[child] = weakref.ref(parent)

    def called(module: nn.Module, args: Any) -> None:
        if module in attached or not any(p.requires_grad for p in module.parameters()):
            return
        root = module
        while (above := parents.get(root)) is not None and above() is not None:
            root = above()  # Lightning calls parts of its module, and never the module
        attached.update(root.modules())
        DebugUnderflowOverflow(root)

    def attach() -> None:
        hooks.register_module_module_registration_hook(registered)
        hooks.register_module_forward_pre_hook(called)

    return attach


TOOLS = {"huggingface": huggingface, "anomaly": anomaly}


def run(script: Path) -> dict[str, Any] | None:
    sys.argv = [str(script)]
    sys.path[0] = str(script.parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        return {
            "type": type(error).__name__,
            "text": str(error),
            "lines": [frame.lineno for frame in frames if frame.filename == str(script)],
            "inside": Path(frames[-1].filename).name,
        }
    return None


def main() -> None:
    tool, folder, *scripts = sys.argv[1:]
    attach = TOOLS[tool]()
    for script in map(Path, scripts):
        name = Path(folder) / script.stem
        child = os.fork()  # torch is imported once, which is most of what a run takes
        if child:
            os.waitpid(child, 0)
            continue
        signal.alarm(LIMIT)
        for number, end in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(name.with_suffix(end), os.O_WRONLY | os.O_CREAT), number)
        attach()
        name.with_suffix(".json").write_text(json.dumps(run(script)))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()

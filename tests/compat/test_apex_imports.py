"""Names of Apex's packages are what Apex's are, whichever way and order they are imported; what is missing says so."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"


def good(text: str, folder: Path) -> str:
    """What a script prints under `preamp run`."""
    file = folder / "script.py"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}
    line = [sys.executable, "-W", "ignore", "-m", "preamp", "run", str(file)]
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


WAYS = (
    "import apex.amp._amp_state",
    "from apex.amp._amp_state import _amp_state",
    "from apex.amp import _amp_state",
    "importlib.import_module('apex.amp._amp_state')",
    "import apex.parallel.LARC",
    "from apex.parallel.LARC import LARC",
    "from apex.parallel import LARC",
    "import apex.parallel.LARC as module",
)
OBJECTS = """
assert type(apex.amp._amp_state).__name__ == "AmpState" and isinstance(apex.parallel.LARC, type), ways
assert apex.amp._amp_state is importlib.import_module("apex.amp._amp_state")._amp_state is apex.amp._amp_state
assert apex.parallel.LARC is importlib.import_module("apex.parallel.LARC").LARC is apex.parallel.LARC
modules = ("amp.amp amp.handle amp.frontend amp._initialize amp.lists.torch_overrides parallel.distributed "
           "parallel.sync_batchnorm normalization.fused_layer_norm fp16_utils.loss_scaler mlp.mlp "
           "fused_dense.fused_dense contrib.layer_norm.layer_norm contrib.clip_grad.clip_grad optimizers.fused_adam "
           "multi_tensor_apply.multi_tensor_apply contrib.optimizers.fused_lamb contrib.xentropy.softmax_xentropy "
           " parallel.optimized_sync_batchnorm amp.scaler")
for name in modules.split():
    module = importlib.import_module(f"apex.{name}")
    parent = sys.modules[f"apex.{name}".rpartition(".")[0]]
    assert module is getattr(parent, name.rpartition(".")[2]) and type(module).__name__ == "module", name
"""


@pytest.mark.slow
def test_names_that_are_modules_and_objects_at_once(tmp_path: Path) -> None:
    lines = ["import importlib, sys, apex", *[f"{way}{OBJECTS}".replace("ways", repr(way)) for way in WAYS]]
    assert good("\n".join([*lines, "print('done')"]), tmp_path) == "done\n"


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import apex", "import preamp.compat.apex as apex"])
def test_attributes_after_a_bare_import(tmp_path: Path, first: str) -> None:
    """Whatever can be imported under apex is there as an attribute, too, and nothing else is."""
    out = good(f"""
        {first}
        import importlib, pkgutil
        from operator import attrgetter
        names = (
            "amp.scaler amp.compat amp.rnn_compat amp.lists.torch_overrides parallel.distributed mlp.mlp"
            " contrib.optimizers.fp16_optimizer contrib.optimizers.fused_sgd multi_tensor_apply.multi_tensor_apply"
            " parallel.optimized_sync_batchnorm contrib.xentropy.softmax_xentropy fused_dense.fused_dense"
        )
        found = [attrgetter(name)(apex) for name in names.split()]
        assert found == [importlib.import_module("apex." + name) for name in names.split()]
        for package in (apex, apex.amp, apex.contrib, apex.contrib.optimizers, apex.parallel, apex.optimizers):
            assert not any(hasattr(package, name) for name in ("nothing", "__wrapped__", "RNN", "fmha", "_ipython_"))
            for each in pkgutil.iter_modules(package.__path__):
                compiled = each.name.startswith("_fused")  # which scripts know by another name
                assert hasattr(package, each.name) or compiled or each.name == "multiproc", each
        print(len(found))
    """, tmp_path)  # fmt: skip
    assert out == "12\n"


@pytest.mark.slow
def test_the_state_that_scripts_reach_for(tmp_path: Path) -> None:
    out = good("""
        import apex.amp._amp_state
        import torch
        from apex.parallel.LARC import LARC
        import apex
        from apex.parallel import LARC as Again
        m = torch.nn.Linear(2, 2)
        o = torch.optim.SGD(m.parameters(), lr=0.1)
        assert LARC is Again is apex.parallel.LARC and apex.parallel.LARC(o)
        m, o = apex.amp.initialize(m, o, opt_level="O1", verbosity=0)
        print(apex.amp._amp_state.loss_scalers[0].loss_scale())
    """, tmp_path)  # fmt: skip
    assert out == "65536.0\n"


ABSENT = {
    "transformer": "megatron.core", "RNN": "torch.nn.LSTM", "pyprof": "torch.profiler",
    "reparameterization": "weight_norm", "contrib.multihead_attn": "MultiheadAttention",
    "contrib.groupbn": "channels_last", "contrib.sparsity": "semi_structured", "contrib.fmha": "scaled_dot_product",
    "contrib.transducer": "rnnt_loss",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("door", ["apex", "preamp.compat.apex"])
def test_what_stays_out_is_one_error(tmp_path: Path, door: str) -> None:
    """In all spellings, several times; also for scripts that catch ImportError or ModuleNotFoundError."""
    lines = []
    for name, alternative in ABSENT.items():
        parent, _, child = f"{door}.{name}".rpartition(".")
        ways = (
            f"import {door}.{name}", f"from {parent} import {child}", f"from {door}.{name} import Something",
            f"from {door}.{name}.part import Something", f"import {door}.{name}.part as part",
            f"importlib.import_module('{door}.{name}')", f"__import__('{door}.{name}')",
        )  # fmt: skip
        lines += [f"refused({way!r}, 'apex.{name}', {alternative!r})" for way in (*ways, ways[1])]
        lines += [f"absent('import {parent}; {parent}.{child}', {alternative!r})"]
        lines += [f"import {parent}", f"assert not hasattr({parent}, {child!r})"]
    head = """
import importlib

def refused(way, name, alternative):
    try:
        exec(way, {"importlib": importlib})
    except ModuleNotFoundError as error:
        assert name in str(error) and alternative in str(error) and error.name == name, (way, str(error))
    else:
        raise AssertionError(way)

def absent(way, alternative):
    try:
        exec(way, {})
    except AttributeError as error:
        assert alternative in str(error), (way, str(error))
    else:
        raise AssertionError(way)

"""
    assert good("\n".join([head.strip(), *lines, "print('done')"]), tmp_path) == "done\n"


@pytest.mark.slow
def test_compiled_parts_may_be_the_first_import(tmp_path: Path) -> None:
    """And NVIDIA's are taken where they are installed."""
    out = good("""
        import importlib.util
        names = ("amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")
        assert all(map(importlib.util.find_spec, names))
        import amp_C
        import apex_C
        import fused_adam_cuda
        import fused_layer_norm_cuda
        import sys
        first = amp_C
        import apex
        import amp_C
        from apex.amp import __version__
        print(first is amp_C is sys.modules["amp_C"], callable(amp_C.multi_tensor_scale), callable(apex_C.flatten))
        print(apex.amp.__version__.VERSION == __version__.VERSION, type(__version__).__name__)
        print(apex.contrib.optimizers.FP16_Optimizer.__name__, callable(fused_adam_cuda.adam))
        print(callable(fused_layer_norm_cuda.forward))
    """, tmp_path)  # fmt: skip
    assert out == "True True True\nTrue module\nFP16_Optimizer True\nTrue\n"
    (tmp_path / "amp_C.py").write_text("FROM = 'nvidia'\n")
    assert good("import amp_C\nprint(amp_C.FROM)", tmp_path) == "nvidia\n"


@pytest.mark.slow
def test_names_that_nobody_knows(tmp_path: Path) -> None:
    out = good("""
        for way in ("import apex.nothing", "from apex.nothing.at import All", "from apex.contrib.nothing import At"):
            try:
                exec(way)
            except ModuleNotFoundError as error:
                assert "nothing" in error.name and "install NVIDIA's Apex" in str(error), error
        import amp_C
        try:
            amp_C.multi_tensor_lamb_stage1_cuda
        except AttributeError as error:
            print("multi_tensor_lamb" in str(error), hasattr(amp_C, "multi_tensor_nothing"))
    """, tmp_path)  # fmt: skip
    assert out == "True False\n"

"""`import apex` by install_as_apex and by `preamp run`: in processes of their own, since imports are for good.

Names of Apex's packages are what Apex's are, whichever way and order they are imported; what is missing says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"

REAL = {
    "apex/__init__.py": "from . import optimizers\n",
    "apex/optimizers/__init__.py": "FROM = 'nvidia'\n",
    "apex/multi_tensor_apply/__init__.py": "",
    "apex/contrib/__init__.py": "",
    "apex/contrib/thing.py": "FROM = 'nvidia'\n",
}


Done = subprocess.CompletedProcess[str]


def python(*arguments: str | Path, path: Path | None = None, cwd: Path | None = None) -> Done:
    """This Python in a fresh process; `path`: a folder to import from."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(SOURCE), *([str(path)] if path else [])])
    line = [sys.executable, "-W", "error", "-W", "ignore::FutureWarning", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env=env, cwd=cwd, timeout=120)


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return file


def good(done: Done) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed(text: str, folder: Path) -> str:
    """What a script prints under `preamp run`."""
    return good(python("-m", "preamp", "run", script(folder, text)))


def test_every_spelling_of_an_import(tmp_path: Path) -> None:
    file = script(tmp_path, """
        import importlib.util
        import sys
        import preamp
        assert importlib.util.find_spec("apex") is None
        apex = preamp.install_as_apex()
        assert preamp.install_as_apex() is apex
        import apex as again
        assert again is apex and apex is sys.modules["apex"]
        from apex import amp
        import apex.amp
        import preamp.compat.apex as ours
        assert amp is ours.amp is apex.amp is sys.modules["apex.amp"]
        assert amp.__spec__.name == "preamp.compat.apex.amp"
        from apex.amp import _amp_state
        from apex.amp._amp_state import _amp_state as state, master_params, maybe_print, warn_or_err
        assert state is _amp_state
        from apex.amp import amp as inner, scaler, handle, opt, utils, wrap, frontend, rnn_compat
        from apex.amp.amp import _DECORATOR_HANDLE, _USER_CAST_REGISTRY, _USER_PROMOTE_REGISTRY
        from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
        import apex.amp.lists.torch_overrides as same
        assert same is torch_overrides
        from apex.amp._initialize import _initialize
        from apex.amp._process_optimizer import AmpOptimizerState, _process_optimizer
        from apex.amp.scaler import LossScaler
        from apex.amp.frontend import Properties, opt_levels
        from apex.amp.handle import AmpHandle, NoOpHandle
        from apex.amp.opt import OptimWrapper
        from apex.fp16_utils import *
        from apex.fp16_utils import FP16_Optimizer, network_to_half
        from apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler as Old
        from apex.fp16_utils.fp16_optimizer import FP16_Optimizer
        from apex.parallel import DistributedDataParallel, Reducer, SyncBatchNorm, convert_syncbn_model, LARC
        from apex.parallel.LARC import LARC
        from apex.parallel.distributed import flat_dist_call
        from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD, FusedNovoGrad, FusedAdagrad
        from apex.normalization.fused_layer_norm import FusedLayerNorm
        from apex.normalization import FusedRMSNorm
        from apex.multi_tensor_apply import multi_tensor_applier
        import amp_C
        from apex_C import flatten, unflatten
        assert multi_tensor_applier.available
        preamp.uninstall_as_apex()
        preamp.uninstall_as_apex()
        assert importlib.util.find_spec("apex") is None and "apex.amp" not in sys.modules
        preamp.install_as_apex()
        from apex import amp
        print("done")
    """)  # fmt: skip
    assert good(python(file)) == "done\n"


@pytest.mark.slow
def test_grafted_onto_an_apex_without_amp(tmp_path: Path) -> None:
    for name, text in REAL.items():
        script(tmp_path, text, name)
    file = script(tmp_path / "s", """
        import sys
        import preamp
        preamp.install_as_apex()
        import apex
        import apex.optimizers, apex.contrib.thing
        assert apex.optimizers.FROM == apex.contrib.thing.FROM == "nvidia" and not hasattr(apex, "_notice")
        assert apex.amp.initialize.__module__.startswith("preamp") and apex.parallel.LARC
        from apex.fp16_utils import FP16_Optimizer
        for way in ("from apex import RNN", "import apex.RNN", "from apex.RNN.cells import mLSTM"):
            try:
                exec(way)
            except ImportError as error:
                assert "torch.nn.LSTM" in str(error), way
            else:
                raise AssertionError(way)
        preamp.uninstall_as_apex()
        assert not hasattr(apex, "amp") and "apex.amp" not in sys.modules and apex.optimizers.FROM == "nvidia"
        preamp.install_as_apex()  # onto one that is loaded already
        assert apex is sys.modules["apex"] and apex.amp.scale_loss
        print("done")
    """)  # fmt: skip
    assert good(python(file, path=tmp_path)) == "done\n"
    file = script(tmp_path / "s", "import apex\nfrom apex import amp\nprint(apex.optimizers.FROM, amp.__name__)\n")
    assert good(python("-m", "preamp", "run", file, path=tmp_path)) == "nvidia preamp.compat.apex.amp\n"


@pytest.mark.slow
def test_an_apex_that_cannot_be_imported_is_replaced(tmp_path: Path) -> None:
    for name, text in {
        **REAL,
        "apex/__init__.py": "from . import optimizers\nraise ImportError('libcudart')\n",
    }.items():
        script(tmp_path, text, name)
    file = script(tmp_path / "s", """
        import warnings
        import preamp
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            preamp.install_as_apex()
        assert "libcudart" in str(caught[0].message)
        from apex.optimizers import FusedAdam
        print(FusedAdam.__module__)
    """)  # fmt: skip
    assert good(python(file, path=tmp_path)).startswith("preamp.compat.apex")


@pytest.mark.slow
def test_another_package_called_apex_is_hidden(tmp_path: Path) -> None:
    script(tmp_path, "PYRAMID = True\n", "apex/__init__.py")
    file = script(tmp_path / "s", "import preamp\npreamp.install_as_apex()\nimport apex\nprint(apex.__name__)\n")
    assert good(python(file, path=tmp_path)) == "preamp.compat.apex\n"


def test_an_amp_that_is_loaded_already_is_not_mixed_with_ours(tmp_path: Path) -> None:
    for name, text in {**REAL, "apex/amp/__init__.py": ""}.items():
        script(tmp_path, text, name)
    file = script(tmp_path / "s", """
        import apex.amp
        import preamp
        try:
            preamp.install_as_apex()
        except RuntimeError as error:
            print("refused" if "first thing" in str(error) else error)
    """)  # fmt: skip
    assert good(python(file, path=tmp_path)) == "refused\n"


SCRIPT = """
    import sys
    import torch
    from apex import amp

    def work(rank, queue=None):
        from apex import amp
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        with amp.scale_loss(model(torch.ones(1, 2)).float().sum() * 1e-3, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        sys.stdout.write(f"rank {rank} trained\\n")  # one write: print makes two of it where output is not buffered
        sys.stdout.flush()

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            import apex.amp
            return torch.tensor(len(apex.amp.__name__))

    if __name__ == "__main__":
        print(sys.argv[1:], __file__.endswith("script.py"), sys.path[0])
        work("main")
        torch.multiprocessing.spawn(work, nprocs=2)
        loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")
        print([int(x) for x in loader])
        import subprocess
        child = "import apex.amp; print('child', apex.amp.__name__, flush=True)"
        subprocess.run([sys.executable, "-c", child], check=True)
        sys.exit(7)
"""


@pytest.mark.slow
def test_run_reaches_every_process(tmp_path: Path) -> None:
    file = script(tmp_path, SCRIPT)
    done = python("-m", "preamp", "run", file, "--lr", "0.1", "-m", "--help", cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"['--lr', '0.1', '-m', '--help'] True {tmp_path}"
    assert sorted(lines[1:4]) == ["rank 0 trained", "rank 1 trained", "rank main trained"]
    assert lines[4:] == ["[22, 22]", "child preamp.compat.apex.amp"]


@pytest.mark.slow
def test_run_a_module_and_torchrun(tmp_path: Path) -> None:
    script(tmp_path, "", "package/__init__.py")
    script(tmp_path, "import sys\nimport apex.amp\nprint(__name__, sys.argv[1:])\n", "package/train.py")
    out = good(python("-m", "preamp", "run", "-m", "package.train", "--x", cwd=tmp_path))
    assert out == "__main__ ['--x']\n"
    # torchrun's processes do not buffer: print would write a line in pieces, between which the other rank may write
    text = "import os, sys, apex.amp\nsys.stdout.write(f\"rank {os.environ['RANK']}\\n\")\n"
    file = script(tmp_path, text, "ranks.py")
    standalone = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", file)
    done = python("-m", "preamp", "run", "-m", *standalone, cwd=tmp_path)
    assert sorted(good(done).split("\n")) == ["", "rank 0", "rank 1"]


@pytest.mark.slow
def test_run_tells_of_a_script_that_is_not_there(tmp_path: Path) -> None:
    done = python("-m", "preamp", "run", "nowhere.py", cwd=tmp_path)
    assert done.returncode == 2 and "no script 'nowhere.py'" in done.stderr
    file = script(tmp_path, "import apex.amp\nraise KeyError('of the script')\n")
    done = python("-m", "preamp", "run", file)
    assert done.returncode == 1 and "of the script" in done.stderr and "preamp" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["SIGINT", "SIGTERM"])
def test_signals_reach_the_script(tmp_path: Path, stop: str) -> None:
    import signal

    file = script(tmp_path, """
        import signal, time
        import apex.amp
        def caught(number, frame):
            print("caught", signal.Signals(number).name, flush=True)
            raise SystemExit(9)
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, caught)
        print("ready", flush=True)
        time.sleep(60)
    """)  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    line = [sys.executable, "-m", "preamp", "run", str(file)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(getattr(signal, stop))
        assert process.stdout.read() == f"caught {stop}\n"
    assert process.returncode == 9


# -- names

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
"""


@pytest.mark.slow
def test_names_that_are_modules_and_objects_at_once(tmp_path: Path) -> None:
    lines = ["import importlib, sys, apex", *[f"{way}{OBJECTS}".replace("ways", repr(way)) for way in WAYS]]
    lines += ["from apex.amp import amp", "amp.initialize, amp.state_dict, amp.load_state_dict, amp.opt_levels"]
    lines += ["from apex.amp.amp import initialize, half_function", "from apex.amp.frontend import O1, O3, Properties"]
    assert printed("\n".join([*lines, "print('done')"]), tmp_path) == "done\n"


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import apex", "import preamp.compat.apex as apex"])
def test_attributes_after_a_bare_import(tmp_path: Path, first: str) -> None:
    """Whatever can be imported under apex is there as an attribute, too, and nothing else is."""
    out = printed(f"""
        {first}
        import importlib, pkgutil
        from operator import attrgetter
        names = (
            "amp.scaler amp.rnn_compat amp.lists.torch_overrides parallel.distributed mlp.mlp"
            " contrib.optimizers.fp16_optimizer contrib.optimizers.fused_sgd multi_tensor_apply.multi_tensor_apply"
            " parallel.optimized_sync_batchnorm contrib.xentropy.softmax_xentropy fused_dense.fused_dense"
        )
        names += (
            " amp.amp amp.handle amp.frontend amp._initialize amp.opt parallel.sync_batchnorm optimizers.fused_adam"
            " normalization.fused_layer_norm fp16_utils.loss_scaler contrib.layer_norm.layer_norm"
            " contrib.clip_grad.clip_grad contrib.optimizers.fused_lamb optimizers.fused_lamb fused_dense"
        )
        found = [attrgetter(name)(apex) for name in names.split()]
        assert all(type(module).__name__ == "module" for module in found)
        assert found == [importlib.import_module("apex." + name) for name in names.split()]
        for package in (apex, apex.amp, apex.contrib, apex.contrib.optimizers, apex.parallel, apex.optimizers):
            assert not any(hasattr(package, name) for name in ("nothing", "__wrapped__", "RNN", "fmha", "_ipython_"))
            for each in pkgutil.iter_modules(package.__path__):
                compiled = each.name.startswith("_fused")  # which scripts know by another name
                assert hasattr(package, each.name) or compiled or each.name == "multiproc", each
        print(len(found))
    """, tmp_path)  # fmt: skip
    assert out == "25\n"


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

"""
    assert printed("\n".join([head.strip(), *lines, "print('done')"]), tmp_path) == "done\n"


@pytest.mark.slow
def test_compiled_parts_may_be_the_first_import(tmp_path: Path) -> None:
    """And NVIDIA's are taken where they are installed."""
    out = printed("""
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
    assert printed("import amp_C\nprint(amp_C.FROM)", tmp_path) == "nvidia\n"


@pytest.mark.slow
def test_names_that_nobody_knows(tmp_path: Path) -> None:
    out = printed("""
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

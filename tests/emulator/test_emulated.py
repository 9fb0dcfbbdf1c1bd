"""GPU code of the kernels, run on the fake CUDA device: tests of kernels, of captures, of steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ..pretend.device import missing
from ..pretend.running import run, run_tests

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=f"no fake CUDA device: {missing()}"),
    pytest.mark.timeout(600),
]

PLUGIN = "tests.emulator.plugin"
KERNELS = [f"tests/kernels/test_{name}.py" for name in ("kernels", "read_kernel", "eight_bit_kernels")]
WHOLE = "not full_size and not large_parameter"
"""Without full-size networks, which take minutes on a CPU, and without sizes that CUDA's allocator rounds."""


def on_the_emulator(*arguments: str, python: str = sys.executable) -> None:
    run_tests(*arguments, plugin=PLUGIN, python=python, PREAMP_NO_TRITON="")


@pytest.mark.slow
def test_kernels() -> None:
    """The tests that Triton's interpreter runs in `tests/kernels`, as GPU code."""
    on_the_emulator("--deselect", f"{KERNELS[0]}::test_in_the_interpreter", *KERNELS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["captured", "cuda", "eight_bit", "fused", "one_rank", "schedules_cuda", "several", "step_engine"],
)
def test_what_wants_a_gpu(name: str) -> None:
    on_the_emulator("-m", "gpu", "-k", WHOLE, f"tests/gpu/test_{name}.py")


OTHER = Path(sys.prefix) / "triton-3.6" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.skipif(not OTHER.exists(), reason="no environment with Triton 3.6 beside this one: ./dev setup makes it")
@pytest.mark.parametrize("name", ["captured", "eight_bit", "fused"])
def test_with_another_triton(name: str) -> None:
    """The release that machines with a GPU may have, whose code has other layouts."""
    on_the_emulator("-m", "gpu", "-k", WHOLE, f"tests/gpu/test_{name}.py", python=str(OTHER))


SCRIPT = """
import torch
from tests.emulator import plugin
from tests.kernels import calls
from tests.kernels.steps import ADAM
params, step = [torch.ones(5, device="cuda")], torch.zeros((), device="cuda")

def take():
    calls.adam_(params, params, params, params, [], None, step, **ADAM)

{prepared}
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    take()
"""


@pytest.mark.slow
@pytest.mark.parametrize("prepared", ["", "take()"])
def test_a_capture_loads_no_kernel(prepared: str) -> None:
    done = run("-c", SCRIPT.format(prepared=prepared), PREAMP_NO_TRITON="")
    if prepared:
        assert done.returncode == 0, done.stderr[-2000:]
    else:
        assert done.returncode != 0
        assert (
            "operation not permitted when stream is capturing: the module of prepare_numbers is loaded" in done.stderr
        )

"""GPU tests, run on the fake CUDA device: the host's part of the work is the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .device import missing
from .running import run, run_tests

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no fake CUDA device: {missing()}")

NAMES = ["captured", "cuda", "doctor rules schedules_cuda several", "one_rank", "step_engine"]
WHOLE = "not full_size and not large_parameter and not four_launches"
"""Without full-size networks, which take minutes on a CPU, and without counts of launches that only Triton reaches."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_what_wants_a_gpu(name: str) -> None:
    files = [f"tests/gpu/test_{each}.py" for each in name.split()]
    run_tests("-m", "gpu", "-k", WHOLE, *files, plugin="tests.pretend.plugin")


SEVERAL = [pytest.param(name, marks=pytest.mark.slow) for name in (
    "equal", "framed", "meshes", "parted", "piped", "reshard", "rivals", "saving", "scaled",
    "sharded", "undisturbed", "wrapped",
)]  # fmt: skip

ALL_SLOW = ("framed", "meshes", "piped", "rivals")
"""Files whose every test is slow on a CPU."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SEVERAL)
def test_ranks_with_a_gpu_each(name: str) -> None:
    chosen = [] if name in ALL_SLOW else ["-m", "not slow"]
    if name == "undisturbed":
        chosen = ["-k", "test_neutral_events and 2-0-6"]  # all of that are slow
    run_tests(*chosen, f"tests/distributed/test_{name}.py", PREAMP_TESTS_DEVICE="cuda")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("suite", ["lists", "steps", "compiled", "losses", "memory"])
def test_the_benchmarks(suite: str, tmp_path: Path) -> None:
    """A suite of `./dev gpu` completes: no contender fails, and none of preamp's makes a host sync."""
    done = run(
        "-c",
        f"""
import tests.pretend.plugin
from benchmarks.__main__ import main
main("{suite} --tiny --rounds 1 --device cuda --out {tmp_path}".split())
""",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads((tmp_path / "results.json").read_text())["suites"][suite]
    found = {f"{row['name']}, {each['name']}": each for row in rows for each in row["contenders"]}
    assert len(found) >= 18
    assert {name: each["error"] for name, each in found.items() if each.get("error")} == {}
    waiting = {name for name, each in found.items() if each.get("waits")}
    assert all(name.endswith("torch.amp fp16, foreach") for name in waiting), waiting
    assert bool(waiting) == (suite == "steps")  # which has that contender


UNLIKE = {
    "sparse.sampled_addmm", "sparse.mm", "to_sparse", "nn.functional.ctc_loss", "as_strided", "tensor_split",
    "nn.functional.dropout", "nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward",
}  # fmt: skip
"""Operators that the device lacks, or that CUDA composes differently: dropout, and operators that contain it."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rules_are_those_of_the_cpu() -> None:
    done = run("-m", "tests.pretend.operators")
    *names, compared = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(names) == UNLIKE
    assert int(compared.split()[0]) > 4000


LINES = {
    "(x @ x.t()).softmax(-1).add_(1).cpu": None,
    "x.sum().item()": "synchronizing",
    "x[x > 2]": "synchronizing",
    "x.cpu()": "synchronizing",
    "torch.tensor([1], device='cuda')": "synchronizing",
    "x.to('cpu', non_blocking=True)": None,
    "x + torch.ones(2, 3)": "same device",
    "x + torch.ones(2, 3, device='cuda:1')": "same device",
    "x @ torch.empty(3, 2, device='cuda:1')": "same device",
    "torch.cat([x, torch.empty(2, 3, device='cuda:1')])": "same device",
    "x.to('cuda:1') + torch.ones(2, 3, device='cuda:1')": None,
    "x.numpy()": "Use Tensor.cpu",
    "torch.nn.functional.layer_norm(x.half(), (3,), torch.ones(3, device='cuda'))": "expected scalar type",
    "x.new_empty(3).isnan": None,
}
"""What each raises while every sync is an error; None for nothing."""


@pytest.mark.slow  # as all that needs the device: it is a minute of C++ to compile
def test_it_refuses_what_a_gpu_does() -> None:
    done = run(
        "-c",
        f"""
import json, torch
from tests.pretend.device import pretend

pretend(2)
x = torch.arange(6.0, device="cuda").view(2, 3)
raised = []
for line in {list(LINES)!r}:
    torch.cuda.set_sync_debug_mode("error")
    try:
        eval(line)
        raised.append(None)
    except Exception as error:
        raised.append(str(error))
    torch.cuda.set_sync_debug_mode("default")
print(json.dumps(raised))
""",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for (line, why), raised in zip(LINES.items(), json.loads(done.stdout), strict=True):
        assert raised is None if why is None else why in (raised or ""), (line, raised)

"""A plan and `session.memory()` count the same rows: the one without memory, the other on the tensors of a run.

Steps under FSDP2 and DistributedDataParallel, counted: `session.memory()` of rank 0, and what it sent, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import preamp
from preamp.errors import OptimizerError, PolicyError, PreampError, SessionError
from preamp.plan import plan
from preamp.plan._shapes import count_of

from ..rows import over
from ..session.toys import squares

CASES = {
    "FSDP2 O0": ("fsdp2", "O0", "float32"), "FSDP2 O2": ("fsdp2", "O2", "float32"),
    "FSDP2 O5": ("fsdp2", "O5", "float32"), "FSDP2 O4, 8 bits": ("fsdp2", "O4", "8bit"),
    "DDP O0": ("ddp", "O0", "float32"), "DDP O4": ("ddp", "O4", "float32"), "DDP O5": ("ddp", "O5", "float32"),
}  # fmt: skip


def of_even_rows() -> nn.Sequential:
    """First dimensions are even; three tensors are large enough for moments in 8 bits, one has rows of whole blocks."""
    return nn.Sequential(
        nn.Linear(64, 66), nn.LayerNorm(66), nn.GELU(), nn.Linear(66, 64), nn.Linear(64, 256), nn.Linear(256, 16)
    )  # fmt: skip


def size(tensor: Any) -> int:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.numel() * local.element_size()


class Sent(TorchDispatchMode):
    """Bytes that this rank sends in FSDP2's collectives, if they are rings."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = {"_allgather_base_": 1, "_reduce_scatter_base_": 0}
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d" and name in own:
            self.bytes += (dist.get_world_size() - 1) * size(args[own[name]])
        return func(*args, **(kwargs or {}))


def trained(shard: str, level: str, states: str) -> dict[str, Any]:
    model: Any = of_even_rows()
    if shard == "fsdp2":
        mixed = preamp.policy(level).fsdp()
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer, mp_policy=mixed)
        fully_shard(model, mp_policy=mixed)
    else:
        model = DistributedDataParallel(model)
    reduced = 0

    def hook(state: Any, bucket: Any) -> Any:
        nonlocal reduced
        reduced += size(bucket.buffer())
        return allreduce_hook(None, bucket)

    hook.__annotations__.clear()
    optimizer = preamp.optim.AdamW(model.parameters(), states=states)
    with preamp.prepare(model, optimizer, level=level) as session:
        if shard == "ddp":
            model.register_comm_hook(None, hook)
        for _ in range(2):
            session.zero_grad()
            reduced = 0
            with Sent() as sent, session.autocast():
                session.backward(model(torch.randn(8, 64)).float().square().mean())
            session.step()
        # of S bytes a ring all-reduce sends 2 (N-1)/N S, which is S for two ranks
        return {"rows": session.memory().to_json()["rows"], "sent": sent.bytes if shard == "fsdp2" else reduced}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    told = {name: trained(*case) for name, case in CASES.items()}
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(told))
    dist.destroy_process_group()


pytestmark = pytest.mark.filterwarnings("ignore::preamp.errors.PreampWarning")  # of epsilons
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5", "O5,masters=no", "O2,norms=fp16")
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": preamp.optim.AdamW,
    "AdamW, 8 bits": lambda p: preamp.optim.AdamW(p, states="8bit"),
    "Adam, AMSGrad": lambda p: preamp.optim.Adam(p, amsgrad=True),
    "SGD": lambda p: preamp.optim.SGD(p, 0.1, momentum=0.9),
    "Adagrad": preamp.optim.Adagrad,
    "LAMB": preamp.optim.LAMB,
    "NovoGrad": preamp.optim.NovoGrad,
    "Lion": preamp.optim.Lion,
    "torch AdamW": torch.optim.AdamW,
    "torch SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}


def by_chance(p: Iterable[Any]) -> torch.optim.Optimizer:
    return preamp.optim.AdamW(p, master=None, rounding="stochastic")


def build() -> nn.Sequential:
    """Two tensors of 4096 elements or more, one of them no multiple of 256; norms with and without buffers."""
    return nn.Sequential(
        nn.Linear(64, 65), nn.LayerNorm(65), nn.GELU(), nn.Linear(65, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)
    )  # fmt: skip


def rows(memory: preamp.session.Memory) -> dict[tuple[str, torch.dtype], int]:
    return {(row.kind, row.dtype): row.bytes for row in memory.rows}


def step(session: preamp.Session, model: nn.Module) -> None:
    squares(session, model, torch.randn(8, 64))
    session.step()


@over(name=OPTIMIZERS, level=LEVELS)
def test_a_plan_is_what_a_run_holds(name: str, level: str) -> None:
    made = plan(build(), OPTIMIZERS[name], level=level)
    model = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    peaks: list[int] = []
    with preamp.prepare(model, optimizer, policy=level) as session:
        for _ in range(2):
            session.zero_grad()
            if name.startswith("torch"):  # a hook on ours would see float32 gradients, which it does not need
                handle = optimizer.register_step_post_hook(lambda *_: peaks.append(session.memory().total))
                step(session, model)
                handle.remove()
            else:
                step(session, model)
        assert rows(session.memory()) == rows(made.held)
        assert session.memory().parameters == made.held.parameters == sum(p.numel() for p in model.parameters())
        assert made.peak == (peaks[-1] if peaks else made.held.total)
        if not level.startswith(("O2", "O5")) or "masters=no" in level:
            assert made.held.bytes_of("masters") == 0


def test_memory_is_what_lies_in_storages() -> None:
    model = build()
    optimizer = preamp.optim.AdamW(model.parameters())
    with preamp.prepare(model, optimizer, level="O2") as session:
        step(session, model)
        kept: list[Tensor] = [*model.parameters(), *model.buffers(), *session.state_dict()["masters"].values()]
        kept += [p.grad for p in model.parameters() if p.grad is not None]
        kept += [value for state in optimizer.state.values() for value in state.values()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        assert session.memory().total == sum(storages.values())
        assert "masters" in session.memory().to_table().to_text()
        assert json.loads(json.dumps(session.memory().to_json()))["total"] == session.memory().total
    with pytest.raises(SessionError, match="closed"):
        session.memory()


@pytest.mark.parametrize("master", ["split", "split24"])
def test_split_masters_and_8_bits(master: str) -> None:
    def make(p: Iterable[Any]) -> torch.optim.Optimizer:
        return preamp.optim.AdamW(p, master=master, states="8bit")

    model = build()
    with preamp.prepare(model, make(model.parameters()), level="O5") as session:
        step(session, model)
        assert rows(session.memory()) == rows(plan(build(), make, level="O5").held)


@pytest.mark.parametrize(
    ("level", "make", "each"),
    [
        ("O0", preamp.optim.AdamW, 16.0), ("O2", preamp.optim.AdamW, 16.0), ("O3", preamp.optim.AdamW, 8.0),
        ("O5", lambda p: preamp.optim.AdamW(p, master="split"), 14.0),
        ("O5", lambda p: preamp.optim.AdamW(p, states="8bit"), 10.03),
        ("O5", lambda p: preamp.optim.AdamW(p, master="split", states="8bit"), 8.03),
        ("O5", lambda p: preamp.optim.AdamW(p, master="split24", states="8bit"), 7.03),
        ("O5", lambda p: preamp.optim.SGD(p, 0.1), 8.0),
    ],
)  # fmt: skip
def test_bytes_a_parameter(level: str, make: Make, each: float) -> None:
    assert plan("7B", make, level=level).held.total / 7e9 == pytest.approx(each, abs=0.005)


def test_states_that_are_no_tensors() -> None:
    def counting(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(params)
        optimizer.state[optimizer.param_groups[0]["params"][0]]["n"] = 1
        return optimizer

    assert len({plan("1M", make, shard="fsdp2", world=2).held.total for make in (torch.optim.SGD, counting)}) == 1


def test_a_model_is_only_read() -> None:
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan(model, level="O2")
    assert all(p.grad is None and p.dtype is torch.float32 for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    frozen = build()
    frozen[0].requires_grad_(False)
    assert plan(frozen, level="O4").held.bytes_of("gradients") < plan(model, level="O4").held.bytes_of("gradients")


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    """What two processes counted (`main`)."""
    ranks = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--module", __name__)
    line = [sys.executable, "-m", *ranks]
    root = Path(__file__).parents[2]
    ran = subprocess.run(line, capture_output=True, text=True, cwd=root, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(counted: dict[str, Any], case: str) -> None:
    shard, level, states = CASES[case]
    made = plan(
        of_even_rows(), lambda p: preamp.optim.AdamW(p, states=states), level=level, shard=shard, world=2
    )  # fmt: skip
    seen = {(row["kind"], row["dtype"]): row["bytes"] for row in counted[case]["rows"]}
    assert {(row["kind"], row["dtype"]): row["bytes"] for row in made.held.to_json()["rows"]} == seen
    assert made.sent == counted[case]["sent"]
    assert "sent in a step" in made.to_table().to_text()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 10**15), st.sampled_from(["", "k", "K", "M", "B", "T"]))
def test_numbers_that_people_write(number: int, unit: str) -> None:
    times = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}[unit.lower()]
    if number * times <= 10**18:
        assert count_of(f"{number}{unit}") == number * times
    assert count_of("1.5B") == count_of(1.5e9) == 1_500_000_000


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (PreampError, "no number of parameters", {"params": "many"}),
        (PreampError, "whole number", {"params": "0"}),
        (PreampError, "nothing to plan", {"params": nn.Identity()}),
        (PreampError, "shard='zero'", {"shard": "zero"}),
        (PreampError, "train apart", {"world": 8}),
        (PreampError, "how many ranks", {"world": 1, "shard": "ddp"}),
        (PreampError, "how many ranks", {"world": True}),
        (PolicyError, "O9", {"level": "O9"}),
        (PolicyError, "split", {"level": "O2", "optimizer": lambda p: preamp.optim.AdamW(p, master="split")}),
        (OptimizerError, "states='4bit'", {"optimizer": lambda p: preamp.optim.AdamW(p, states="4bit")}),
        (PreampError, "ASGD cannot step tensors without memory", {"optimizer": torch.optim.ASGD}),
        (PreampError, "optimizer=LBFGS", {"optimizer": torch.optim.LBFGS}),
        (PreampError, "optimizer=SGD: give a class", {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}),
        (PolicyError, "stochastic", {"level": "O5", "optimizer": by_chance}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)  # fmt: skip
def test_what_cannot_be_planned(error: type[Exception], match: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=match):
        plan(**{"params": "1M", **arguments})


if __name__ == "__main__":
    main()

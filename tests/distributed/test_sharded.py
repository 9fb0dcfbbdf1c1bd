"""FSDP2, FSDP1, stages: what every rank has to know alike, it does; wrong orders are told."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import preamp
from preamp.errors import PreampError
from preamp.sharding import full_tensor

from ..session.toys import step_of_squares
from .together import clipped_steps, put_infinity, tell


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.LayerNorm(4))


def train(
    model: nn.Module, level: str, kind: str = "torch", *, spoil: Callable[[int], None] | None = None, **options: Any
) -> dict[str, Any]:
    """Four steps on the same data in every rank; `spoil` changes gradients before clipping."""
    make: Any = torch.optim.SGD if kind == "torch" else preamp.optim.SGD
    optimizer = make(model.parameters(), lr=0.1)
    with preamp.prepare(model, optimizer, level=level, **options) as session:
        told = clipped_steps(session, model, 4, spoil)
        scale = session.state_dict()["losses"]["loss"]
    scale = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in scale.items()}
    return {**told, "scale": scale}


def one_shard_spoilt(scale: str) -> dict[str, Any]:
    policy = preamp.policy("O2")
    model = build()
    fully_shard(model, mp_policy=policy.fsdp())

    def spoil(step: int) -> None:
        if step == 1:
            put_infinity(model[0].weight.grad, rank=1)

    return train(model, "O2", "preamp", spoil=spoil, scale=scale)


def flat_parameters(level: str) -> dict[str, Any]:
    """FSDP1: plain tensors that differ from rank to rank."""
    model = FullyShardedDataParallel(build(), device_id=torch.zeros(()).device)

    def spoil(step: int) -> None:
        if step == 2 and dist.get_rank() == 1:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.view(-1)[0] = torch.inf

    return train(model, level, spoil=spoil)


def stages() -> dict[str, Any]:
    """A pipeline of two: the second stage meets an infinity once, the first has no gradients once."""
    rank = dist.get_rank()
    whole = build()
    part = nn.Sequential(whole[0], whole[1]) if rank == 0 else nn.Sequential(whole[2], whole[3])
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    told: dict[str, Any] = {"norms": [], "skips": [], "inf": []}
    with preamp.prepare(part, optimizer, level="O1", group=dist.group.WORLD) as session:
        for step in range(4):
            torch.manual_seed(step)
            x = torch.randn(4, 8) if rank == 0 else torch.randn(4, 16)
            with session.autocast():
                loss = part(x).float().square().mean() * (torch.inf if (step, rank) == (1, 1) else 1)
            session.backward(loss)
            if step == 2 and rank == 0:
                optimizer.zero_grad()  # a rank without gradients takes part all the same
            told["norms"].append(float(session.clip_grad_norm_(0.5)))
            told["inf"].append(float(session.clip_grad_norm_(1e9, float("inf"))))
            told["skips"].append(session.step().skipped)
            session.zero_grad()
        told["scale"] = session.loss_scale()
    return told


def on_the_wire(name: str) -> dict[str, Any]:
    """Gradients of known values, which a hook exchanges: what arrives, and what is in each rank."""
    size, rank = 1001, dist.get_rank()
    each = [torch.randn(size, generator=torch.Generator().manual_seed(r)) * 3 for r in range(2)]
    model = nn.Linear(size, 1, bias=False)
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped.register_comm_hook(None, preamp.parallel.compress_hook(getattr(torch, name)))
    wrapped(each[rank].unsqueeze(0)).sum().backward()
    assert model.weight.grad is not None
    return {"got": model.weight.grad.flatten().tolist(), "each": [one.tolist() for one in each]}


def joined(level: str) -> dict[str, Any]:
    """Rank 1 has more batches; then the other takes over what its session knows."""
    rank = dist.get_rank()
    model = build()
    optimizer = preamp.optim.SGD(model.parameters(), lr=0.1)
    with preamp.prepare(model, optimizer, level=level) as session:
        wrapped = nn.parallel.DistributedDataParallel(model)
        with wrapped.join():
            for step in range(3 + 2 * rank):
                torch.manual_seed(step)
                step_of_squares(session, wrapped, torch.randn(4, 8))
        own = session.steps
        last: list[Any] = [session.state_dict() if rank == 1 else None]
        dist.broadcast_object_list(last, src=1)
        session.load_state_dict(last[0])
        state = session.state_dict()
        masters = {name: value.tolist() for name, value in state["masters"].items()}
        weights = [p.detach().float().flatten().tolist() for p in model.parameters()]
    return {"own": own, "steps": state["steps"], "masters": masters, "weights": weights}


def masters_of_16_bit_shards(master: str) -> dict[str, Any]:
    """Without a session: a 16-bit model that is sharded, whose optimizer keeps the masters; beside the same, whole."""
    ends, kept = [], []
    for sharded in (False, True):
        model = build().bfloat16()
        if sharded:
            fully_shard(model)
        optimizer = preamp.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, master=master)
        for step in range(4):
            torch.manual_seed(step)
            model(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        name = "master" if master == "float32" else "master_bits"
        ends.append([full_tensor(p.detach()) for p in model.parameters()])
        kept.append([full_tensor(optimizer.state[p][name].double()) for p in model.parameters()])  # gloo has no int16
    dtype = next(iter(optimizer.state.values()))[name].dtype
    if master == "split24":  # by chance, which depends on a number's place in its shard
        return {"same": all(torch.allclose(a, b, rtol=2**-7) for a, b in zip(*ends, strict=True)), "dtype": str(dtype)}
    return {"same": all(map(torch.equal, *ends)) and all(map(torch.equal, *kept)), "dtype": str(dtype)}


def batch_norms(level: str, *, compiled: bool = False) -> dict[str, Any]:
    """Batch norms that FSDP2 gives 16-bit weights: trained and evaluated, beside one process."""
    ends = []
    for sharded in (False, True):
        torch.manual_seed(0)
        norms = nn.BatchNorm2d(8), nn.BatchNorm2d(8, momentum=None), nn.BatchNorm1d(4, affine=False)
        front = nn.Conv2d(3, 8, 3), norms[0], nn.ReLU(), nn.Conv2d(8, 8, 3), norms[1], nn.Flatten()
        model = nn.Sequential(*front, nn.Linear(128, 4), norms[2])
        if sharded:
            fully_shard(model, mp_policy=preamp.policy(level).fsdp())
        optimizer = preamp.optim.SGD(model.parameters(), lr=0.05)
        called: Any = torch.compile(model, backend="eager") if compiled else model
        with preamp.prepare(model, optimizer, level=level, scale=64.0 if level in ("O1", "O2") else None) as session:
            for step in range(4):
                torch.manual_seed(step)
                step_of_squares(session, called, torch.randn(8, 3, 8, 8))
            model.eval()
            with session.autocast(), torch.no_grad():
                end = [called(torch.ones(2, 3, 8, 8)).float()]
        end += [full_tensor(p.detach()) for p in model.parameters()] + [b.float() for b in model.buffers()]
        ends.append(torch.cat([each.flatten() for each in end]))
    return {"apart": float((ends[0] - ends[1]).abs().max()), "batches": int(norms[1].num_batches_tracked)}


def message(act: Callable[[], object]) -> str:
    try:
        act()
    except PreampError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def orders() -> dict[str, str]:
    """What is wrong, and what is said of it."""

    def unsaid() -> object:
        model = build()
        fully_shard(model)
        return preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O5")

    def late() -> object:
        model = build()
        session = preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2")
        fully_shard(model)
        with session.autocast():
            return model(torch.randn(4, 8))

    def low() -> object:
        model = build().bfloat16()
        fully_shard(model)
        return preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O5")

    def exception() -> object:
        policy, model = preamp.policy("O4", modules={"2": "full"}), build()
        fully_shard(model, mp_policy=policy.fsdp())
        return preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)

    def validated() -> object:
        policy, model = preamp.policy("O5"), build()
        fully_shard(model, mp_policy=policy.fsdp())
        with preamp.prepare(model, None, policy=policy) as session, session.full_precision():
            return None

    def wrapped() -> object:
        model = FullyShardedDataParallel(build(), device_id=torch.zeros(()).device)
        return preamp.prepare(model, None, level="O2")

    def unsynced() -> object:
        model = build()
        fully_shard(model, mp_policy=preamp.policy("O4").fsdp())
        with preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O4") as session:
            return session.backward(model(torch.randn(4, 8)).float().mean(), sync=False)

    def torn() -> object:
        policy, model = preamp.policy("O5"), nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4))
        fully_shard(model, mp_policy=policy.fsdp())
        return preamp.prepare(model, None, policy=policy)

    every = (torn, unsaid, late, low, exception, validated, wrapped, unsynced)
    return {act.__name__: message(act) for act in every}


def act(folder: Path) -> dict[str, Any]:
    return {
        **{f"one shard {scale}": one_shard_spoilt(scale) for scale in ("dynamic", "hysteresis")},
        **{f"flat {level}": flat_parameters(level) for level in ("O1", "O4")},
        **{f"wire {name}": on_the_wire(name) for name in ("bfloat16", "float16")},
        **{f"joined {level}": joined(level) for level in ("O1", "O2", "O5")},
        "stages": stages(), "orders": orders(),
        **{f"batch norms {level}": batch_norms(level) for level in ("O1", "O2", "O3", "O4", "O5")},
        "batch norms, compiled": batch_norms("O5", compiled=True),
        **{f"16-bit shards, {master}": masters_of_16_bit_shards(master) for master in ("float32", "split", "split24")},
    }  # fmt: skip


@pytest.mark.parametrize("scale", ["dynamic", "hysteresis"])
def test_an_infinity_in_one_shard_skips_the_step_on_all_ranks(told: list[dict[str, Any]], scale: str) -> None:
    first, second = (each[f"one shard {scale}"] for each in told)
    assert first == second  # norms, the scale and all it has learnt, the names of the sick parameter
    assert first["skips"][:3] == [False, True, False]  # hysteresis keeps a scale that may overflow once more
    assert first["names"][:3] == [[], ["0.weight"], []]
    assert not math.isfinite(first["norms"][1])


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_flat_parameters_of_fsdp1_are_agreed_upon(told: list[dict[str, Any]], level: str) -> None:
    first, second = (each[f"flat {level}"] for each in told)
    assert first["skips"] == second["skips"] == [False, False, True, False]
    assert first["norms"] == second["norms"]
    assert first["scale"] == second["scale"]
    assert first["names"][2] == []  # each rank names its own
    assert second["names"][2] != []


def test_pipeline_stages_agree_over_the_group_that_they_are_given(told: list[dict[str, Any]]) -> None:
    first, second = (each["stages"] for each in told)
    assert first == second
    assert first["skips"] == [False, True, False, False]
    assert first["scale"] == 2.0**15
    assert all(math.isfinite(first["norms"][step]) for step in (0, 2, 3))
    assert all(0 < first["inf"][step] <= 0.5 for step in (0, 2, 3))  # after the first clipping


@pytest.mark.parametrize("case", ["O1", "O2", "O3", "O4", "O5", "compiled"])
def test_batch_norms_with_16_bit_weights_and_statistics_of_float32(told: list[dict[str, Any]], case: str) -> None:
    """torch's kernel takes no such mixture."""
    for each in told:
        seen = each["batch norms, compiled" if case == "compiled" else f"batch norms {case}"]
        assert seen["apart"] < 4e-3 and seen["batches"] == 4


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_gradients_travel_in_16_bits_and_are_summed_in_float32(told: list[dict[str, Any]], name: str) -> None:
    low = getattr(torch, name)
    for each in (rank[f"wire {name}"] for rank in told):
        sent = [torch.tensor(one).to(low).float() for one in each["each"]]
        mean = (torch.stack(sent).sum(0) / 2).to(low).float()
        assert torch.equal(torch.tensor(each["got"]), mean)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_after_uneven_inputs_ranks_go_on_alike(told: list[dict[str, Any]], level: str) -> None:
    first, second = (each[f"joined {level}"] for each in told)
    assert (first.pop("own"), second.pop("own")) == (3, 5)
    assert first == second
    assert first["steps"] == 5


@pytest.mark.parametrize(
    ("master", "dtype"), [("float32", "torch.float32"), ("split", "torch.int16"), ("split24", "torch.int8")]
)
def test_an_optimizer_keeps_masters_of_16_bit_shards(told: list[dict[str, Any]], master: str, dtype: str) -> None:
    assert all(each[f"16-bit shards, {master}"] == {"same": True, "dtype": dtype} for each in told)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("torn", "weights of a SyncBatchNorm"),
        ("unsaid", "mp_policy=policy.fsdp()"),
        ("late", "In this order"),
        ("low", "Shard the float32 model"),
        ("exception", "fsdp(full=True)"),
        ("validated", "gathers this model's weights in bf16"),
        ("wrapped", "use fully_shard"),
        ("unsynced", "with session.no_sync()"),
    ],
)
def test_what_cannot_be_says_what_can(told: list[dict[str, Any]], order: str, says: str) -> None:
    for each in told:
        assert says in each["orders"][order]


if __name__ == "__main__":
    tell(act)

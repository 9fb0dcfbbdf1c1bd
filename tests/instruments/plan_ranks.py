"""Two steps under FSDP2, DDP and ZeroRedundancyOptimizer, counted: bytes by kind of each rank, as JSON lines of rank 0.

`build` makes the model that the test plans for.
"""

import json
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import preamp


def build() -> nn.Sequential:
    """First dimensions are even; three tensors are large enough for moments in 8 bits, one has rows of whole blocks."""
    return nn.Sequential(
        nn.Linear(64, 66), nn.LayerNorm(66), nn.GELU(), nn.Linear(66, 64), nn.Linear(64, 256), nn.Linear(256, 16)
    )  # fmt: skip


def size(tensor: Any) -> int:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.numel() * local.element_size()


def total(tensors: Iterable[Any]) -> int:
    return sum(size(t) for t in tensors if isinstance(t, Tensor) and t.dim())  # 0-d: step counters


class Sent(TorchDispatchMode):
    """Bytes that this rank sends in collectives, if they are rings."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, others = func.__name__.split(".")[0], dist.get_world_size() - 1
        own = {"_allgather_base_": 1, "_reduce_scatter_base_": 0}
        if func.namespace == "c10d" and name in own:
            shard = args[own[name]]
            self.bytes[name] = self.bytes.get(name, 0) + others * size(shard)
        return func(*args, **(kwargs or {}))


def fsdp2(level: str, reshard: bool, **options: Any) -> dict[str, Any]:
    model, mixed = build(), preamp.policy(level).fsdp()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mp_policy=mixed, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=mixed, reshard_after_forward=reshard)
    optimizer = preamp.optim.AdamW(model.parameters(), **options)
    with preamp.prepare(model, optimizer, level=level) as session:
        for _ in range(2):
            optimizer.zero_grad()
            with Sent() as sent, session.autocast():
                loss = model(torch.randn(8, 64)).float().square().mean()
                session.backward(loss)
            session.step()
        gradients = total(p.grad for p in model.parameters())
    return {
        "parameters": total(model.parameters()), "gradients": gradients,
        "states": total(t for state in optimizer.state.values() for t in state.values()), "sent": sent.bytes,
    }  # fmt: skip


def units(reshard: bool) -> dict[str, Any]:
    """Four equal units, and how much of them is gathered: as a unit begins, and after the forward pass."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    one: list[int] = []
    for layer in model:
        fully_shard(layer, mp_policy=mixed, reshard_after_forward=reshard)
        layer.register_forward_pre_hook(lambda m, _: one.append(total(m.parameters())))
    fully_shard(model, mp_policy=mixed, reshard_after_forward=reshard)
    model(torch.randn(8, 64)).float().square().mean()
    whole = [p for p in model.parameters() if not hasattr(p, "_local_tensor")]
    return {"one": sorted(set(one)), "left": total(whole)}


def ddp(level: str, view: bool) -> dict[str, Any]:
    model = build()
    optimizer = preamp.optim.AdamW(model.parameters(), eps=1e-4)
    with preamp.prepare(model, optimizer, level=level) as session:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
        exchanged: list[int] = []

        def count(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            exchanged.append(size(bucket.buffer()))
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

        wrapped.register_comm_hook(None, count)
        for _ in range(2):
            session.zero_grad()
            exchanged.clear()
            with session.autocast():
                loss = wrapped(torch.randn(8, 64)).float().square().mean()
            session.backward(loss)
            gradients = total(p.grad for p in model.parameters())
            apart = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
            session.step()
        masters = session._masters
        return {
            "parameters": total(model.parameters()), "gradients": gradients, "reduced": sum(exchanged),
            "gradients lie in": len(apart),
            "masters": total(masters.stored(p) for p in model.parameters() if p in masters),
            "states": total(t for state in optimizer.state.values() for t in state.values()),
        }  # fmt: skip


def zero1(low: bool, **options: Any) -> dict[str, Any]:
    """With 16-bit parameters the optimizer keeps masters, sharded as its states are."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns as it is imported

    model = build().to(torch.bfloat16 if low else torch.float32)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=preamp.optim.AdamW, lr=1e-3, **options)
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(torch.randn(8, 64).to(model[0].weight.dtype)).float().square().mean().backward()
        optimizer.step()
    kept = {"masters": 0, "states": 0}
    for state in optimizer.optim.state.values():
        for name, tensor in state.items():
            kept["masters" if name.startswith("master") else "states"] += total([tensor])
    every = torch.tensor([kept["masters"], kept["states"]])
    dist.all_reduce(every)
    return {
        "parameters": total(model.parameters()), "gradients": total(p.grad for p in model.parameters()),
        "masters of all ranks": int(every[0]), "states of all ranks": int(every[1]), "masters": kept["masters"],
    }  # fmt: skip


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    counted: dict[str, Any] = {}
    for level in ("O0", "O4", "O5", "O2"):
        counted[f"fsdp2 {level}"] = fsdp2(level, True)
    counted["fsdp2 O5 --states 8bit"] = fsdp2("O5", True, states="8bit")
    counted["fsdp2 O5 --no-reshard"] = fsdp2("O5", False)
    counted["units"], counted["units --no-reshard"] = units(True), units(False)
    for level in ("O0", "O4", "O5"):
        counted[f"ddp {level}"] = ddp(level, False)
    counted["ddp O5 --bucket-view"] = ddp("O5", True)
    counted["zero1 O0"] = zero1(False)
    counted["zero1 O5"] = zero1(True)
    counted["zero1 O5 split 8bit"] = zero1(True, master="split", states="8bit")
    if dist.get_rank() == 0:
        print(json.dumps(counted), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads outlive their group where a mesh holds it, and now and then abort an exit

"""Checkpoints of models that no process holds whole: every rank writes its shards, any number of ranks reads them.

A folder holds generations, written by `torch.distributed.checkpoint`, and one sealed file, `latest`, which names the
one that is complete and carries what the session adds. Only when every rank has written is that file replaced, in one
move: whoever is killed at whatever moment leaves the generation before.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..session import Session
from ..tree import map_tensors
from ._file import read, write

LATEST = "latest"


def save_sharded(
    folder: str | os.PathLike[str], *, model: nn.Module, optimizer: Optimizer, session: Session | None = None
) -> None:
    """Write model, optimizer and session, each rank its own part. All ranks call it, with a folder they share.

    For FSDP2 and tensor parallelism; also on one process. Returns on all ranks when the checkpoint is whole, and the
    one before it is gone. `CheckpointError` for a session that keeps masters beside 16-bit parameters, which every rank
    holds whole: `preamp.checkpoint.save` on rank 0 is for that.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save as save_parts

    amp = _without_masters(session)
    target = Path(folder)
    before = _latest(target)
    name = f"{(int(before['generation']) if before is not None else 0) + 1:08d}"
    if _rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target / name, ignore_errors=True)  # of a save that was killed
    _meet()
    states, steps = get_state_dict(model, optimizer)
    with _alone():
        save_parts({"model": states, "optimizer": steps}, checkpoint_id=target / name)
    _meet()
    if _rank() == 0:
        write(target / LATEST, {"generation": name, "amp": amp})
        for old in target.iterdir():
            if old.is_dir() and old.name.isdigit() and old.name != name:
                shutil.rmtree(old, ignore_errors=True)
    _meet()


def load_sharded(
    folder: str | os.PathLike[str], *, model: nn.Module, optimizer: Optimizer, session: Session | None = None
) -> None:
    """Read what `save_sharded` wrote, on any number of ranks: every one gets the shards that it has now, bit for bit.

    All ranks call it, after `fully_shard`, the optimizer and `prepare`. All or nothing, for which the shards are held
    twice meanwhile. `CheckpointError` when there is none, or it does not fit; `StateError` when of another policy.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as load_parts

    source = Path(folder)
    latest = _latest(source)
    if latest is None:
        raise CheckpointError(f"{source} holds no checkpoint of preamp.checkpoint.save_sharded: it has no {LATEST!r}")
    if session is not None and latest["amp"] is None:
        raise CheckpointError(f"{source} was saved without a session")
    _without_masters(session)
    states, steps = get_state_dict(model, optimizer)
    parts: dict[str, Any] = {"model": map_tensors(Tensor.clone, states), "optimizer": map_tensors(Tensor.clone, steps)}
    try:
        with _alone():
            load_parts(parts, checkpoint_id=source / str(latest["generation"]))
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        why = str(error).strip().splitlines()[-1][:300]
        raise CheckpointError(
            f"{source} cannot be loaded into this model and optimizer, and nothing was: {why}"
        ) from error
    if session is not None:
        session.load_state_dict(latest["amp"])
    set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])


def _without_masters(session: Session | None) -> dict[str, Any] | None:
    if session is None:
        return None
    state = session.state_dict()
    if state["masters"]:
        raise CheckpointError(
            f"this session keeps {len(state['masters'])} masters, which every rank has whole: write them once, with "
            "preamp.checkpoint.save on rank 0, and load that on all ranks"
        )
    return state


def _latest(folder: Path) -> dict[str, Any] | None:
    path = folder / LATEST
    return read(path, "cpu") if path.exists() else None


@contextmanager
def _alone() -> Iterator[None]:
    """One process may save and load without a process group: torch need not warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _meet() -> None:
    """Wait for the other ranks."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        if torch.cuda.is_available() and dist.get_backend() == "nccl":
            dist.barrier(device_ids=[torch.cuda.current_device()])
        else:
            dist.barrier()

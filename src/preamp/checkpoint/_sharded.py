"""Checkpoints of models that no process holds whole: every rank writes its shards, any number of ranks reads them.

A folder holds generations, written by `torch.distributed.checkpoint`, and a sealed file, `latest`, which names the one
that is complete and has what the session adds. It is replaced, in one move, when every rank has written.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..optim import FusedOptimizer
from ..optim._eight_bit import as_float32, stored_as
from ..session import Session, sessions_of
from ..sharding import rank, ranks
from ..tree import map_tensors
from ._arguments import AnyPath, check_kind, check_path, check_session, kept_on_host
from ._file import read, sha256_of, write
from ._fitting import fitting, names_of
from ._load import tell_left
from ._masters import BITS, Beside, in_float32, joined, masters_of
from ._ranks import named_states, names_in, on_all_ranks, own_group, states_for
from ._save import finish, in_background

LATEST = "latest"

_GENERATION = re.compile(r"preamp-(\d{8,})")
"""The names of generations: only folders that are called so are ever deleted."""

_UNWRITTEN = "the checkpoint was not written, and the one before it is as it was"


def save_sharded(folder: AnyPath, model: nn.Module, *, optimizer: Optimizer, session: Session | None = None) -> None:
    """Write model, optimizer and session, each rank its own part. All ranks call it, with a folder they share.

    For FSDP2 and tensor parallelism; also where every rank has everything, and on one process. Of 16-bit parameters the
    masters are written, as they are kept. Where it fails on one rank it fails on all, and the checkpoint before stays.

    Args:
        folder: Made if it is not there.
        model: As `fully_shard` or `parallelize_module` left it.
        optimizer: That of the model.
        session: What `prepare` returned for both.

    Raises:
        CheckpointError: For a folder that the ranks do not share, and for pipeline stages.

    >>> preamp.checkpoint.save_sharded("last", model=model, optimizer=optimizer, session=session)
    """
    check_path(folder)
    finish()
    _saving(Path(folder), model, optimizer, session, lambda state: state, None)()


def save_sharded_async(
    folder: AnyPath, model: nn.Module, *, optimizer: Optimizer, session: Session | None = None
) -> Future[None]:
    """As `save_sharded`, written by a thread of each rank while training goes on; returns when the shards are copied.

    The copies lie in host memory. Ranks exchange over gloo, in a group of their own. A failure is a `PreampWarning`
    too. Without a process group it writes before it returns.

    Args:
        folder: Where the checkpoint goes, as in `save_sharded`.
        model: The model.
        optimizer: Its optimizer.
        session: Its session, if there is one.

    Returns:
        A future. Call its `result()`, which raises what went wrong, before the process group is destroyed.

    >>> saving = preamp.checkpoint.save_sharded_async("last", model=model, optimizer=optimizer, session=session)
    """
    check_path(folder)
    finish()
    group = own_group() if ranks() > 1 else None
    write = _saving(Path(folder), model, optimizer, session, kept_on_host, group)
    if group is not None:
        return in_background(folder, write)
    write()
    written: Future[None] = Future()
    written.set_result(None)
    return written


def _saving(
    target: Path, model: nn.Module, optimizer: Optimizer, session: Session | None, held: Callable[..., Any], group: Any
) -> Callable[[], None]:
    """The rest of a save, to be done by this thread or another one; the states are taken now, by way of `held`."""
    from torch.distributed.checkpoint.state_dict_saver import save as save_parts

    def begin() -> tuple[dict[str, Any] | None, str]:
        beside, before = _beside(model, optimizer, session), _latest(target)
        name = f"preamp-{1 if before is None else _number(before['generation']) + 1:08d}"
        if rank() == 0:
            shutil.rmtree(target / name, ignore_errors=True)  # of a save that was killed
            (target / name).mkdir(parents=True)
        return None if beside is None else beside.state_dict(), name

    amp, name = on_all_ranks(begin, _UNWRITTEN)[0]
    with in_float32(each for each in sessions_of(model) if each.policy.masters):  # else there is nothing to be exact
        states, steps = named_states(model, optimizer)
        bits, masters = {}, masters_of(sessions_of(model))
        for parameter, its in names_in(optimizer, steps).items():
            if isinstance(masters.get(parameter), tuple) and its in states:
                states[its], bits[its] = masters[parameter]
        parts = held({"model": states, BITS: bits, "optimizer": steps})

    def hashed() -> dict[str, str]:
        mine = [f"__{rank()}_*", *([".metadata"] if rank() == 0 else [])]
        return {path.name: sha256_of(path) for pattern in mine for path in (target / name).glob(pattern)}

    def commit(files: dict[str, str]) -> None:
        if rank() > 0:
            return
        unknown = {path.name for path in (target / name).iterdir()} - files.keys()
        if unknown or not all((target / name / each).exists() for each in files):
            raise CheckpointError(
                f"rank 0 does not see in {target / name} what all ranks have written: they have to write into a folder "
                "that they share, and to which they can all come back"
            )
        write(target / LATEST, {"generation": name, "amp": amp, "files": files})
        for each in target.iterdir():
            if each.name != name and _GENERATION.fullmatch(each.name) and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)

    def save() -> None:
        with _torchs_own(_UNWRITTEN):  # which agrees on errors by itself
            save_parts(parts, checkpoint_id=target / name, process_group=group)
        files = {each: digest for some in on_all_ranks(hashed, _UNWRITTEN, group) for each, digest in some.items()}
        on_all_ranks(lambda: commit(files), _UNWRITTEN, group)

    return save


def load_sharded(folder: AnyPath, model: nn.Module, *, optimizer: Optimizer, session: Session | None = None) -> None:
    """Read what `save_sharded` wrote, on any number of ranks: every one gets the shards that it has now, bit for bit.

    All ranks call it, after `fully_shard`, the optimizer and `prepare`. All or nothing. A `PreampWarning` says if a
    session's state stays in the folder.

    Args:
        folder: What `save_sharded` was given.
        model: The model to load into.
        optimizer: Its optimizer, with the groups that it had.
        session: Its session, if there is one.

    Raises:
        CheckpointError: If what is there is damaged, or does not fit.
        StateError: If the session had another policy.

    >>> preamp.checkpoint.load_sharded("last", model=model, optimizer=optimizer, session=session)
    """
    from torch.distributed.checkpoint.state_dict import set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as load_parts

    from ._parts import Planner, Reader

    check_path(folder)
    source = Path(folder)
    finish()

    def first() -> dict[str, Any]:
        _beside(model, optimizer, session)
        latest = _latest(source)
        if latest is None:
            raise CheckpointError(f"{source} holds no checkpoint of checkpoint.save_sharded: it has no {LATEST!r}")
        if session is not None and latest["amp"] is None:
            raise CheckpointError(f"{source} was saved without a session")
        return latest

    latest = on_all_ranks(first, f"{source} was not loaded")[0]
    on_all_ranks(lambda: _check_files(source, latest), f"{source} was not loaded")
    refused = f"{source} cannot be loaded into this model and optimizer, and nothing was"
    reader = Reader(source / str(latest["generation"]))
    with _torchs_own(refused):
        stored = on_all_ranks(reader.stored, refused)[0]
    its, groups = (stored.get("optimizer", {}).get(name, {}) for name in ("state", "param_groups"))
    with states_for(model, optimizer, its):
        with in_float32(sessions_of(model)):
            states, steps = named_states(model, optimizer)
            parts: dict[str, Any] = {"model": map_tensors(Tensor.clone, states), BITS: {}, "optimizer": steps}
            named, own = names_in(optimizer, steps), dict(steps["state"])
            every = steps["param_groups"]
            in_groups = [group["params"] for group in every]
            flags = {n for g in every for n in g if isinstance(g[n], bool | None)}  # other options must be there
            left = [{n: g.pop(n) for n in flags & (g.keys() - groups.get(i, g))} for i, g in enumerate(every)]
            ours = isinstance(optimizer, FusedOptimizer)  # which takes masters, too
            rows = {n: stored_as(own[n], p, its[n], ours) for p, n in named.items() if n in own and n in its}
            steps["state"].update(rows)
        for name, low in stored.get(BITS, {}).items():
            if isinstance(wide := parts["model"].get(name), Tensor):
                parts[BITS][name] = torch.empty_like(wide, dtype=low.dtype)
                parts["model"][name] = torch.empty_like(wide, dtype=torch.bfloat16)
        with _torchs_own(refused):
            load_parts(parts, storage_reader=reader, planner=Planner())
            joined(parts["model"], parts[BITS])
            steps["state"].update({n: as_float32(row) for n, row in rows.items() if row is not own[n]})

        for group, names in zip(every, in_groups, strict=True):
            if set(names) != set(group["params"]):
                raise CheckpointError(
                    f"{refused}: a group of the optimizer had other parameters, to which its options belong. Make the "
                    "groups as they were"
                )
            group["params"] = names  # in their present order
        on_all_ranks(lambda: fitting("optimizer", optimizer, steps, source), refused)
        for group, options in zip(every, left, strict=True):
            group.update(options)
        if session is not None:
            Beside(session, [model]).load_state_dict(latest["amp"])
        with in_float32(sessions_of(model)):
            set_model_state_dict(model, parts["model"])
        optimizer.load_state_dict(parts["optimizer"])
    tell_left(latest["amp"] if session is None else None, source)


def _beside(model: Any, optimizer: Any, session: Session | None) -> Beside | None:
    """What a session adds, alike on all ranks; `CheckpointError` for arguments of another kind."""
    check_kind("model", model, "modules")
    check_kind("optimizer", optimizer)
    check_session(session, [model], [optimizer])
    if "" in names_of({"model": model}, optimizer):
        raise CheckpointError(
            "optimizer= steps a parameter that model= does not have, whose states would have no name in a sharded "
            "checkpoint: give it to a module of the model, or write a file with preamp.checkpoint.save"
        )
    if session is None:
        return None
    if session.is_stage:
        raise CheckpointError(
            "the ranks of this session's group have different parameters under the same names (pipeline stages): write "
            "each stage with preamp.checkpoint.save, into a file of its own"
        )
    return Beside(session, [model])


def _check_files(folder: Path, latest: dict[str, Any]) -> None:
    """`CheckpointError` where a byte has changed; each rank looks at some files, so that all are read once more."""
    files: dict[str, str] = latest["files"]
    for name in sorted(files)[rank() :: ranks()]:
        path = folder / str(latest["generation"]) / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: the checkpoint was copied in part, or cleared up after")
        if sha256_of(path) != files[name]:
            raise CheckpointError(f"{path} is damaged: its bytes do not match the digest they were saved with")


def _number(generation: Any) -> int:
    found = _GENERATION.fullmatch(generation) if isinstance(generation, str) else None
    return -1 if found is None else int(found[1])


def _latest(folder: Path) -> dict[str, Any] | None:
    path = folder / LATEST
    if not path.exists():
        return None
    latest = read(path)
    if _number(latest.get("generation")) < 0:
        raise CheckpointError(
            f"{path} was not written by preamp.checkpoint.save_sharded, which keeps the name of its newest checkpoint "
            "there: give it a folder of its own"
        )
    return latest


@contextmanager
def _torchs_own(what: str) -> Iterator[None]:
    """Around what torch does: its errors are ours, and one process without a group need not be warned of that."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with ExitStack() as stack:
            if ranks() == 1:  # filters are the process's, so never in a thread
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
            yield
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        why = str(error).strip() or type(error).__name__
        raise CheckpointError(f"{what}: {why.splitlines()[-1][:300]}") from error

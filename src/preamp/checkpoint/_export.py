"""The float32 model as a safetensors file, for those who run it and have no preamp."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, MissingExtra, kind_of
from ..formats import LOW_DTYPES
from ..modules import unwrapped
from ..session import Session
from ..sharding import full_tensor, is_sharded, rank
from ._content import AnyPath, place
from ._file import replacing
from ._ranks import on_all_ranks
from ._save import writer


def export(path: AnyPath, model: nn.Module | Session, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write parameters and buffers as a safetensors file, atomically, in float32 where they were lowered.

    `model`: a session, whose masters are written where there are masters; or a model, whose 16-bit entries are
    widened. Names are those of `state_dict()` of the bare model, without what parallel and compiled wrappers add; with
    several models in a session, each begins with its model's name and a dot. Entries that are one tensor, as tied
    weights are, are written once, under the first name; the others are in the file's metadata, as
    {other name: first name}, and `safetensors.torch.load_model` ties them again. `metadata`: further strings for it.

    Sharded models (FSDP2, tensor parallelism) are gathered, one entry at a time, on rank 0, which writes: all ranks
    call it, and it returns on all when the file is there. Elsewhere only one rank should call it.

    Raises `MissingExtra` without the package safetensors, `CheckpointError` for entries that are no dense tensors,
    `SessionError` between unscale_() or clipping and step(), `OSError` when the file cannot be written.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingExtra("safetensors", "export", "checkpoint.export()") from error
    tensors, aliases, sharded = _gathered(model)

    def write() -> None:
        if sharded and rank() > 0:
            return
        writer().finish(path)
        with replacing(path) as temporary:
            try:
                save_file(tensors, temporary, {**aliases, **(metadata or {}), "format": "pt"})
            except SafetensorError as error:
                raise CheckpointError(
                    f"{path} was not written, and what was there before is as it was: safetensors says {error}"
                ) from error
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())

    if sharded:
        on_all_ranks(write, f"{path} was not written")
    else:
        write()


def _gathered(source: nn.Module | Session) -> tuple[dict[str, Tensor], dict[str, str], bool]:
    """What to write, on the host, by name; the names that stand for the same tensor as another; whether it is sharded.

    Of sharded models the first is empty on all ranks but 0.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    models = source.models if isinstance(source, Session) else {"": source}
    for model in models.values():
        _check_dense(unwrapped(model).state_dict())
    sharded = any(is_sharded(value) for model in models.values() for value in unwrapped(model).state_dict().values())
    wanted = not sharded or rank() == 0
    with source.full_precision(values_only=True) if isinstance(source, Session) else nullcontext():
        for prefix, model in models.items():
            state = unwrapped(model).state_dict(keep_vars=True)
            for names in _same(state):
                value = full_tensor(state[names[0]].detach())
                first, *others = (f"{prefix}.{n}" if prefix else n for n in names)
                aliases.update(dict.fromkeys(others, first))
                if wanted:
                    value = value.to(torch.float32 if value.dtype in LOW_DTYPES else value.dtype)
                    tensors[first] = value.to("cpu", copy=True).contiguous()
    return tensors, aliases, sharded


def _check_dense(state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if is_sharded(value):
            continue
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
            kind = value.layout if type(value) is Tensor else kind_of(value)
            raise CheckpointError(
                f"{name} is {kind}, and safetensors holds dense tensors, whole ones: save a checkpoint instead, or "
                "take it out of state_dict() (a buffer with persistent=False)"
            )


def _same(state: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of a state_dict, those of one and the same tensor together, in order."""
    found: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        # a shard's address proves nothing, as some ranks may have none of it; all must find the same
        found.setdefault(id(tensor) if is_sharded(tensor) else place(tensor) or name, []).append(name)
    return list(found.values())

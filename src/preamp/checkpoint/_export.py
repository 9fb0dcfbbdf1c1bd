"""The float32 model as a safetensors file, for those who run it and have no preamp."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, MissingExtra, kind_of
from ..formats import LOW_DTYPES
from ..modules import unwrapped
from ..session import Session, sessions_of
from ..sharding import full_tensor, is_sharded, rank
from ._arguments import AnyPath, check_kind, check_path
from ._content import place
from ._file import replacing
from ._masters import in_float32
from ._ranks import on_all_ranks
from ._save import finish


def export(path: AnyPath, model: nn.Module | Session, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write parameters and buffers as a safetensors file, atomically, in float32 where they were lowered.

    `model`: a session or a model. Masters are written where there are masters; other 16-bit entries are widened. Names
    are those of `state_dict()` of the bare model, without what parallel and compiled wrappers add; with several models
    in a session, each begins with its model's name and a dot. Tied weights are written once, as
    `safetensors.torch.save_model` does, and its `load_model` ties them again. `metadata`: further strings for the file.

    Sharded models (FSDP2, tensor parallelism) are gathered, one entry at a time, on rank 0, which writes: all ranks
    call it, and it returns on all when the file is there. Elsewhere only one rank should call it.

    Raises `MissingExtra` without the package safetensors, `CheckpointError` for entries that are no dense tensors,
    `OSError` when the file cannot be written.
    """
    check_path(path)
    if not isinstance(model, Session):
        check_kind("model", model, "modules")
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_model
    except ImportError as error:
        raise MissingExtra("safetensors", "export", "checkpoint.export()") from error
    tensors, sharded = _gathered(model)
    whole: Any = SimpleNamespace(state_dict=tensors.copy)  # all that save_model asks of a model

    def write() -> None:
        if sharded and rank() > 0:
            return
        finish()
        with replacing(path) as temporary:
            try:
                save_model(whole, str(temporary), {**(metadata or {}), "format": "pt"})
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


def _gathered(source: nn.Module | Session) -> tuple[dict[str, Tensor], bool]:
    """What to write, on the host, by name; and whether it is sharded, in which case only rank 0 has it."""
    models = source.models if isinstance(source, Session) else {"": source}
    made: dict[Any, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    with in_float32([source] if isinstance(source, Session) else sessions_of(source)):
        entries = {
            f"{prefix}.{name}" if prefix else name: value
            for prefix, model in models.items()
            for name, value in unwrapped(model).state_dict(keep_vars=True).items()
        }
        sharded = any(map(is_sharded, entries.values()))
        for name, value in entries.items():
            dense = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized
            if not (dense or is_sharded(value)):
                kind = value.layout if type(value) is Tensor else kind_of(value)
                raise CheckpointError(
                    f"{name} is {kind}, and safetensors holds dense tensors, whole ones: save a checkpoint instead, or "
                    "take it out of state_dict() (a buffer with persistent=False)"
                )
            # a shard's address proves nothing, as some ranks may have none of it; all must find the same
            key = id(value) if is_sharded(value) else place(value) or name
            if key not in made:
                whole = full_tensor(value.detach())
                wide = torch.float32 if whole.dtype in LOW_DTYPES else whole.dtype
                made[key] = torch.empty(0) if sharded and rank() > 0 else whole.to("cpu", wide, copy=True)
            tensors[name] = made[key]
    return tensors, sharded

"""Reads files of `torch.distributed.checkpoint` without running code that is in them.

torch unpickles the table of contents, and the numbers beside the tensors, with everything that pickles may call. Here
the table may hold only what torch puts there, and the numbers only what `torch.load(weights_only=True)` accepts.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan

_CONTENTS = ".metadata"
_TORCHS = {"torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"}
_KINDS = {
    "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
    "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING", "_StorageInfo",
}  # fmt: skip
_OTHERS = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


def _member(kind: Any, name: str) -> Any:
    """As which `getattr` is called: some releases of Python pickle the members of an enumeration by it."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"its table of contents asks for {name!r} of {kind!r:.80}, which has no place there")


class _Contents(pickle.Unpickler):
    """Unpickles the table of contents: its own classes, dtypes, paths."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        its_own = (module in _TORCHS and name in _KINDS) or (module, name) in _OTHERS
        path = module in ("pathlib", "pathlib._local") and name in _PATHS
        if its_own or path or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its table of contents asks for {module}.{name}, which has no place there")


class Reader(FileSystemReader):
    """Reads a folder that a group of ranks wrote."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The table of contents."""
        with open(Path(self.path) / _CONTENTS, "rb") as file:
            contents = _Contents(file).load()
        if not isinstance(contents, Metadata):
            raise pickle.UnpicklingError(f"its table of contents is a {type(contents).__name__}")
        if getattr(contents, "storage_meta", None) is None:
            contents.storage_meta = StorageMeta()
        contents.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return contents

    def stored(self) -> dict[str, Any]:
        """What it has, nested as it was saved: meta tensors, and None for numbers and strings."""
        found: dict[str, Any] = {}
        contents: Any = self.read_metadata()
        for key, path in (contents.planner_data or {}).items():
            place, own = found, contents.state_dict_metadata[key]
            for name in path[:-1]:
                place = place.setdefault(name, {})
            known = hasattr(own, "size")
            place[path[-1]] = torch.empty(own.size, dtype=own.properties.dtype, device="meta") if known else None
        return found


class Planner(DefaultLoadPlanner):
    """Reads numbers and strings as `torch.load(weights_only=True)` does, and no codes as numbers."""

    def create_local_plan(self) -> LoadPlan:
        """Refuse whole numbers for a floating tensor, which torch would cast: codes had the names of moments once."""
        assert self.metadata is not None
        for name, wanted in self.state_dict.items():
            stored = getattr(self.metadata.state_dict_metadata.get(name), "properties", None)
            if stored is None or not isinstance(wanted, torch.Tensor):
                continue
            if wanted.is_floating_point() and not stored.dtype.is_floating_point:
                raise ValueError(f"{name} is {wanted.dtype} here and {stored.dtype} there")
        return super().create_local_plan()

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Refuse content that would run code, then let torch read it."""
        torch.load(value, map_location="cpu", weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)

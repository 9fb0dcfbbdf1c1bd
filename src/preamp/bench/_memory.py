"""Memory of a training step. On a GPU the allocator knows; on a CPU it is counted, and the count is deterministic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..session import Session
from ..tree import tensors


class SavedBytes:
    """Bytes that autograd keeps for backward, each storage once, parameters and what lives anyway not counted."""

    def __init__(self, model: nn.Module) -> None:
        self._living = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
        self._seen: dict[int, int] = {}

    @property
    def total(self) -> int:
        """Bytes so far."""
        return sum(self._seen.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._living:
                self._seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    @contextmanager
    def counting(self) -> Iterator[SavedBytes]:
        """Count what the forward pass inside saves."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield self


def resident_bytes(model: nn.Module, optimizer: Optimizer, session: Session) -> int:
    """Bytes that live through the whole of training: parameters, buffers, masters, optimizer state, gradients."""
    held: list[Tensor] = [*model.parameters(), *model.buffers(), *session.state_dict()["masters"].values()]
    held += tensors(list(optimizer.state.values()))
    held += [torch.empty_like(p, device="meta") for p in model.parameters() if p.requires_grad]
    return sum_bytes(held)


def sum_bytes(held: Iterable[Tensor]) -> int:
    """Bytes of tensors, each object once."""
    return sum({id(t): t.numel() * t.element_size() for t in held}.values())

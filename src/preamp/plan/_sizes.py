"""The sizes of a model's weights under a policy: of a number of parameters, or counted on the model's shapes."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ..errors import PolicyError, PreampError
from ..formats import LOW_DTYPES
from ..ledger import NoMasters, Shadows
from ..modules import NORMS, CastingModule, Conversion, check_free, unwrapped
from ..optim._eight_bit import SMALLEST, has_rows_of_blocks
from ..policy import Policy

MOST = 10**18
"""More parameters than this are taken for a typing error."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NUMBER = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:e[+-]?\d{1,3})?)\s*([kmbt]?)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter, or many that are alike and are counted as one."""

    entries: int
    rows: int
    """Its first dimension, along which FSDP2 shards it."""
    dtype: torch.dtype
    """The dtype in which it is kept between steps."""
    trained: bool = True
    small: bool = False
    """Whether it is too small for moments in 8 bits, or would be cut within their blocks."""
    cast: bool = False
    """Whether a region casts it to 16 bits in the forward pass."""
    shadowed: bool = False
    """Whether it has a 16-bit copy and a 16-bit gradient."""

    def shard(self, world: int) -> int:
        """Entries of the first of `world` ranks, which has the most: `torch.chunk` along the first dimension."""
        return -(-self.rows // world) * (self.entries // max(self.rows, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """All weights of a model, and the bytes of its buffers."""

    weights: tuple[Weight, ...]
    buffers: int
    from_model: bool

    @property
    def count(self) -> int:
        """Parameters."""
        return sum(weight.entries for weight in self.weights)


def count_of(given: Any) -> int:
    """The number of parameters that a person writes: 7e9, "7e9", "7B", "350M". `PreampError` for anything else."""
    text = str(given) if isinstance(given, (int, float, str)) and not isinstance(given, bool) else ""
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise PreampError(
            f"params={given!r} is no number of parameters: write one above 0, such as 7e9, 7B or 350M, or give a model"
        )
    number = Decimal(found[1]) * _UNITS[found[2].lower()]
    if not 1 <= number <= MOST or number != int(number):
        raise PreampError(f"params={given!r}: a model has a whole number of parameters, from 1 to {MOST:.0e}")
    return int(number)


def of_number(count: int, policy: Policy, *, norm_share: float, shadow: bool, sharded: bool) -> Sizes:
    """So many parameters in matrices, as one tensor, but for the share in norm layers, which are small tensors.

    `norm_share`: in [0, 1). `sharded`: they are FSDP2's, of one dtype.
    """
    if not 0 <= norm_share < 1 or math.isnan(norm_share):
        raise PreampError(f"norm_share={norm_share!r}: the share of parameters in norm layers lies in [0, 1)")
    if policy.modules:
        raise PolicyError(
            f"{policy.modules[0][0]!r} -> {policy.modules[0][1]}: which parameters a rule for modules means depends on "
            "the model, and a number was given: give the model, or leave the rule out"
        )
    norms = round(count * norm_share)
    rest = count - norms
    mixed = policy.params is torch.float32 and policy.has_regions and not sharded
    weights = [
        Weight(
            entries=rest, rows=rest, dtype=torch.float32 if sharded else policy.params, small=rest < SMALLEST,
            cast=mixed, shadowed=mixed and shadow,
        )
    ]  # fmt: skip
    if norms:
        dtype = torch.float32 if sharded else (policy.norms or policy.params)
        weights.append(Weight(entries=norms, rows=norms, dtype=dtype, small=True))
    return Sizes(weights=tuple(weights), buffers=0, from_model=False)


def of_model(model: nn.Module, policy: Policy, *, shadow: bool, sharded: bool) -> Sizes:
    """A model's weights, as `prepare` would keep them; the model is only read, and may be on the meta device.

    Raises `PolicyError` where the policy does not fit the model.
    """
    if any(isinstance(module, CastingModule) for module in model.modules()):
        check_free(unwrapped(model))
    shapes = _shapes_of(unwrapped(model))
    if sharded:
        if policy.modules:
            raise PolicyError(
                f"{policy.modules[0][0]!r} -> {policy.modules[0][1]}: under fsdp2 a MixedPrecisionPolicy says for a "
                "whole unit what dtype it has, so rules for modules are not planned: leave them out"
            )
        weights = tuple(
            _weight(p, sharded=True, dtype=torch.float32 if p.is_floating_point() else p.dtype)
            for p in shapes.parameters()
        )
        return Sizes(weights=weights, buffers=sum(map(_bytes, shapes.buffers())), from_model=True)
    before = {name: (b.dtype, _bytes(b)) for name, b in shapes.named_buffers()}
    keeper = Shadows(policy.compute) if shadow else NoMasters()
    Conversion(shapes, policy, keeper)
    cast = set(_cast(shapes)) if policy.params is torch.float32 and policy.has_regions else set()
    buffers = 0
    for name, buffer in shapes.named_buffers():
        dtype, wide = before[name]
        buffers += _bytes(buffer) + (0 if buffer.dtype is dtype else wide)  # the float32 one is kept for close()
    weights = tuple(
        _weight(p, dtype=p.dtype, cast=p in cast, shadowed=shadow and p in keeper) for p in shapes.parameters()
    )
    return Sizes(weights=weights, buffers=buffers, from_model=True)


def _weight(parameter: Tensor, *, sharded: bool = False, **facts: Any) -> Weight:
    small = parameter.numel() < SMALLEST or parameter.dtype is torch.float64
    return Weight(
        entries=parameter.numel(), rows=parameter.shape[0] if parameter.dim() else 1,
        trained=parameter.requires_grad, small=small or (sharded and not has_rows_of_blocks(parameter)), **facts,
    )  # fmt: skip


def _shapes_of(model: nn.Module) -> nn.Module:
    """The model again, with tensors that have shapes and no values: a copy of a large one costs nothing."""
    empty: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise PolicyError(
                f"the parameter {name} is lazy and has no size yet: run one batch through the model first"
            )
        bare = torch.empty_like(parameter, device="meta")
        empty[id(parameter)] = nn.Parameter(bare, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():  # whose values decide on their dtype, and which prepare() does not write
        empty[id(buffer)] = buffer
    return copy.deepcopy(model, empty)


def _cast(root: nn.Module) -> Iterator[nn.Parameter]:
    """Weights that a region casts: all but those of norms and embeddings, and of modules that run in float32."""
    full: set[str] = set()
    for path, module in root.named_modules():
        region = module._preamp_casting.region if isinstance(module, CastingModule) else None
        inside = path != "" and path.rpartition(".")[0] in full
        if region is torch.float32 or (inside and region not in LOW_DTYPES):
            full.add(path)
        elif not isinstance(module, (*NORMS, nn.Embedding, nn.EmbeddingBag)):
            yield from (p for p in module.parameters(recurse=False) if p.dtype is torch.float32)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

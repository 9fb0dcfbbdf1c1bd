"""One language model in several precisions: the log-probabilities of a text's tokens, and the layers that differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PreampError
from ..report import Table, format_number
from ..report.values import Fields
from ..session import prepare
from ..tree import tensors
from .logprobs import LogprobComparison, compare_logprobs

SAMPLES = 2**16
"""Numbers that are kept of what a module gives, spread evenly."""
SHOWN = 8
"""Layers in a table."""


@dataclass(frozen=True, slots=True)
class LayerError(Fields):
    """How far what a module gives is from the same in float32."""

    name: str
    relative: float
    """The L2 norm of the difference over that of float32."""
    added: float
    """How much more that is than of any module that ended before it."""


@dataclass(frozen=True, slots=True)
class PrecisionComparison(Fields):
    """A level against float32, on the same tokens."""

    level: str
    logprobs: LogprobComparison
    """"sampler" is float32, "trainer" the level."""
    kl: float
    """The mean over positions of KL(float32 || level), exact: over the whole vocabulary."""
    layers: tuple[LayerError, ...]
    """In the order in which they end."""

    @property
    def worst_layer(self) -> LayerError | None:
        """The one that adds most."""
        return max(self.layers, key=lambda layer: layer.added, default=None)


def compare_precisions(
    model: nn.Module, tokens: Tensor, levels: Sequence[str] = ("O5", "O2"), *, mask: Tensor | None = None
) -> tuple[PrecisionComparison, ...]:
    """What each level does to the log-probabilities that a language model gives the tokens of a text.

    `model`: float32; takes `tokens` and returns logits (batch, length, vocabulary), or an object with `.logits`.
    `tokens`: int64 (batch, length), on the model's device. `mask`: bool (batch, length), False for tokens that do not
    count. The model runs in evaluation mode and is left as it was.
    Raises `PreampError` for anything else, and if a level gives no finite number.
    """
    if not isinstance(tokens, Tensor) or not isinstance(mask, Tensor | None):
        raise PreampError("tokens or mask are no tensor: write torch.tensor([[...], ...])")
    whole = tokens.dtype in (torch.int64, torch.int32)
    if tokens.dim() != 2 or not whole or tokens.shape[1] < 2 or not tokens.numel():
        raise PreampError(f"tokens are {tokens.dtype} {tuple(tokens.shape)}: write int64 (batch, length), length >= 2")
    if mask is not None and mask.shape != tokens.shape:
        raise PreampError(f"the mask has shape {tuple(mask.shape)}, and tokens {tuple(tokens.shape)}: give both one")
    if isinstance(levels, str):
        raise PreampError(f"levels={levels!r}: write a list of levels, [{levels!r}]")
    tokens = tokens.long()
    low = [name for name, p in model.named_parameters() if p.is_floating_point() and p.dtype is not torch.float32]
    if low:
        raise PreampError(
            f"the parameter {low[0]} is {model.get_parameter(low[0]).dtype}: with it there is no float32 to compare "
            "with. Load the model with dtype=torch.float32"
        )
    exact, outputs = _run(model, tokens, "O0")
    if (least := int(tokens[:, 1:].min())) < 0 or int(tokens[:, 1:].max()) >= exact.shape[-1]:
        raise PreampError(
            f"tokens go from {least} to {int(tokens[:, 1:].max())}, and the model gives {exact.shape[-1]} logits for "
            "each: it has to give one for every token of its vocabulary"
        )
    _check_causal(model, tokens[:1], exact[:1])
    counts = None if mask is None else mask[:, 1:]
    found = []
    for level in levels:
        logits, others = _run(model, tokens, level)
        rows = [_distances(*row) for row in zip(exact, logits, tokens[:, 1:], strict=True)]
        sampled, trained, every = map(torch.stack, zip(*rows, strict=True))
        kl = every.mean() if counts is None else every[counts.bool()].mean()
        layers = _layers(outputs, others)
        if not trained.isfinite().any():
            first = next((layer.name for layer in layers if math.isinf(layer.relative)), "the model")
            raise PreampError(
                f"at {level} no log-probability is finite, and {first!r} is the first module that gives inf or NaN: "
                "preamp.doctor.find_origin says which operator made it; leave the level out, or keep that in float32"
            )
        comparison = compare_logprobs(sampled, trained, counts)
        found.append(PrecisionComparison(level, comparison, kl.item(), layers))
    return tuple(found)


def _distances(exact: Tensor, low: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of a sequence: the log-probabilities of its tokens, and KL(exact || low) at each position.

    In float64: a divergence of 1e-7 a token, which float16 makes, is smaller than what float32 rounds away in the sum.
    """
    wanted, given = exact.double().log_softmax(-1), low.double().log_softmax(-1)
    sampled, trained = (each.gather(-1, tokens[:, None]).squeeze(-1) for each in (wanted, given))
    return sampled, trained, (wanted.exp() * (wanted - given)).nansum(-1)  # 0 log 0 is 0


def _check_causal(model: nn.Module, tokens: Tensor, logits: Tensor) -> None:
    """`PreampError` if logits depend on later tokens: those of an encoder (BERT) are no probabilities of the next."""
    other = tokens.clone()
    other[0, -1] = tokens[0, tokens[0] != tokens[0, -1]][:1].sum()  # another token of the text, or token 0
    changed, _ = _run(model, other, "O0")
    if not torch.allclose(changed, logits, rtol=1e-4, atol=1e-4 * float(logits.nan_to_num(0, 0, 0).abs().max())):
        raise PreampError(
            "another last token changes what the model gives for those before it, so it is no causal language model: "
            "an encoder (BERT) gives no probability of the next token. Compare a decoder"
        )


def tables(found: Sequence[PrecisionComparison]) -> tuple[Table, ...]:
    """What a terminal shows."""
    rows = []
    for each in found:
        numbers, worst = each.logprobs, each.worst_layer
        rows.append((
            each.level, f"{numbers.bias:+.2g}", format_number(numbers.mean_apart), format_number(numbers.largest),
            format_number(each.kl), f"{numbers.clipped:.3%}", "-" if worst is None else worst.name,
        ))  # fmt: skip
    columns = ("level", "bias", "mean apart", "largest", "KL a token", "ratio off by 0.2", "worst layer")
    tokens = found[0].logprobs.tokens
    notes = (f"{tokens} tokens, against float32, in nats; the worst layer is the one that adds most error",)
    shown = [Table("Log-probabilities by precision", columns, rows, notes=notes)]
    for each in found:
        worst_ones = sorted(each.layers, key=lambda layer: -layer.added)[:SHOWN]
        cells = [(layer.name, f"{layer.relative:.3%}", f"{layer.added:.3%}") for layer in worst_ones]
        shown.append(Table(f"Layers at {each.level}", ("module", "relative error", "added"), cells))
    return tuple(shown)


@torch.no_grad()
def _run(model: nn.Module, tokens: Tensor, level: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits in float32 without those of the last position, and a sample of what each module gives."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            given = next((t for t in tensors(out) if t.is_floating_point()), None)
            if name and given is not None and name not in outputs:
                flat = given.flatten()
                outputs[name] = flat[:: max(-(-flat.numel() // SAMPLES), 1)].double().cpu()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules()]
    training = {module: module.training for module in model.modules()}
    try:
        with prepare(model, None, level=level) as session:
            model.eval()
            with session.autocast():
                made = model(tokens)
    finally:
        for handle in handles:
            handle.remove()
        for module, was in training.items():
            module.training = was
    logits = getattr(made, "logits", made)
    if not isinstance(logits, Tensor) or logits.shape[:2] != tokens.shape or logits.dim() != 3:
        seen = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise PreampError(f"the model gives {seen} for tokens {tuple(tokens.shape)}: it has to give logits for each")
    return logits[:, :-1].float(), outputs


def _layers(exact: Mapping[str, Tensor], low: Mapping[str, Tensor]) -> tuple[LayerError, ...]:
    found, before = [], 0.0
    for name, wanted in exact.items():
        if name in low and low[name].shape == wanted.shape:
            norm = float(wanted.norm())
            relative = float((low[name] - wanted).norm()) / norm if norm else 0.0
            relative = relative if relative == relative else math.inf
            found.append(LayerError(name, relative, max(0.0, relative - before)))
            before = max(before, relative)
    return tuple(found)

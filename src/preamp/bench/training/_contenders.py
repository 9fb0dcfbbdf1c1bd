"""Who competes: the same training loop in float32, under torch.amp, and through a session of preamp."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ... import optim
from ...errors import PreampWarning
from ...session import Session, prepare
from ._by_hand import ByHand, Graphed
from ._works import Batch, Work

BATCHES = 4
"""Batches that a contender goes round, made before the clock runs."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to train. `level` (of preamp) or `dtype` (of torch.autocast), or neither for float32."""

    name: str
    level: str | None = None
    dtype: torch.dtype | None = None
    scale: float | str | None = None
    """A loss scale in place of the level's."""
    fused: bool = True
    """torch's optimizers: fused, else their default for the device."""
    tf32: bool = True
    compiled: bool = False
    captured: bool = False
    """The whole step as a CUDA graph: by torch's means for one of torch, by `Session.capture` for one of preamp."""
    mode: str | None = None
    """torch.compile's."""
    by_hand: bool = False
    """With float32 masters of a float16 model, written by hand."""
    split: bool = False
    """Split masters, where the optimizer has them."""
    eight_bit: bool = False
    """States in 8 bits, where the optimizer has them."""
    torchs_optimizer: bool = False
    """The fused optimizer of torch in a session."""
    channels_last: bool = True
    """Layout of images and convolutions."""

    @property
    def ours(self) -> bool:
        """Whether preamp does it."""
        return self.level is not None


FP16, BF16 = torch.float16, torch.bfloat16

REFERENCE = Contender(name="torch.amp fp16", dtype=FP16)
"""torch.autocast, GradScaler and the fused optimizer: what everything is compared with."""

O2 = Contender(name="preamp O2", level="O2")
O5_SPLIT = Contender(name="preamp O5, split masters", level="O5", split=True)
O5_EIGHT = replace(O5_SPLIT, name="preamp O5, split masters, 8-bit states", eight_bit=True)
CAPTURED = replace(O2, name="preamp O2, captured", captured=True)
UNSCALED = replace(O2, name="preamp O2, scale 1", scale=1)
"""What scaling adds to a step is the difference between O2 and this."""
REFERENCE_CAPTURED = replace(REFERENCE, name="torch.amp fp16, captured", captured=True)
FIRST_LAYOUT = replace(REFERENCE, name="torch.amp fp16, NCHW", channels_last=False)

EAGER: tuple[Contender, ...] = (
    REFERENCE,
    FIRST_LAYOUT,
    replace(REFERENCE, name="torch.amp fp16, foreach", fused=False),
    Contender(name="torch.amp bf16", dtype=BF16),
    Contender(name="masters by hand, fp16", dtype=FP16, by_hand=True),
    Contender(name="tf32"),
    Contender(name="fp32", tf32=False),
    O2,
    Contender(name="preamp O1", level="O1"),
    O5_SPLIT,
    O5_EIGHT,
    Contender(name="preamp O3", level="O3"),
    UNSCALED,
    REFERENCE_CAPTURED,
    CAPTURED,
)

COMPILED_REFERENCE = replace(REFERENCE, name="torch.amp fp16, compiled", compiled=True)
O2_COMPILED = replace(O2, name="preamp O2, compiled", compiled=True)
REFERENCE_REDUCED = replace(COMPILED_REFERENCE, name="torch.amp fp16, reduce-overhead", mode="reduce-overhead")
O2_REDUCED = replace(O2_COMPILED, name="preamp O2, reduce-overhead", mode="reduce-overhead")

BF16_COMPILED = Contender(name="torch.amp bf16, compiled", dtype=BF16, compiled=True)

COMPILED: tuple[Contender, ...] = (
    REFERENCE,
    COMPILED_REFERENCE,
    O2_COMPILED,
    REFERENCE_REDUCED,
    O2_REDUCED,
    BF16_COMPILED,
)

PARITY: tuple[Contender, ...] = (
    REFERENCE,
    O2,
    Contender(name="preamp O1", level="O1"),
    O5_SPLIT,
)
"""Compared with float32 by where training arrives."""


SHORT = ("feed-forward", "BERT-base b4", "BERT-base b32", "UNet")
"""Works whose kernels are short enough for a graph to pay."""


def fitting(work: Work) -> list[Contender]:
    """Those of `EAGER` that say something about a work: layouts are for images, 8 bits for states that SGD has not,
    and what scaling adds is asked once.
    """
    wanted = [c for c in EAGER if work.images or c is not FIRST_LAYOUT]
    wanted = [c for c in wanted if work.name in SHORT or not c.captured]
    wanted = [c for c in wanted if work.optimizer != "SGD" or not c.eight_bit]
    return [c for c in wanted if c is not UNSCALED or work.name == "BERT-base b4"]


def fitting_compiled(work: Work) -> list[Contender]:
    """Those of `COMPILED` that are worth the time to compile them: graphs where kernels are short, bfloat16 once."""
    left_out: dict[str, tuple[Contender, ...]] = {
        "feed-forward": (BF16_COMPILED,),
        "BERT-base b4": (COMPILED_REFERENCE, O2_COMPILED, BF16_COMPILED),
        "BERT-base b32": (O2_REDUCED,),
    }
    others = left_out.get(work.name, (REFERENCE_REDUCED, O2_REDUCED, BF16_COMPILED))
    return [contender for contender in COMPILED if contender not in others]


class Trainer:
    """A contender at work: a network of its own, its optimizer, and the loop around them.

    `backend` is torch.compile's. A context manager; `close` gives up everything that holds memory.
    """

    def __init__(
        self, contender: Contender, work: Work, device: torch.device, *,
        count: int | None = None, seed: int = 0, backend: str = "inductor",
    ) -> None:  # fmt: skip
        self.contender, self.work, self.device = contender, work, device
        self.session: Session | None
        self.scaler: torch.amp.GradScaler | None = None
        self._count, self._seed = count, seed
        self._layout = torch.channels_last if work.images and contender.channels_last else torch.contiguous_format
        model: Any = work.model(device, seed)
        if work.images:
            model = model.to(memory_format=self._layout)
        self._model: nn.Module = model
        self._run: Callable[..., Any] = model
        self._mode = contender.mode if backend == "inductor" else None  # other backends have no modes
        if contender.compiled:
            self._run = torch.compile(model, backend=backend, dynamic=False, mode=self._mode)
        self._batches: Iterator[Batch] = itertools.cycle([self.data(index) for index in range(BATCHES)])
        self._by_hand: ByHand | None = None
        self._optimizer = self._make_optimizer()
        self.session = self._prepare(contender)
        if self.session is None:
            self.scaler = torch.amp.GradScaler(device.type, enabled=contender.dtype is FP16)
        self.train: Callable[[Tensor, Tensor], Tensor] = self._with_session if contender.ours else self._with_torch
        if contender.captured and self.session is None:
            self.train = Graphed(self.train, device)
        elif contender.captured and self.session is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PreampWarning)  # on a CPU the step runs as it is written
                self.train = self.session.capture(self.train)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        kind, contender = self.work.optimizer, self.contender
        arguments: dict[str, Any] = {"lr": self.work.lr}
        if kind == "SGD":
            arguments["momentum"] = 0.9
        elif contender.level == "O3":
            arguments["eps"] = 1e-4  # float16 states turn the default into zero
        if not contender.ours or contender.torchs_optimizer:
            maker = getattr(torch.optim, kind)
            how = {"fused": True} if contender.fused else {"foreach": True}
            how |= {"capturable": True} if contender.captured else {}
        else:
            maker, how = getattr(optim, kind), {}
            if contender.split and kind != "SGD":
                arguments["master"] = "split"
            if contender.eight_bit and kind != "SGD":
                arguments["states"] = "8bit"
        if contender.by_hand:
            self._by_hand = ByHand(self._model, lambda masters: maker(masters, **arguments, **how))
            return self._by_hand.optimizer
        made: torch.optim.Optimizer = maker(self._model.parameters(), **arguments, **how)
        return made

    def _prepare(self, contender: Contender) -> Session | None:
        if contender.level is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PreampWarning)
            return prepare(self._model, self._optimizer, level=contender.level, scale=contender.scale)

    # -- training

    def data(self, index: int) -> Batch:
        """Batch number `index` in the contender's layout."""
        x, y = self.work.data(self.device, index, self._seed, self._count)
        return (x.contiguous(memory_format=self._layout) if x.dim() == 4 else x), y

    def step(self) -> Tensor:
        """One training step on the next batch; its loss, 0-d."""
        if self._mode is not None:
            torch.compiler.cudagraph_mark_step_begin()  # what the last step's graphs gave is not needed any more
        return self.train(*next(self._batches))

    def _with_torch(self, x: Tensor, y: Tensor) -> Tensor:
        scaler, by_hand, clip = self.scaler, self._by_hand, self.work.clip
        assert scaler is not None
        region: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if by_hand is not None:
            x = x.half() if x.is_floating_point() else x
        elif self.contender.dtype is not None:
            region = torch.autocast(self.device.type, dtype=self.contender.dtype)
        with region:
            loss = self.work.loss(self._run(x), y)
        scaler.scale(loss).backward()
        if by_hand is not None:
            by_hand.unpack()
        if clip is not None:
            scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._model.parameters() if by_hand is None else by_hand.masters, clip)
        scaler.step(self._optimizer)
        scaler.update()
        if by_hand is not None:
            by_hand.publish()
        else:
            self._optimizer.zero_grad()
        return loss.detach()

    def _with_session(self, x: Tensor, y: Tensor) -> Tensor:
        session = self.session
        assert session is not None
        with session.autocast():
            loss = self.work.loss(self._run(x), y)
        session.backward(loss)
        if self.work.clip is not None:
            session.clip_grad_norm_(self.work.clip)
        session.step()
        session.zero_grad()
        return loss.detach()

    # -- its place among others

    def take_turn(self) -> None:
        """Set what belongs to the process and differs between contenders: how float32 products are computed."""
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high" if self.contender.tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = self.contender.tf32

    def recover(self) -> None:
        """Throw gradients away, after a step that broke off."""
        if self.session is not None:
            self.session.zero_grad()
        self._optimizer.zero_grad()

    def close(self) -> None:
        """End the session and let go of every tensor."""
        if self.session is not None:
            self.session.close()
        for name in ("train", "_run", "_model", "_optimizer", "_batches", "_by_hand", "scaler", "session"):
            self.__dict__.pop(name, None)

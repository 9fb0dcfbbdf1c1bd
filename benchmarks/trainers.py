"""Who competes and how each trains: in float32, under torch.amp, and through a session of preamp."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm

from preamp import optim
from preamp.errors import PreampWarning
from preamp.session import Session, prepare

from .race import Entry, without_rules
from .works import Batch, Work


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to train. `level` (of preamp) or `dtype` (of torch.autocast), or neither for float32."""

    name: str
    level: str | None = None
    dtype: torch.dtype | None = None
    scale: float | None = None  # in place of the level's
    fused: bool = True  # of torch's optimizers, else foreach
    tf32: bool = True
    compiled: bool = False
    mode: str | None = None  # torch.compile's
    captured: bool = False  # in a CUDA graph, by torch's means for one of torch
    by_hand: bool = False  # float32 masters of a float16 model, as O2 was written for Apex
    split: bool = False  # masters of preamp's optimizer
    eight_bit: bool = False  # its states
    torchs_optimizer: bool = False  # in a session
    channels_last: bool = True  # for images

    @property
    def ours(self) -> bool:
        """Whether preamp does it."""
        return self.level is not None


FP16, BF16 = torch.float16, torch.bfloat16

REFERENCE = Contender(name="torch.amp fp16", dtype=FP16)  # with GradScaler and the fused optimizer
REFERENCE_CAPTURED = replace(REFERENCE, name="torch.amp fp16, captured", captured=True)
FIRST_LAYOUT = replace(REFERENCE, name="torch.amp fp16, NCHW", channels_last=False)
FOREACH = replace(REFERENCE, name="torch.amp fp16, foreach", fused=False)
BY_HAND = Contender(name="masters by hand, fp16", dtype=FP16, by_hand=True)
AMP_BF16 = Contender(name="torch.amp bf16", dtype=BF16)
TF32 = Contender(name="tf32")
FP32 = Contender(name="fp32", tf32=False)
O1, O2, O3, O4, O5 = (Contender(name=f"preamp {level}", level=level) for level in ("O1", "O2", "O3", "O4", "O5"))
O5_SPLIT = replace(O5, name="preamp O5, split masters", split=True)
O5_EIGHT = replace(O5_SPLIT, name="preamp O5, split masters, 8-bit states", eight_bit=True)
CAPTURED = replace(O2, name="preamp O2, captured", captured=True)
UNSCALED = replace(O2, name="preamp O2, scale 1", scale=1)  # beside O2, what scaling adds to a step

EAGER = (
    REFERENCE, O2, AMP_BF16, O5, TF32, FP32, O1, O4, O5_SPLIT, O5_EIGHT, FIRST_LAYOUT, FOREACH, BY_HAND, O3, UNSCALED,
    REFERENCE_CAPTURED, CAPTURED,
)  # fmt: skip
LOSSES = (FP32, REFERENCE, O2, AMP_BF16, O5, O1, O4, TF32, O5_SPLIT, O5_EIGHT)
BATCHES = (REFERENCE, O2, O5, O5_SPLIT, O5_EIGHT, FP32)


def compiled(contender: Contender, mode: str | None = None) -> Contender:
    """The same with its model compiled."""
    return replace(contender, name=f"{contender.name}, {mode or 'compiled'}", compiled=True, mode=mode)


COMPILED_REFERENCE, O2_COMPILED = compiled(REFERENCE), compiled(O2)
REFERENCE_REDUCED, O2_REDUCED = compiled(REFERENCE, "reduce-overhead"), compiled(O2, "reduce-overhead")
COMPILED = (COMPILED_REFERENCE, O2_COMPILED, *map(compiled, (AMP_BF16, O5, TF32, O1, O4, FP32)), REFERENCE)
"""No more compiled ones than dynamo keeps of one forward pass: others would run as written."""

SHORT = ("feed-forward", "BERT-base b4", "BERT-base b32", "UNet")  # kernels are short enough for a graph to pay
HEAVY = ("BERT-large b16", "GPT-2048 b4")  # only so many contenders find memory at a time


def fitting(contenders: tuple[Contender, ...], work: Work) -> list[Contender]:
    """Those that say something about a work: SGD has no states for 8 bits, nor split masters; layouts are for images;
    and what scaling adds is asked once.
    """
    left_out = {
        FIRST_LAYOUT: not work.images,
        UNSCALED: work.name != "BERT-base b4",
        **dict.fromkeys((O5_SPLIT, O5_EIGHT), work.optimizer == "SGD"),
        **dict.fromkeys((REFERENCE_CAPTURED, CAPTURED), work.name not in SHORT),
        **dict.fromkeys((FOREACH, BY_HAND, O3), work.name in HEAVY),
    }
    return [each for each in contenders if not left_out.get(each)]


def fitting_compiled(work: Work) -> list[Contender]:
    """Those that are worth the time to compile them: in graphs too where kernels are shortest."""
    if work.name == "BERT-base b4":  # compiled as written it is BERT-base b32 once more
        return [REFERENCE_REDUCED, O2_REDUCED, REFERENCE]
    if work.name == "feed-forward":
        return [*COMPILED[:4], REFERENCE_REDUCED, O2_REDUCED, REFERENCE]
    return [*COMPILED]


class Trainer:
    """A contender with a network of its own, its optimizer, and the loop around them; `backend` is torch.compile's."""

    def __init__(
        self, contender: Contender, work: Work, device: torch.device, *,
        count: int | None = None, seed: int = 0, backend: str = "inductor",
    ) -> None:  # fmt: skip
        self.contender, self.work, self.device = contender, work, device
        self._count, self._seed = count, seed
        self._layout = torch.channels_last if work.images and contender.channels_last else torch.contiguous_format
        self._mode = contender.mode if backend == "inductor" else None  # other backends have no modes
        model: Any = work.model(device, seed)
        self._model = self._run = model.to(memory_format=self._layout) if work.images else model
        if contender.compiled:
            self._run = torch.compile(self._model, backend=backend, dynamic=False, mode=self._mode)
        # batches that it goes round, made before the clock runs
        self._batches: Iterator[Batch] = itertools.cycle([self.data(index) for index in range(4)])
        self._by_hand = ByHand(self._model, self._optimizer_of) if contender.by_hand else None
        self._optimizer = self._by_hand.optimizer if self._by_hand else self._optimizer_of(self._model.parameters())
        self.session: Session | None = None
        self.scaler = torch.amp.GradScaler(device.type, enabled=contender.dtype is FP16)
        self.train: Callable[[Tensor, Tensor], Tensor] = self._with_torch
        if contender.level is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PreampWarning)  # O3's states, and captured steps on a CPU
                self.session = prepare(self._model, self._optimizer, level=contender.level, scale=contender.scale)
                self.train = self.session.capture(self._with_session) if contender.captured else self._with_session
        elif contender.captured:
            self.train = Graphed(self.train, device)

    def _optimizer_of(self, params: Any) -> torch.optim.Optimizer:
        kind, contender = self.work.optimizer, self.contender
        ours = contender.ours and not contender.torchs_optimizer
        arguments: dict[str, Any] = {"lr": self.work.lr} | ({"momentum": 0.9} if kind == "SGD" else {})
        if contender.level == "O3" and kind != "SGD":
            arguments["eps"] = 1e-4  # float16 states turn the default into zero
        if ours:
            arguments |= {"master": "split"} if contender.split else {}
            arguments |= {"states": "8bit"} if contender.eight_bit else {}
        else:
            arguments |= {"fused": True} if contender.fused else {"foreach": True}
            arguments |= {"capturable": True} if contender.captured else {}
        made: torch.optim.Optimizer = getattr(optim if ours else torch.optim, kind)(params, **arguments)
        return made

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

    def close(self) -> None:
        """End the session and let go of every tensor."""
        if self.session is not None:
            self.session.close()
        self.__dict__.clear()


@contextlib.contextmanager
def turn(contender: Contender, device: torch.device) -> Iterator[None]:
    """What differs between contenders and belongs to the process: products of float32, and preamp's rules.

    torch's contenders pay for no rules: the dispatcher has none while they run.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if contender.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = contender.tf32
    try:
        with contextlib.nullcontext() if contender.ours else without_rules():
            yield
    except Exception:
        if contender.captured and device.type == "cuda":  # a capture that broke off leaves the generator at it
            generator: Any = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(torch.Generator("cuda").graphsafe_get_state())
        raise


def entry(contender: Contender, work: Work, device: torch.device, backend: str = "inductor") -> Entry:
    """A contender for a race of training steps."""

    def make(stack: contextlib.ExitStack) -> Callable[[], Tensor]:
        return stack.enter_context(contextlib.closing(Trainer(contender, work, device, backend=backend))).step

    return Entry(contender.name, make, turn=partial(turn, contender, device), before=1)


# -- what contenders of torch do by hand


class ByHand:
    """A model in float16 with its batch norms in float32, and float32 masters with the optimizer that `make` makes."""

    def __init__(self, model: nn.Module, make: Callable[[Iterable[Parameter]], torch.optim.Optimizer]) -> None:
        for module in model.modules():
            if not isinstance(module, _BatchNorm):
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    if tensor.is_floating_point():
                        tensor.data = tensor.data.half()
        self._low = [p for p in model.parameters() if p.requires_grad]
        self.masters = [Parameter(p.detach().float()) for p in self._low]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.optimizer = make(self.masters)

    def unpack(self) -> None:
        """Give the masters the gradients of the model, and the model none."""
        pairs = zip(self.masters, self._low, strict=True)
        grads = [(m.grad, p.grad) for m, p in pairs if m.grad is not None and p.grad is not None]
        torch._foreach_copy_([master for master, _ in grads], [low for _, low in grads])
        for param in self._low:
            param.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model the masters' values, which after a skipped step are what it has."""
        torch._foreach_copy_(list[Tensor](self._low), list[Tensor](self.masters))


class Graphed:
    """A function of tensors that is captured at the call after `warm_up` others, and replayed from then on.

    A replay copies its arguments to where those of the capture lay, and gives its result. A CPU has no such graphs.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device, warm_up: int = 3) -> None:
        self._function, self._device, self._left = function, device, warm_up
        self._inputs: tuple[Tensor, ...] = ()
        self._graph: Any = None
        self._result: Any = None
        self._stream: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        """One call, with tensors like those of the calls before."""
        if self._device.type != "cuda":
            return self._function(*inputs)
        if self._left > 0:
            self._left -= 1
            return self._on_side_stream(*inputs)
        if self._graph is None:
            self._capture(*inputs)
        for held, given in zip(self._inputs, inputs, strict=True):
            held.copy_(given)
        self._graph.replay()
        return self._result

    def _on_side_stream(self, *inputs: Tensor) -> Any:
        # not on the default stream, which cannot be captured; on one for all calls, since streams share no free memory
        self._stream = self._stream or torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            result = self._function(*inputs)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return result

    def _capture(self, *inputs: Tensor) -> None:
        self._inputs = tuple(each.clone() for each in inputs)
        graph = torch.cuda.CUDAGraph()
        torch.clear_autocast_cache()  # casts of weights must be made by the graph, not found
        with torch.cuda.graph(graph):
            self._result = self._function(*self._inputs)
        self._graph = graph

"""When gradients are reduced: buckets are sent during backward, in one order on every rank, and done before it returns.

torch's own bucketed reducer is not used, because it reduces only the first backward after each forward, fixes the set
of trained parameters at construction and stays broken after a backward that raised. Here a pass begins with the first
gradient of any backward and ends in that backward's final callback, whatever happened before it. Ranks stay in step
because every pass sends every bucket exactly once, in the same order: a bucket whose parameters this rank does not
use is sent at the end of the pass with zeros in it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._buckets import Bucket, Reduction, ReductionOptions, plan_buckets, refuse_sparse
from ._collectives import Group, has_group


class _Pass:
    """One backward: which parameters got a gradient so far, and which buckets have left."""

    def __init__(self, task: int, plan: Sequence[Bucket]) -> None:
        self.task = task
        self.certain = False  # whether the other ranks count on this pass
        self.sources: list[Any] = []  # graph nodes of the model's inputs
        self.at_end = False  # send nothing before the end
        self.arrivals: list[int] = []
        self.frozen: list[int] = []
        self.missing = [set(bucket.members) for bucket in plan]
        self.reductions: list[Reduction] = []


def _fills_grad(nodes: Iterable[Any]) -> bool:
    """Whether the running backward, which passes through `nodes`, fills `.grad`: torch.autograd.grad does not.

    The first leaf upstream tells: torch.autograd.grad does not execute the nodes that accumulate.
    """
    stack, seen = list(nodes), set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            return _will_run(node)
        stack.extend(before for before, _ in node.next_functions)
    return False


def _will_run(leaf: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch refuses to answer for a leaf that torch.autograd.grad was asked for
        return False


class Synchronizer:
    """Reduces the gradients of `named` parameters at the end of every backward that reaches them.

    `message_size`: elements after which a bucket is sent, infinity for one message per dtype at the end of backward;
    `triggers`: numbers of parameters that close a bucket instead. `groups`: bucket k is reduced in group k modulo their
    number. `enabled`: False lets gradients accumulate locally; what accumulated is reduced with the next pass.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        options: ReductionOptions,
        groups: Sequence[Group],
        message_size: float,
        triggers: Collection[int] = (),
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.enabled = True
        self.buffers: list[Tensor] = []
        self._options, self._groups = options, list(groups)
        self._message_size, self._triggers = message_size, frozenset(triggers)
        self._overlap = message_size != float("inf")
        self._order = list(reversed(range(len(named))))  # a first guess: backward meets the last layers first
        self._learned: set[int] = set()
        self._frozen_since: dict[int, int] = {}
        self._hooks: dict[int, Any] = {}
        self._shape: Any = None
        self._plan: list[Bucket] = []
        self._bucket_of: dict[int, int] = {}
        self._unsent: set[int] = set()  # gradients that only this rank has seen, from passes while disabled
        self._passes = 0
        self._pass: _Pass | None = None
        self._callback: Callable[[], Any] = lambda: None
        """A weak reference to the running backward's final callback, which the engine keeps as long as it runs."""
        self._lock = threading.RLock()  # CPU and CUDA parameters get their gradients in different threads
        self.refresh()

    def close(self) -> None:
        """Take all hooks off the parameters."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    # -- before forward

    def refresh(self) -> None:
        """Look again which parameters want gradients. Called before a forward that records a graph.

        A parameter found frozen stays for one more pass: a graph made before may get its backward once the parameter
        is thawed again, as when a GAN's discriminator is frozen only while the generator's loss is built.
        """
        if torch._C._current_graph_task_id() != -1:
            return  # a forward recomputed during backward, by checkpointing
        with self._lock:
            self._complete_interrupted()
            training = {i for i, p in enumerate(self.parameters) if p.requires_grad}
            for number in training - self._hooks.keys():
                self._hooks[number] = self._hook(number)
            self._frozen_since = {
                number: since
                for number in self._bucket_of.keys() - training
                if (since := self._frozen_since.get(number, self._passes)) == self._passes
            }
            self._replan(training | self._frozen_since.keys())

    def _replan(self, active: Collection[int]) -> None:
        shape = [(i, self.parameters[i].dtype, self.parameters[i].device) for i in self._order if i in active]
        if shape == self._shape:
            return
        self._shape = shape
        order = [number for number, _, _ in shape]
        self._plan = plan_buckets(order, self.parameters, self._message_size, self._triggers)
        self._bucket_of = {number: k for k, bucket in enumerate(self._plan) for number in bucket.members}

    def _hook(self, number: int) -> Any:
        me = weakref.ref(self)  # the hook must not keep a wrapper alive, nor reduce for one that was replaced

        def arrived(parameter: Tensor) -> None:
            synchronizer = me()
            if synchronizer is not None:
                synchronizer._arrived(number, parameter)

        return self.parameters[number].register_post_accumulate_grad_hook(arrived)

    def watch(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Begin a pass as soon as backward reaches one of the model's `outputs`.

        The pass then ends with the outermost backward even if the gradients arrive in nested ones, which reentrant
        checkpointing runs; and a rank takes part even if none of its parameters was used, as long as its `inputs`
        need gradients (otherwise there is no backward to take part in).
        """
        sources = [torch.autograd.graph.get_gradient_edge(tensor).node for tensor in inputs if tensor.requires_grad]

        def reached(_: Tensor) -> None:  # holds the synchronizer: a graph outlives a wrapper made for one call
            if self.enabled and self._plan and has_group():
                with self._lock:
                    current = self._begin()
                    current.sources.extend(sources)
                    current.certain = current.certain or self._expects_gradients()

        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(reached)

    def _expects_gradients(self) -> bool:
        """Whether the running backward will fill the first trained parameter's `.grad`; a guess, but never a wrong yes.

        It matters when this backward raises before any gradient arrived.
        """
        leaf = next((p for p in self.parameters if p.requires_grad), None)
        return leaf is not None and _will_run(torch.autograd.graph.get_gradient_edge(leaf).node)

    # -- during backward

    def _begin(self) -> _Pass:
        """The pass of the running backward, or a new one whose end is queued with the engine."""
        task = torch._C._current_graph_task_id()
        if self._pass is not None and self._callback() is not None:
            if task != self._pass.task:  # nested: the same parameter may well come again
                self._pass.at_end = True
            return self._pass
        self._complete_interrupted()
        current = self._pass = _Pass(task, self._plan)

        def callback() -> None:
            self._finish(current)

        self._callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        return current

    def _arrived(self, number: int, parameter: Tensor) -> None:
        if not has_group():
            return  # the group was closed after training; what is left is a plain module
        with self._lock:
            refuse_sparse(parameter, self.names[number])
            if not self.enabled:
                self._unsent.add(number)
                return
            current = self._begin()
            current.certain = True
            if number not in self._bucket_of:
                current.frozen.append(number)
                return
            if self._bucket_of[number] < len(current.reductions):
                raise RuntimeError(
                    f"{self.names[number]} received a second gradient in one backward after the first was sent to the "
                    "other ranks, so the ranks would no longer agree. This happens when reentrant checkpoints share "
                    "parameters: use torch.utils.checkpoint(..., use_reentrant=False), or delay_allreduce=True."
                )
            current.arrivals.append(number)
            current.missing[self._bucket_of[number]].discard(number)
            if self._overlap and not current.at_end:
                while len(current.reductions) < len(self._plan) and not current.missing[len(current.reductions)]:
                    self._send(current)

    def _send(self, current: _Pass) -> None:
        """Send the next bucket with whatever is in `.grad` now."""
        bucket = self._plan[len(current.reductions)]
        missing = current.missing[len(current.reductions)]
        used = [number not in missing or number in self._unsent for number in bucket.members]
        group = self._groups[len(current.reductions) % len(self._groups)]
        current.reductions.append(Reduction(bucket, used, self._options, group))

    # -- after backward

    def _finish(self, current: _Pass) -> None:
        with self._lock:
            if self._pass is not current:
                return
            self._pass = None
            if not current.certain and any(p.requires_grad for p in self.parameters):
                current.certain = _fills_grad(current.sources)
            if current.certain:
                self._complete(current)
                if current.frozen:
                    names = ", ".join(self.names[number] for number in current.frozen)
                    raise RuntimeError(
                        f"{names} received a gradient although frozen when the last forward began, so it was not "
                        "averaged and differs between ranks. Run backward through a graph before freezing its "
                        "parameters, or at the latest before the next backward of another graph."
                    )

    def _complete(self, current: _Pass, keep: bool = True) -> None:
        """Send what is left, finish all reductions, and learn the order of arrival if there is one to learn."""
        while len(current.reductions) < len(self._plan):
            self._send(current)
        for reduction in current.reductions:
            reduction.finish(keep)
        self._passes += 1
        if keep:
            self._unsent.clear()
            if self._options.retain:
                self.buffers = [reduction.body for reduction in current.reductions]
        if self._overlap and len(self._plan) > 1 and not self._learned >= self._bucket_of.keys():
            self._learn(current.arrivals)

    def _complete_interrupted(self) -> None:
        """Complete a pass whose backward raised: the other ranks, if they got through, are waiting for its buckets.

        Their results are discarded. The gradients of the interrupted backward stay as they are, for zero_grad.
        """
        current, self._pass = self._pass, None
        if current is not None and current.certain:
            self._complete(current, keep=False)

    def _learn(self, arrivals: Sequence[int]) -> None:
        """Order the buckets from now on as gradients arrived on rank 0; parameters it did not use come last."""
        first = list(dict.fromkeys(arrivals))
        seen = set(first)
        order = first + [number for number in self._order if number not in seen]
        message = torch.tensor(order, device=self._plan[0].parameters[0].device)
        dist.broadcast(message, 0, group=self._groups[0])
        self._order = message.tolist()
        self._learned |= self._bucket_of.keys()
        self._replan(self._bucket_of.keys())

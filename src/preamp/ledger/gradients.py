"""Gradients between backward and step: resting, read, or true.

*Resting*: as backward left them, scaled, 16-bit for 16-bit parameters. More can be added. *Read*: their norm is known,
and whether they are finite; unscaling and clipping are a factor that the step applies. *True*: unscaled and clipped,
float32 if there is a master, which then is in the parameter's place; user code may read and change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..kernels import Reading, chained, global_norm, listed, multiply_, present_in, read, reciprocal
from ..parallel import Agreement
from ..sharding import placed_as
from .leaves import dtype_of_gradient, gradients_of, parameters_of, summed
from .masters import Masters
from .record import Owned, Record, WideSums, is_marked
from .swap import hand_over

_PARAMS = attrgetter("params")


class Gradients:
    """The gradients of a session's optimizers, with a record of each optimizer whose gradients were read.

    One loss: gradients accumulate and rest scaled. Several losses with scales of their own: `add_unscaled` unscales
    each loss's gradients at once and adds them up, in float32 for low parameters. Readings, factors and norms are on
    one device, wherever the gradients are: optimizers of several devices have to be compared.
    """

    def __init__(self, masters: Masters, optimizers: Iterable[Optimizer], device_type: str, group: Any = None) -> None:
        self._masters, self._optimizers, self._group = masters, list(optimizers), group
        self._device_type = device_type
        self._known: dict[Optimizer, Owned] = {}
        self._sums = WideSums()
        self.records: dict[Optimizer, Record] = {}
        """What was read of the gradients of each optimizer since its last step."""
        self.clipped: dict[Optimizer, Record] = {}
        """Of optimizers whose last step has clipped by a factor: gradients that are kept still lack that."""
        self.carried: list[Parameter] = []
        """Parameters with true gradients from before the session, until the first backward pass."""
        self.stepping: Optimizer | None = None  # whose hooks find gradients as it does

    @property
    def device(self) -> torch.device:
        """The device of readings, factors and norms: that of the first parameter."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    return cast(torch.device, parameter.device)
        return torch.device(self._device_type)

    def _of(self, optimizer: Optimizer) -> Owned:
        """The parameters of an optimizer; a 16-bit one that was added later gets a master."""
        every, known = list(parameters_of(optimizer)), self._known.get(optimizer)
        if known is None or not known.leaves.is_of(every):
            agreement = Agreement(every, self._group)
            known = Owned(every, self._masters.leaves_of(every), agreement if agreement.needed else None)
            self._known[optimizer] = known
        for index, parameter in enumerate(added := self._masters.without_masters(known.leaves)):
            self._masters.adopt(f"(added later):{index}:{len(self._masters)}", parameter)
        if added:
            known.leaves = self._masters.leaves_of(every)
        return known

    def follow(self, optimizer: Optimizer) -> None:
        """Have masters follow parameters of an optimizer that were written from outside."""
        self._masters.refresh_before_step(self._of(optimizer).leaves)

    def others_have_masters(self) -> None:
        """Forget what is known of parameters: some have got masters, or another dtype."""
        self._known.clear()

    # -- resting

    def rest(self) -> None:
        """Return gradients to the resting state, with all changes made since, so that more can be added.

        Gradients that were cleared stay cleared, whatever cleared them. A later step reads them again. Nothing happens
        while an optimizer steps, whose hooks may look at the model.
        """
        if self.stepping is not None:
            return
        for optimizer in list(self.records):
            self._rest(self.records.pop(optimizer))
        if self._masters.inside:  # an interrupt left them in place
            self._masters.swap_out()

    def _rest(self, record: Record) -> None:
        if not record.true:
            self.shrink(record)
            return
        scale = None if record.inverse is None else reciprocal(record.inverse)
        totals = {p: p.grad for p in record.kept if p.grad is not None}
        others = [p for p in record.parameters if p not in self._masters]
        changed = record.clip is not None  # and a backward pass may be due still, for which weights are as they were
        for parameter, other in self._masters.swap_out(record.parameters, scale, changed, lazily=True):
            hand_over(parameter, other)  # a forward pass may have run in between
        if scale is not None:
            multiply_(present_in(others)[1], scale)
        for parameter, total in totals.items():
            self._sums.show(parameter, total if scale is None else total * scale.to(total.device))

    def shrink(self, record: Record) -> None:
        """Apply the clipping of the step to gradients that were not cleared or written since."""
        if (clip := record.clip) is None:
            return
        rest = []
        for parameter, grad in zip(*present_in(record.parameters), strict=True):
            if record.clipped.get(id(grad)) != grad._version:
                continue
            if parameter in self._masters:  # its 16 bits would not hold all of that
                self._sums.show(parameter, self._sums.of(parameter) * clip.to(grad.device))
            else:
                rest.append(grad)
        multiply_(rest, clip)

    def carry(self, gradients: Mapping[Parameter, Tensor]) -> None:
        """Take over true gradients from before the session; those of low parameters also in float32."""
        self.carried = list(gradients)
        for parameter, true in gradients.items():
            if parameter in self._masters:
                self._sums.show(parameter, true.float())
            else:
                parameter.grad = true.to(dtype_of_gradient(parameter))

    def scale_carried(self, scaled: Callable[[Tensor], Tensor] | None) -> None:
        """Scale carried gradients like those that are to be added; None leaves them unscaled."""
        if scaled is not None:
            for parameter in self.carried:
                if parameter.grad is not None:
                    parameter.grad = scaled(self._sums.of(parameter)).to(dtype_of_gradient(parameter))
                self._sums.forget(parameter)
        self.carried.clear()

    def true_for_good(self, inverse: Tensor | None) -> dict[Parameter, Tensor]:
        """Multiply resting gradients by `inverse`. Those of parameters with masters are returned, in float32."""
        present = present_in(list(dict.fromkeys(chain(*map(parameters_of, self._optimizers)))))[0]
        wide = {p: self._sums.of(p) for p in self._masters.among(present)}
        if inverse is not None:
            multiply_([*wide.values(), *present_in([p for p in present if p not in wide])[1]], inverse)
        return wide

    def add_unscaled(
        self, run: Callable[[], None], inverse: Tensor | None, others: Iterable[Parameter]
    ) -> dict[Optimizer, Reading]:
        """Run a backward pass, unscale what it adds by `inverse`, and add that to the true gradients so far.

        `others`: parameters of no optimizer, to which it adds as well. Returns the reading of each optimizer that got
        gradients from it. Whatever happens in `run`, earlier gradients stay.
        """
        parameters = {p: None for p in chain(*map(parameters_of, self._optimizers), others) if p.requires_grad}
        before = {p: p.grad for p in parameters}
        for parameter, grad in before.items():
            if grad is not None:
                parameter.grad = None
            else:
                self._sums.forget(parameter)  # zeroed since: its kept sum is void
        try:
            run()
        except BaseException:
            for parameter, grad in before.items():
                parameter.grad = grad
            raise
        added: dict[Parameter, Tensor] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                grad = placed_as(summed(parameter), parameter)
                added[parameter] = grad.float() if parameter in self._masters else grad
        readings, scaled = {}, dict(added)
        for optimizer in self._optimizers:
            own = {p: scaled.pop(p) for p in parameters_of(optimizer) if p in scaled}
            if own or self._of(optimizer).agreement is not None:
                readings[optimizer] = self._read(optimizer, own)
        if inverse is not None:
            multiply_(added.values(), inverse)
        for parameter, grad in before.items():
            parameter.grad = grad
            if parameter in added:
                self._add(parameter, added[parameter])
        return readings

    def _add(self, parameter: Parameter, gradient: Tensor) -> None:
        if parameter not in self._masters:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            return
        self._sums.show(parameter, gradient if parameter.grad is None else self._sums.of(parameter) + gradient)

    # -- read

    def read(self, optimizer: Optimizer, inverse: Callable[..., Tensor | None], steps_next: bool = False) -> Record:
        """Read an optimizer's gradients, once; `inverse` gives what unscales them on a device (None: nothing does).

        `steps_next`: the optimizer's step follows at once, so they may be read in the lists that it collects. Then
        the last bit of the norm depends on their layout, so do not use it for clipping.
        """
        record = self.records.get(optimizer)
        if record is not None and not record.leaves.is_of(list(parameters_of(optimizer))):
            self._rest(self.records.pop(optimizer))  # gradients of those that have joined are as backward left them
            record = None
        if record is None:
            own, home = self._of(optimizer), self.device
            if own.agreement is None and not self._sums:
                record = self._read_quickly(optimizer, own, home, steps_next)
            self.records[optimizer] = record = record or self._read_all(optimizer, own)
            record.inverse = inverse(home)
        elif record.true:
            self._read_again(optimizer, record)
        return record

    def _read_again(self, optimizer: Optimizer, record: Record) -> None:
        """Read true gradients, as user code has left them, and take those that came to 16-bit parameters since."""
        for parameter, late in self._masters.take_late(record.parameters).items():
            parameter.grad = late if parameter.grad is None else parameter.grad + late
        now = self._read(optimizer, {p: summed(p) for p in record.present if p.grad is not None})
        record.reading = replace(now, found=torch.maximum(record.reading.found, now.found))

    def _read_all(self, optimizer: Optimizer, own: Owned) -> Record:
        parameters = [p for p in own.parameters if p.grad is not None]
        gradients = {}
        for parameter in parameters:
            grad = summed(parameter)
            if own.agreement is not None:
                grad = parameter.grad = placed_as(grad, parameter)
            gradients[parameter] = self._sums.of(parameter) if parameter in self._sums else grad
        return Record(self._read(optimizer, gradients), parameters, own.leaves)

    def _read_quickly(self, optimizer: Any, own: Owned, home: torch.device, steps_next: bool) -> Record | None:
        """Read while accessing only the gradient of each of a thousand parameters; None if that is not possible."""
        collected = optimizer.collect() if steps_next and getattr(optimizer, "takes_masters", False) else None
        if collected and home.type == collected[0][0].params[0].device.type:
            buckets, lists = zip(*collected, strict=True)
            parameters, gradients = list(chain.from_iterable(map(_PARAMS, buckets))), chained(lists)
        else:
            collected = None
            parameters, present = present_in(own.parameters)
            gradients = listed(present)
        if not gradients.strided:
            return None
        return Record(read(gradients, device=home), parameters, own.leaves, collected=collected)

    def _read(self, optimizer: Optimizer, gradients: Mapping[Parameter, Tensor]) -> Reading:
        own, home = self._of(optimizer), self.device
        if own.agreement is None:
            return read(list(gradients.values()), device=home)
        return own.agreement.read([gradients.get(p) for p in own.parameters]).on(home)

    def norm(self, optimizer: Optimizer) -> Tensor:
        """L2 norm of an optimizer's true gradients, before clipping."""
        record = self.records[optimizer]
        if record.norm is None:
            record.norm = _times(record.reading.norm, record.factor)
        return record.norm

    def norm_of_all(self, optimizers: Sequence[Optimizer]) -> Callable[[], Tensor]:
        """Gives the joint `norm` of several optimizers, as it is now; that of one takes no operator before."""
        first = self.records[optimizers[0]]
        if len(optimizers) == 1 and first.norm is None:
            return partial(_times, first.reading.norm, first.factor)
        return partial(_times, _joint(list(map(self.norm, optimizers))), None)

    def _norm_now(self, optimizer: Optimizer, order: float) -> Tensor:
        """Compute the norm of an optimizer's true gradients, after the clipping so far."""
        record, own = self.records[optimizer], self._of(optimizer)
        if order == 2.0 and record.clip is None and not record.true:
            return self.norm(optimizer)  # which was computed before
        if order == 2.0:
            norm = record.reading.norm
        elif own.agreement is None:
            norm = global_norm(gradients_of(optimizer), order, device=self.device)
        else:
            norm = own.agreement.norm([p.grad for p in own.parameters], order).to(self.device)
        return _times(norm, record.factor)

    def clip_by_norm(self, optimizers: Sequence[Optimizer], most: float, order: float, *, at_once: bool) -> Tensor:
        """Clip by the common norm of some order, to `most`; returns it. `at_once`: not by a factor of the step.

        If gradients of one are not finite, neither is that norm, and clipping by it would spoil the others: they skip
        together.
        """
        for each in optimizers:
            self.norm(each)  # the report has the norm before clipping
            if at_once:
                self.make_true(each)
        norm = _joint([self._norm_now(each, order) for each in optimizers], order)
        coefficient = (most / (norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0)  # the sick stay the only ones
        records = [self.records[each] for each in optimizers]
        found = torch.stack([record.reading.found for record in records]).amax() if len(records) > 1 else None
        for each, record in zip(optimizers, records, strict=True):
            if record.true:
                multiply_(gradients_of(each), coefficient)
            else:
                record.clip = coefficient if record.clip is None else record.clip * coefficient
                record.clipped = {id(gradient): gradient._version for gradient in gradients_of(each)}
            if found is not None:
                record.reading = replace(record.reading, found=found)
        return norm

    # -- true, and stepped

    def is_due(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has gradients that no step has used; one that has marks the first."""
        first = next((p.grad for p in parameters_of(optimizer) if p.grad is not None), None)
        return first is not None and not is_marked(first, "_preamp_stepped")

    def is_true(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's gradients are unscaled."""
        return optimizer in self.records and self.records[optimizer].true

    def make_true(self, optimizer: Optimizer) -> None:
        """Unscale and clip an optimizer's gradients, once; low parameters get float32 ones, and all get masters in."""
        record = self.records[optimizer]
        if record.true:
            return
        self._masters.refresh_before_step(record.leaves)
        present, _ = present_in(record.parameters)  # of those that were read; some may have been cleared since
        # in full precision masters are in their places already, with the gradients themselves
        wide = {p: self._sums.of(p) for p in self._masters.among(present) if p not in self._masters.inside}
        record.kept = [p for p in wide if self._sums.forget(p)]
        factor, others = record.factor, [p for p in present if p not in wide] if wide else present
        if factor is not None:
            multiply_(wide.values(), factor)
        record.parameters = self._of(optimizer).parameters  # user code may give others a gradient
        self._masters.swap_in(record.parameters, wide)  # if it fails, gradients are as they were
        if factor is not None:
            multiply_(present_in(others)[1], factor)
        record.reading, record.true = replace(record.reading, norm=_times(record.reading.norm, factor)), True

    def step_low(self, optimizer: Any, found: Tensor | None) -> None:
        """Step an optimizer that takes 16-bit gradients and masters directly."""
        record = self.records[optimizer]
        self._masters.refresh_before_step(record.leaves, again=True)
        optimizer.step_with(factor=record.factor, found=found, collected=record.collected)

    def takes_low(self, optimizer: Optimizer) -> bool:
        """Whether `step_low` may step an optimizer: no gradient is true, or kept in float32 besides."""
        wide = self._sums and any(map(self._sums.__contains__, parameters_of(optimizer)))
        return not wide and not self.records[optimizer].true

    def forget(self, optimizer: Optimizer, stepped: bool = False) -> None:
        """Drop the record: the optimizer has `stepped`, or its gradients were cleared."""
        record = self.records.pop(optimizer, None)
        self.clipped.pop(optimizer, None)
        if stepped and record is not None and record.clip is not None:
            record.collected, self.clipped[optimizer] = None, record
        if not self._sums and (record is None or not record.true) and not self._masters.inside:
            return
        for parameter in parameters_of(optimizer):
            self._sums.forget(parameter)
        inverse = record.inverse if record is not None and record.true else None
        scale = None if inverse is None else reciprocal(inverse)  # and a backward pass may be due still
        self._masters.swap_out(parameters_of(optimizer), scale, lazily=not stepped)


def _times(norm: Tensor, factor: Tensor | None) -> Tensor:
    return norm if factor is None else norm * factor


def _joint(norms: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """The norm of some order of everything that some norms of that order are of."""
    return norms[0] if len(norms) == 1 else cast(Tensor, torch.linalg.vector_norm(torch.stack(list(norms)), order))

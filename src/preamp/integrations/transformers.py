"""preamp in HF Trainer, and in trainers that are subclasses of it."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from ..errors import SessionError, kind_of
from . import accelerate

_REFUSED = ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval")


def attach(trainer: Trainer, level: str = "auto", **options: Any) -> accelerate.Attachment:
    """Have a Trainer train under a session. Call it once, before `trainer.train()`.

    `level`: "O0" to "O5" or "auto"; `options` go to `preamp.prepare`. Accumulation, clipping, fused optimizers and
    resuming work as they are. Schedules stand still after a skipped step. Logs have `loss_scale` and `skipped_steps`.
    Checkpoints have float32 weights, and the session's state, with which a run resumes bit for bit. The session is
    closed when training ends, and the model is float32 again. `SessionError` for a Trainer that casts by itself.

    >>> trainer = Trainer(model, arguments, train_dataset=data)
    >>> attach(trainer, "O5")
    >>> trainer.train()
    """
    if not isinstance(trainer, Trainer):
        raise SessionError(f"attach() takes a Trainer; this is {kind_of(trainer)}")
    asked = [name for name in _REFUSED if getattr(trainer.args, name, False)]
    if asked:
        raise SessionError(
            f"TrainingArguments({asked[0]}=True) casts by itself, and the level says what is 16-bit: leave it out"
        )
    attachment = accelerate.attach(trainer.accelerator, level, **options)
    log, save = trainer.log, trainer._save

    def with_scale(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if attachment.is_open and "loss" in logs:
            session = attachment.session
            logs = {**logs, "loss_scale": session.loss_scale(), "skipped_steps": session.skipped}
        log(logs, *args, **kwargs)

    def in_float32(output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is not None or not attachment.is_open:
            save(output_dir, state_dict)
            return
        with attachment.session.full_precision(values_only=True):
            save(output_dir)

    methods: Any = trainer
    methods.log, methods._save = with_scale, in_float32
    methods.autocast_smart_context_manager = lambda *_, **__: trainer.accelerator.autocast()
    trainer.add_callback(_Close(attachment))
    return attachment


class _Close(TrainerCallback):
    """Closes the session when training ends."""

    def __init__(self, attachment: accelerate.Attachment) -> None:
        self._attachment = attachment

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """The model is float32 again, for evaluation and for what is saved later."""
        self._attachment.close()

"""preamp in HF Trainer, and in trainers that are subclasses of it: those of TRL and sentence-transformers."""

from __future__ import annotations

import functools
from typing import Any

from transformers import Trainer, TrainerCallback

from ..errors import SessionError, kind_of
from . import accelerate

_CASTS = ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval")


def attach(trainer: Trainer, level: str = "auto", **options: Any) -> accelerate.Attachment:
    """Have a Trainer train under a session. Call it once, before `trainer.train()`.

    The session is closed when training ends, by an exception too, and the model is float32 again. Checkpoints have
    float32 weights, and the session's state: a run resumes bit for bit. What is returned has it as `session`.

    Args:
        trainer: One that has not trained yet.
        level: "O0" to "O5" or "auto".
        **options: For `preamp.prepare`.

    Raises:
        SessionError: For a Trainer that casts by itself, for DataParallel, and for steps during backward.

    >>> trainer = Trainer(model, arguments, train_dataset=data)
    >>> attach(trainer, "O4")
    >>> trainer.train()
    """
    _check(trainer)
    if options.get("release_gradients"):
        raise SessionError(
            "release_gradients=True does not go with a Trainer, which reads the norm of all gradients before a step"
        )
    trainer.accelerator._models.clear()  # of reference models, and evaluations; train() forgets them too
    attachment = accelerate.attach(trainer.accelerator, level, **options)
    log, save, run = trainer.log, trainer.save_model, trainer._inner_training_loop
    make_accelerator = trainer.create_accelerator_and_postprocess

    def with_scale(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if attachment.is_open and "loss" in logs:
            logs = {**logs, **attachment._logs()}
        log(logs, *args, **kwargs)

    def in_float32(*args: Any, **kwargs: Any) -> None:
        with attachment._in_float32():
            save(*args, **kwargs)

    @functools.wraps(run)  # whose arguments are looked at
    def until_closed(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        finally:
            attachment.close()

    def followed() -> None:
        make_accelerator()  # anew, for each trial of a search
        attachment.follow(trainer.accelerator)

    methods: Any = trainer
    methods.log, methods.save_model, methods._inner_training_loop = with_scale, in_float32, until_closed
    methods.create_accelerator_and_postprocess = followed
    methods.autocast_smart_context_manager = lambda *_, **__: trainer.accelerator.autocast()
    trainer.callback_handler.callbacks.insert(0, _Close(attachment))
    return attachment


def _check(trainer: Any) -> None:
    if not isinstance(trainer, Trainer):
        raise SessionError(f"attach() takes a Trainer; this is {kind_of(trainer)}")
    arguments, kind = trainer.args, type(trainer.args).__name__
    asked = [name for name in _CASTS if getattr(arguments, name, False)]
    if asked:
        raise SessionError(
            f"{kind}({asked[0]}=True) casts by itself, and the level says what is 16-bit: write {kind}("
            f"{asked[0]}=False, ...)"
        )
    optim = str(getattr(arguments.optim, "value", arguments.optim))
    if "lomo" in optim or optim.endswith("layerwise"):
        raise SessionError(
            f"{kind}(optim={optim!r}) steps parameters during backward, before anybody knows whether all gradients are "
            "finite: use an optimizer that steps after it"
        )
    if arguments.n_gpu > 1:
        raise SessionError(
            f"this Trainer runs DataParallel on {arguments.n_gpu} GPUs, whose replicas a session cannot follow: start "
            "it with torchrun or `accelerate launch`, or with one visible GPU"
        )
    if trainer.accelerator._optimizers:
        raise SessionError("attach() came after trainer.train(), which has prepared the model: call it before")


class _Close(TrainerCallback):
    """Closes the session before other callbacks learn that training ended: they may save the model."""

    def __init__(self, attachment: accelerate.Attachment) -> None:
        self._attachment = attachment

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Close the session: the model is float32 again."""
        self._attachment.close()

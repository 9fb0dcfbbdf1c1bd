"""The trainers of TRL and sentence-transformers under `attach`: as without it at O0, as a plain loop with a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import preamp
from preamp.errors import SessionError

pytest.importorskip("accelerate")
transformers: Any = pytest.importorskip("transformers")
datasets: Any = pytest.importorskip("datasets")
trl: Any = pytest.importorskip("trl")
from preamp.integrations.transformers import attach  # noqa: E402

from .conftest import forget_accelerate  # noqa: E402
from .test_accelerate import assert_same  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

WORDS = ["to", "be", "or", "not", "that", "is", "the", "question", "whether", "tis", "nobler", "in", "mind"]
LINES = ["to be or not to be", "that is the question", "whether tis nobler in the mind", "to be is the question"]
STEPS = 4


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    ids = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    model = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def llama(kind: str = "LlamaForCausalLM") -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_labels=1,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def given(folder: Path, **more: Any) -> dict[str, Any]:
    """Arguments of every trainer."""
    return {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-3,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", **more,
    }  # fmt: skip


def sft(folder: Path, **more: Any) -> Any:
    data = datasets.Dataset.from_dict({"text": LINES * 8})
    arguments = trl.SFTConfig(**given(folder, **{"bf16": False, **more}))
    return trl.SFTTrainer(llama(), arguments, train_dataset=data, processing_class=tokenizer())


def dpo(folder: Path, **more: Any) -> Any:
    data = datasets.Dataset.from_dict(
        {"prompt": ["to be"] * 16, "chosen": [" or not to be"] * 16, "rejected": [" the question"] * 16}
    )
    arguments = trl.DPOConfig(**given(folder, **{"bf16": False, **more}))
    return trl.DPOTrainer(llama(), llama(), args=arguments, train_dataset=data, processing_class=tokenizer())


def reward(folder: Path, **more: Any) -> Any:
    data = datasets.Dataset.from_dict({"chosen": ["to be or not to be"] * 16, "rejected": ["to be"] * 16})
    arguments = trl.RewardConfig(**given(folder, **{"bf16": False, **more}))
    model = llama("LlamaForSequenceClassification")
    return trl.RewardTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer())


def grpo(folder: Path, **more: Any) -> Any:
    def counted(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(each.split()))) for each in completions]

    data = datasets.Dataset.from_dict({"prompt": ["to be", "that is"] * 8})
    arguments = trl.GRPOConfig(
        num_generations=4,
        max_completion_length=8,
        **given(folder, **{"bf16": False, "steps_per_generation": 2, **more}),
    )
    return trl.GRPOTrainer(llama(), counted, args=arguments, train_dataset=data, processing_class=tokenizer())


def sentences(folder: Path, **more: Any) -> Any:
    st: Any = pytest.importorskip("sentence_transformers")
    from sentence_transformers.losses import SoftmaxLoss
    from sentence_transformers.models import Pooling, Transformer

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder / "bert")
    tokenizer().save_pretrained(folder / "bert")
    model = st.SentenceTransformer(modules=[Transformer(str(folder / "bert")), Pooling(16)], device="cpu")
    loss = SoftmaxLoss(model, 16, 2)  # which has parameters of its own
    data = datasets.Dataset.from_dict({"a": LINES * 4, "b": LINES[1:] * 5 + LINES[:1], "label": [0, 1] * 8})
    arguments = st.SentenceTransformerTrainingArguments(**given(folder, **more))
    return st.SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss)


KINDS: list[Callable[..., Any]] = [sft, dpo, reward, grpo, sentences]


def trained(make: Callable[..., Any], folder: Path, level: str | None, **more: Any) -> tuple[Any, list[Tensor]]:
    """A trainer after its training, and its parameters."""
    forget_accelerate()
    trainer = make(folder, **more)  # which seeds what training draws
    if level is not None:
        attach(trainer, level)
    trainer.train()
    return trainer, [p.detach().clone() for p in trainer.model.parameters()]


def logged(trainer: Any) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if "loss" in entry for key in ("loss", "grad_norm")]


@pytest.mark.parametrize("make", KINDS)
def test_o0_is_the_trainer_itself(make: Callable[..., Any], tmp_path: Path) -> None:
    (ours, parameters), (plain, wanted) = trained(make, tmp_path / "a", "O0"), trained(make, tmp_path / "b", None)
    assert_same(parameters, wanted)
    assert_same(logged(ours), logged(plain))
    first = make(tmp_path / "c").model.parameters()
    assert not all(map(torch.equal, parameters, first)) and ours.state.log_history[0]["skipped_steps"] == 0


@pytest.mark.parametrize("level", ["O5", *(pytest.param(level, marks=pytest.mark.slow) for level in ("O2", "O4"))])
@pytest.mark.parametrize("make", [sft, dpo, reward, sentences])
def test_it_is_a_plain_loop_with_a_session(make: Callable[..., Any], level: str, tmp_path: Path) -> None:
    trainer, parameters = trained(make, tmp_path / "a", level, lr_scheduler_type="constant")
    forget_accelerate()
    twin = make(tmp_path / "b", lr_scheduler_type="constant")
    model, optimizer, losses = twin.model, twin.create_optimizer(), []
    batches = twin.get_train_dataloader()
    with preamp.prepare(model, optimizer, level=level) as session:
        forward = model.forward
        model.forward = session.autocast()(lambda *a, **k: preamp.tree.cast_floating(forward(*a, **k), torch.float32))
        model.train()
        for _, batch in zip(range(STEPS), batches, strict=False):
            items = twin._get_num_items_in_batch([batch], model.device)
            with session.autocast():
                loss = twin.compute_loss(model, twin._prepare_inputs(batch), num_items_in_batch=items)
            session.backward(loss)
            session.unscale_()
            torch.nn.utils.clip_grad_norm_(model.parameters(), twin.args.max_grad_norm)
            session.step()
            session.zero_grad()
            losses.append(loss.item())
        model.forward = forward
    assert_same(parameters, [p.detach() for p in model.parameters()])
    assert_same(logged(trainer)[::2], losses)


def test_generation_in_training_and_the_rest_as_it_was(tmp_path: Path) -> None:
    trainer, _ = trained(grpo, tmp_path, "O5", beta=0.0)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert [entry["skipped_steps"] for entry in trainer.state.log_history if "loss" in entry] == [0] * STEPS
    ids = trainer.model.generate(torch.tensor([[3, 4]]), max_new_tokens=4, do_sample=False)
    assert ids.shape[1] > 2


@pytest.mark.parametrize("make", [sft, pytest.param(dpo, marks=pytest.mark.slow)])
def test_it_resumes_bit_for_bit_and_saves_float32(make: Callable[..., Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    saving = {"save_strategy": "steps", "save_steps": 2}
    _, whole = trained(make, tmp_path, "O5", **saving)
    forget_accelerate()
    trainer = make(tmp_path, **saving)
    attach(trainer, "O5")
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same([p.detach() for p in trainer.model.parameters()], whole)
    files = [*(tmp_path / "checkpoint-4").glob("**/model.safetensors")]
    assert files and {value.dtype for file in files for value in load_file(file).values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize(
    "more",
    [
        {"gradient_checkpointing": True}, {"label_smoothing_factor": 0.1},
        {"optim": "adafactor"}, {"gradient_accumulation_steps": 2}, {"packing": True, "max_length": 16},
        {"loss_type": "chunked_nll"}, {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    ],
    ids=lambda more: next(iter(more)),
)  # fmt: skip
def test_its_options_train_as_in_float32(more: dict[str, Any], level: str, tmp_path: Path) -> None:
    ours, _ = trained(sft, tmp_path / "a", level, **more)
    plain, _ = trained(sft, tmp_path / "b", None, **more)
    torch.testing.assert_close(logged(ours), logged(plain), rtol=5e-3, atol=0)


def test_its_own_default_is_refused_by_the_line_to_write(tmp_path: Path) -> None:
    trainer = sft(tmp_path, bf16=None)
    assert trainer.args.bf16
    with pytest.raises(SessionError, match=r"write SFTConfig\(bf16=False, \.\.\.\)"):
        attach(trainer, "O5")

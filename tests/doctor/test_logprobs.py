"""Log-probabilities of the same tokens by two engines and in several precisions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

from preamp.cli._app import app
from preamp.doctor import compare_logprobs, compare_precisions
from preamp.doctor.precisions import _distances
from preamp.errors import PreampError

NUMBERS = st.floats(-8, -0.1)


@given(st.lists(st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), max_size=6), max_size=4))
def test_plain_maths(rows: list[list[tuple[float, float, bool]]]) -> None:
    ones, others, masks = ([[token[k] for token in row] for row in rows] for k in range(3))
    kept = [(i, j, a, b) for i, row in enumerate(rows) for j, (a, b, used) in enumerate(row) if used]
    if not kept:
        with pytest.raises(PreampError, match="no token is left"):
            compare_logprobs(ones, others, masks)
        return
    found = compare_logprobs(ones, others, masks)
    gaps = [b - a for _, _, a, b in kept]
    sums = {i: math.fsum(b - a for k, _, a, b in kept if k == i) for i, _, _, _ in kept}
    assert (found.tokens, found.sequences, found.not_finite) == (len(kept), len(sums), 0)
    assert found.bias == pytest.approx(math.fsum(gaps) / len(gaps), abs=1e-12)
    assert found.mean_apart == pytest.approx(math.fsum(map(abs, gaps)) / len(gaps))
    assert found.largest == max(map(abs, gaps)) == abs(found.worst[0].trainer - found.worst[0].sampler)
    assert (
        found.kl == pytest.approx(math.fsum(math.exp(d) - 1 - d for d in gaps) / len(gaps), abs=1e-12) and found.kl >= 0
    )
    assert found.clipped == sum(abs(math.exp(d) - 1) > 0.2 for d in gaps) / len(gaps)
    assert found.sequence_apart == pytest.approx(math.fsum(map(abs, sums.values())) / len(sums))
    assert {(w.sequence, w.position, w.sampler, w.trainer) for w in found.worst} <= set(kept)
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_estimate_is_the_divergence() -> None:
    """Over tokens that one policy drew, the mean is its KL divergence from the other."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(7, generator=generator).log_softmax(0) for _ in range(2))
    drawn = torch.multinomial(p.exp(), 200_000, replacement=True, generator=generator)
    found = compare_logprobs(p[drawn], q[drawn])
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=0.02)


def test_forms() -> None:
    """Tensors of any dtype, arrays, lists of any lengths with None where an engine has no number."""
    a, b = -torch.rand(3, 4) - 0.1, -torch.rand(3, 4) - 0.1
    wanted = compare_logprobs(a, b)
    assert compare_logprobs(a.numpy(), b.tolist()) == wanted
    assert compare_logprobs(list(a), list(b.numpy())) == wanted
    assert compare_logprobs(a.bfloat16(), a.bfloat16().float()).largest == 0
    found = compare_logprobs([[None, -1.0, -2.0], [-3.0]], [[-0.5, -1.5, -math.inf], [-3.0]])
    assert (found.tokens, found.not_finite, found.mean_apart) == (2, 2, 0.25)
    assert "left out" in str(found) and "KL(sampler || trainer)" in str(found)


def test_lists_of_scalars() -> None:
    """What engines append one by one: scalars of numpy or of torch."""
    assert compare_logprobs([np.float32(-1), None], [torch.tensor(-1.0), torch.tensor(-2.0)]).tokens == 1


@pytest.mark.parametrize(
    ("sampler", "trainer", "mask", "told"),
    [
        ([[[-1.0]], [[-1.0, -2.0]]], [[-1.0]], None, r"a sequence of shape \(1, 1\)"),
        ([[-1.0], -2.0], [[-1.0], -2.0], None, r"a sequence of shape \(\)"),
        ([-1.0, -2.0], [-1.0, -2.0], ["False", "True"], "no lists of numbers"),
        (torch.ones(2).to_sparse(), [-1.0, -1.0], None, "no lists of numbers"),
        ([[-1.0]], [[-1.0], [-1.0]], None, "1 sequences, and the trainer 2"),
        ([[-1.0, -2.0]], [[-1.0]], None, "sequence 0 has 2 tokens from the sampler and 1 in the trainer"),
        ([-1.0], [2.0], None, "log_softmax"),
        ([-1.0], [-1.0], [False], "no token is left"),
        ([math.nan], [-1.0], None, "no token is left"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), None, r"\(2, 3, 4\).*one number for each token"),
        ("abc", "abc", None, "no lists of numbers"),
        ([], [], None, "no token is left"),
    ],
)
def test_what_is_refused(sampler: Any, trainer: Any, mask: Any, told: str) -> None:
    with pytest.raises(PreampError, match=told):
        compare_logprobs(sampler, trainer, mask)


class Language(nn.Module):
    """Returns logits, as nn.Module's do."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden, self.head = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 50)
        self.drop, self.width = nn.Dropout(0.5), width

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.drop(self.hidden(self.embed(tokens)).tanh() * self.width))
        return logits


def test_precisions_of_a_model() -> None:
    model, tokens = Language(), torch.arange(40).view(2, 20)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    exact, bf16, fp16, mask = *compare_precisions(model, tokens, ["O0", "O5", "O2"]), torch.ones(2, 20)
    assert exact.kl == exact.logprobs.largest == 0 and all(layer.relative == 0 for layer in exact.layers)
    assert 0 < 10 * fp16.logprobs.mean_apart < 2 * bf16.logprobs.mean_apart < 0.1
    assert 0 < fp16.kl < bf16.kl
    assert [layer.name for layer in bf16.layers] == ["embed", "hidden", "drop", "head"]
    assert bf16.layers[0].relative < 2**-8 and bf16.worst_layer in bf16.layers
    with torch.no_grad():
        wanted = model.eval()(tokens)[:, :-1].double().log_softmax(-1).gather(-1, tokens[:, 1:, None]).flatten()
    model.train()
    assert {w.sampler for w in bf16.logprobs.worst} <= set(wanted.tolist())
    mask[:, :10] = 0
    (part,) = compare_precisions(model, tokens, ["O5"], mask=mask)
    assert part.logprobs.tokens == 20 and part.kl != bf16.kl
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model._forward_hooks and all(p.dtype is torch.float32 for p in model.parameters())


def test_the_layer_that_overflows_is_named() -> None:
    with pytest.raises(PreampError, match=r"at O3 no log-probability is finite, and 'drop' is the first.*find_origin"):
        compare_precisions(Language(width=1e5), torch.arange(20).view(1, 20), ["O3"])


@pytest.mark.parametrize(
    ("model", "tokens", "told"),
    [
        (Language(), torch.zeros(3), "int64"),
        (Language(), torch.zeros(3, 1, dtype=torch.int64), "length >= 2"),
        (Language().half(), torch.zeros(1, 4, dtype=torch.int64), "embed.weight is torch.float16"),
        (nn.Embedding(4, 3), torch.zeros(1, 4, dtype=torch.int64), None),
        (nn.Sequential(nn.Embedding(4, 3), nn.Flatten()), torch.zeros(1, 4, dtype=torch.int64), "logits for each"),
    ],
)
def test_models_that_are_refused(model: nn.Module, tokens: Tensor, told: str | None) -> None:
    if told is None:
        assert compare_precisions(model, tokens, ["O5"])[0].kl >= 0
        return
    with pytest.raises(PreampError, match=told):
        compare_precisions(model, tokens)
    assert all(not module._forward_hooks for module in model.modules())


class Encoder(Language):
    """Each position sees all tokens, as in BERT."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return logits + logits.mean(1, keepdim=True)


ROW = torch.arange(6).view(1, 6)


@pytest.mark.parametrize(
    ("model", "tokens", "options", "told"),
    [
        (Encoder(), ROW, {}, "no causal language model"),
        (nn.Embedding(9, 3), ROW, {}, "from 1 to 5, and the model gives 3 logits"),
        (Language(), [[1, 2]], {}, "no tensor"),
        (Language(), ROW[:0], {}, "length >= 2"),
        (Language(), ROW.bool(), {}, "int64"),
        (Language(), ROW, {"mask": torch.ones(1, 5)}, r"mask has shape \(1, 5\)"),
        (Language(), ROW, {"levels": "O5"}, r"\['O5'\]"),
    ],
)
def test_what_would_give_no_figures_is_refused(model: nn.Module, tokens: Any, options: Any, told: str) -> None:
    with pytest.raises(PreampError, match=told):
        compare_precisions(model, tokens, **options)


def test_a_small_divergence_is_no_rounding() -> None:
    """In float32 the sum rounds away what float16 does to log-probabilities, and was below 0 at times."""
    generator = torch.Generator().manual_seed(0)
    exact, noise = (torch.randn(64, 500, generator=generator) for _ in range(2))
    low, tokens = exact + 1e-4 * noise, torch.zeros(64, dtype=torch.int64)
    _, _, found = _distances(exact, low, tokens)
    p, gap = exact.double().softmax(-1), (low - exact).double()
    variance = (p * gap.square()).sum(-1) - (p * gap).sum(-1).square()
    torch.testing.assert_close(found, variance / 2, rtol=0.01, atol=0)  # a divergence is half the variance, if small


def command(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["compare", "--logprobs", *map(str, arguments)])


def test_the_command_on_files(tmp_path: Path) -> None:
    a, b = -torch.rand(3, 4) - 0.1, -torch.rand(3, 4) - 0.1
    np.save(tmp_path / "a.npy", a.numpy())
    torch.save({"logprobs": b, "step": 3}, tmp_path / "b.pt")
    (tmp_path / "b.json").write_text(json.dumps(b.tolist()))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"logprobs": row}) + "\n" for row in b.tolist()))
    torch.save(torch.tensor([[1, 1, 0, 0]] * 3), tmp_path / "mask.pt")
    wanted = compare_logprobs(a, b)
    for name in ("b.pt", "b.json", "b.jsonl"):
        ran = command("--json", tmp_path / "out" / "found.json", tmp_path / "a.npy", tmp_path / name)
        assert ran.exit_code == 0 and "KL(sampler || trainer) a token" in ran.output
        found = json.loads((tmp_path / "out" / "found.json").read_text())["found"]
        assert found["kl"] == pytest.approx(wanted.kl) and found["tokens"] == 12
    ran = command("--mask", tmp_path / "mask.pt", tmp_path / "a.npy", tmp_path / "b.pt")
    assert ran.exit_code == 0 and "6, 3" in ran.output
    torch.save({"one": b, "two": b}, tmp_path / "two.pt")
    (tmp_path / "b.txt").write_text("-1.0")
    (tmp_path / "bad.json").write_text("[")
    for names, told in (
        (("a.npy",), "takes two things"), (("a.npy", "no.npy"), "there is no"), (("a.npy", "b.txt"), "is no .npy"),
        (("a.npy", "bad.json"), "cannot be read"), (("a.npy", "two.pt"), "name the log-probabilities"),
    ):  # fmt: skip
        ran = command(*(tmp_path / name for name in names))
        assert ran.exit_code != 0 and isinstance(ran.exception, PreampError) and told in str(ran.exception)


def test_what_the_command_refuses(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[-1.0]")
    (tmp_path / "model").mkdir()
    (tmp_path / "text").write_bytes(b"\xff\xfe")
    one, model = tmp_path / "a.json", tmp_path / "model"
    assert "options stand before" in str(command(one, one, "--mask", one).exception)
    assert "is no text" in str(command(model, tmp_path / "text").exception)
    assert "is no text" in str(command(model, model).exception)


def test_the_command_on_a_model(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    tokenizers: Any = pytest.importorskip("tokenizers")
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="the"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path / "model")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=len(words), n_positions=32, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(words * 20))
    ran = command("--levels", "O5, O1", tmp_path / "model", tmp_path / "text.txt")
    assert ran.exit_code == 0 and "O5" in ran.output and "Layers at O1" in ran.output
    assert "155 tokens" in ran.output  # 5 rows of 32, without the first of each
    (tmp_path / "short.txt").write_text("fox")
    ran = command(tmp_path / "model", tmp_path / "short.txt")
    assert isinstance(ran.exception, PreampError) and "two are needed" in str(ran.exception)
    (tmp_path / "empty").mkdir()
    ran = command(tmp_path / "empty", tmp_path / "text.txt")
    assert isinstance(ran.exception, PreampError) and "cannot load" in str(ran.exception)

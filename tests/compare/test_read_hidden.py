"""A loss that reads positions at which two kinds of attention differ leaves the answer open."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

import tensortap as tt
from support.padded_attention import LENGTH, ROWS, WIDTH, PaddedAttention, causal_mask, padding_mask

_WORDS = 30


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), PaddedAttention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return x + self.mlp(F.gelu(x + self.attention(self.norm(x), attention_mask=attention_mask)))


class _Decoder(nn.Module):
    def __init__(self, boolean: bool) -> None:
        super().__init__()
        self.boolean = boolean
        self.embed, self.head = nn.Embedding(_WORDS, WIDTH), nn.Linear(WIDTH, _WORDS)
        self.blocks = nn.ModuleList(_Block() for _ in range(4))

    def forward(self, tokens: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        mask = causal_mask(attention_mask, self.boolean)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, attention_mask=mask)
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def built(boolean: bool, reads: bool) -> tuple[_Decoder, dict[str, Tensor]]:
    """Return a model and its batch."""
    torch.manual_seed(0)
    model = _Decoder(boolean)
    tokens = torch.randint(1, _WORDS, (ROWS, LENGTH))
    mask = padding_mask()
    labels = tokens.masked_fill(mask == 0, -100)
    if not reads:  # the first token of a text is predicted from the last padding before it
        labels = labels.scatter(1, mask.argmax(1, keepdim=True), -100)
    return model, {"tokens": tokens, "attention_mask": mask, "labels": labels}


def record(path: Path, boolean: bool, reads: bool, keep: str, factor: float = 1.0, shrink: float = 1.0) -> Path:
    model, batch = built(boolean, reads)
    model.head.weight.data.mul_(shrink)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, path, keep=keep, optimizer=optimizer):
        for _ in range(2):
            (factor * model(**batch)["loss"]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_a_loss_that_reads_hidden_positions_leaves_the_answer_open(tmp_path: Path, keep: str) -> None:
    found = tt.compare(record(tmp_path / "a", False, True, keep), record(tmp_path / "b", True, True, keep))
    assert (found.verdict, found.first) == ("incomparable", None), found.sentence
    assert "the loss reads positions that a mask hides" in found.sentence


@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_a_loss_that_reads_none_is_judged(tmp_path: Path, keep: str) -> None:
    reference = record(tmp_path / "a", False, False, keep)
    right = tt.compare(reference, record(tmp_path / "b", True, False, keep))
    assert right.verdict == "match", right.sentence
    wrong = tt.compare(reference, record(tmp_path / "c", True, False, keep, factor=1.01))
    assert wrong.first is not None and wrong.first.cause == "loss", wrong.sentence


def test_a_module_that_keeps_norm_and_extremes_is_named_from_summaries(tmp_path: Path) -> None:
    """A sketch of the other positions shows it, whatever differs at those that see nothing."""
    reference = record(tmp_path / "a", False, False, "summary")
    model, batch = built(True, False)
    model.blocks[2].mlp.register_forward_hook(lambda module, args, output: output.flip(-1))
    with tt.capture(model, tmp_path / "b", keep="summary"):
        model(**batch)["loss"].backward()
    found = tt.compare(reference, tmp_path / "b")
    assert found.first is not None and found.first.module == "blocks.2.mlp", found.sentence


def test_a_wrong_loss_is_named_beside_hidden_positions_that_it_reads(tmp_path: Path) -> None:
    reference = record(tmp_path / "a", False, True, "tensors")
    found = tt.compare(reference, record(tmp_path / "b", True, True, "tensors", factor=1.01))
    assert found.first is not None and found.first.cause == "loss", found.sentence


@pytest.mark.parametrize(("reads", "verdict"), [(True, "incomparable"), (False, "match")])
def test_in_a_check(tmp_path: Path, reads: bool, verdict: str) -> None:
    model, batch = built(False, reads)
    kinds = ("input", "output", "grad_input", "grad_output", "param_grad")
    with tt.capture(model, tmp_path / "a", keep="tensors", kinds=kinds):
        model(**batch)["loss"].backward()
    for scale in (1.0, 1.1):
        model, _ = built(True, reads)
        model.blocks[1].mlp.register_forward_hook(lambda module, args, output, scale=scale: output * scale)
        with tt.check(model, tmp_path / "a") as check:
            model(**batch)["loss"].backward()
        if scale == 1.0:
            assert check.result.verdict == verdict, check.result.sentence
        else:
            assert {birth.module for birth in check.result.births} == {"blocks.1.mlp"}


def test_a_loss_that_hardly_differs_is_known_by_its_gradient(tmp_path: Path) -> None:
    """As that of a new model, which predicts all words alike."""
    runs = [record(tmp_path / str(boolean), boolean, True, "tensors", shrink=1e-5) for boolean in (False, True)]
    found = tt.compare(*runs)
    assert found.first is None and "the loss reads positions that a mask hides" in found.sentence, found.sentence


class _Experts(nn.Module):
    """Each token goes to one of three layers, and each layer is called with its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layers = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        made = torch.zeros_like(tokens)
        for number, layer in enumerate(self.layers):
            made[chosen == number] = layer(tokens[chosen == number]) * weights[chosen == number, None]
        return made.view_as(x)


@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_hidden_positions_among_the_tokens_of_an_expert_are_no_divergence(tmp_path: Path, keep: str) -> None:
    """They choose other experts, which have other numbers of tokens. After a step, no sketch leaves them out."""
    for name, boolean in (("a", False), ("b", True)):
        model, batch = built(boolean, False)
        torch.manual_seed(1)
        for block in model.blocks:
            block.mlp = _Experts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tt.capture(model, tmp_path / name, keep=keep, optimizer=optimizer):
            for _ in range(2):
                model(**batch)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
    found = tt.compare(tmp_path / "a", tmp_path / "b")
    assert found.verdict == "match", found.sentence


class _Fused(PaddedAttention):
    """Returns the mean of everything where nothing is seen, and sends back more to it, as fused kernels do."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = attention_mask[:, 0]
        weights = (q @ k.transpose(1, 2) / 4 + mask).softmax(-1)
        more = weights * (LENGTH - 1) * (mask < 0).all(-1, keepdim=True)
        return self.out((weights + more) @ v - (more @ v).detach())


class _WrongBackward(PaddedAttention):
    """The very same forward, to the last bit."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if v.requires_grad:
            v.register_hook(lambda gradient: 1.5 * gradient)
        return self.out((q @ k.transpose(1, 2) / 4 + attention_mask[:, 0]).softmax(-1) @ v)


def record_attention(path: Path, cls: type[PaddedAttention], keep: str, kinds: tuple[str, ...]) -> Path:
    model, batch = built(False, True)
    for block in model.blocks:
        assert isinstance(block, _Block)
        block.attention.__class__ = cls
    with tt.capture(model, path, keep=keep, kinds=kinds):
        model(**batch)["loss"].backward()
    return path


@pytest.mark.parametrize("kinds", [("input", "output", "grad_output", "param_grad"), ("input", "output", "param_grad")])
@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_attention_may_differ_in_its_backward_alone(tmp_path: Path, keep: str, kinds: tuple[str, ...]) -> None:
    reference = record_attention(tmp_path / "a", PaddedAttention, keep, kinds)
    found = tt.compare(reference, record_attention(tmp_path / "b", _Fused, keep, kinds))
    assert found.verdict == "incomparable", found.sentence
    assert "the loss reads positions that a mask hides" in found.sentence
    if keep == "summary" or "grad_output" not in kinds:
        wrong = tt.compare(reference, record_attention(tmp_path / "c", _WrongBackward, keep, kinds))
        assert wrong.first is not None and wrong.first.module.startswith("blocks.3.attention"), wrong.sentence

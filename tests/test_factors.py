"""Factored gradients against explicit ones in float64, and sums over their entries."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from rasura.attacks.updates.gradient_matching.entrywise import _by_blocks, _whole
from rasura.attacks.updates.gradient_matching.factors import Factor, Factoriser, LowRank, shortened
from rasura.attacks.updates.gradient_matching.objective import Distance, Kind, soft_cross_entropy
from rasura.core.rng import generator
from rasura.testing.tiny import ALL, CLS, PAD, SEP, UNSUPPORTED, tiny
from rasura.victims.step import gradients

MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def explicit(model: nn.Module, names: list[str], e: Tensor, mask: Tensor, targets: Tensor, target: dict[str, Tensor],
             kind: Kind, alpha: float) -> Tensor:  # fmt: skip
    """One candidate at a time, every weight gradient formed: the obvious reference."""
    chosen = {n: p for n, p in model.named_parameters() if n in names}
    if kind == "cosine":  # a key bias has no gradient but rounding, hence no direction
        largest = max(float(target[n].norm()) for n in chosen)
        chosen = {n: p for n, p in chosen.items() if float(target[n].norm()) > 1e-6 * largest}
    out = []
    for k in range(len(e)):
        for p in chosen.values():
            p.requires_grad_(True)
        # As the client runs it, on ids, so that a decoder finds the end of a text; the embeddings are put in on the way.
        with model.get_input_embeddings().register_forward_hook(lambda *_, k=k: e[k]):  # type: ignore[operator,misc]
            logits = model(input_ids=torch.where(mask.bool(), 40, PAD), attention_mask=mask).logits
        loss = soft_cross_entropy(logits[None], targets[None])[0]
        found = dict(zip(chosen, torch.autograd.grad(loss, list(chosen.values()), create_graph=True)))
        terms = []
        for n, g in found.items():
            if kind == "cosine":
                terms.append((1 - (g * target[n]).sum() / (g.norm() * target[n].norm())) / len(found))
            else:
                far = (g - target[n]).square().sum()
                terms.append((far if kind == "l2" else far.sqrt()) + alpha * (g - target[n]).abs().sum())
        out.append(torch.stack(terms).sum())
    return torch.stack(out)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "gpt2"])
@pytest.mark.parametrize(("kind", "alpha"), [("l2", 0.0), ("l2", 0.01), ("norm", 0.0), ("norm", 0.01), ("cosine", 0.0)])
@pytest.mark.parametrize("batch", [1, 2])
def test_factored_equals_explicit(family: str, kind: Kind, alpha: float, batch: int) -> None:
    model = tiny(family, "classification", hidden=16).double().requires_grad_(False)
    mask = MASK[:batch]
    rng = generator(1)
    true = torch.randint(10, 200, mask.shape, generator=rng)
    live = tiny(family, "classification", hidden=16).double()
    target, _ = gradients(live, {"input_ids": true, "attention_mask": mask, "labels": torch.tensor([0, 2])[:batch]})
    factoriser = Factoriser(model, list(target))
    names = factoriser.names
    assert any("LayerNorm" in n or "layer_norm" in n or "ln_" in n for n in names)
    e = torch.randn(3, *mask.shape, 16, generator=rng, dtype=torch.double).requires_grad_(True)
    targets = torch.randn(batch, 3, generator=rng, dtype=torch.double).softmax(-1)
    found = factoriser(e, mask, lambda z: soft_cross_entropy(z, targets.expand(3, -1, -1)), graph=True)
    fast = Distance(factoriser.observed(target), kind, alpha=alpha)(found)
    slow = explicit(model, names, e, mask, targets, dict(target), kind, alpha)
    assert torch.allclose(fast, slow, rtol=1e-9)
    (a,) = torch.autograd.grad(fast.sum(), e)
    (b,) = torch.autograd.grad(slow.sum(), e)
    assert float((a - b).norm() / b.norm()) < 1e-9


@pytest.mark.parametrize("family", sorted({*ALL} - {*UNSUPPORTED, "t5"}))
def test_the_private_texts_themselves_fit_with_padding_too(family: str) -> None:
    precision = torch.float32 if family == "mixtral" else torch.float64  # its experts multiply in no other
    live = tiny(family, "classification", hidden=16).to(precision)
    ids = torch.tensor([[39, 40, 41, 42, 43, SEP], [39, 50, 51, SEP, PAD, PAD]])
    target, _ = gradients(live, {"input_ids": ids, "attention_mask": MASK, "labels": torch.tensor([0, 2])})
    model = tiny(family, "classification", hidden=16).to(precision).requires_grad_(False)
    factoriser = Factoriser(model, list(target))
    e = model.get_input_embeddings()(ids)[None].requires_grad_(True)  # type: ignore[operator]
    onehot = nn.functional.one_hot(torch.tensor([[0, 2]]), 3).to(precision)
    found = factoriser(e, MASK, lambda z: soft_cross_entropy(z, onehot), graph=False)
    size = sum(float(target[n].square().sum()) for n in factoriser.names)
    assert size > 0
    assert (
        float(Distance(factoriser.observed(target), "l2")(found).detach()) < (1e-10 if family == "mixtral" else 1e-12) * size
    )


def test_layers_that_all_texts_share_are_not_matched() -> None:
    model = tiny("deberta-v2", "classification").requires_grad_(False)
    names = Factoriser(model, [n for n, _ in model.named_parameters()]).names
    assert any("intermediate" in n for n in names) and not any("pos_" in n or "rel_embeddings" in n for n in names)


def test_hidden_entries_count_on_neither_side() -> None:
    model = tiny("bert", "classification", hidden=16).requires_grad_(False)
    live = tiny("bert", "classification", hidden=16)
    ids = torch.tensor([[CLS, 40, 41, SEP]])
    target, _ = gradients(live, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([1])})
    factoriser = Factoriser(model, list(target))
    rng = generator(2)
    masks = {n: torch.rand(target[n].shape, generator=rng) > 0.5 for n in factoriser.names}
    shown = {n: target[n] * masks[n] for n in masks}
    e = model.get_input_embeddings().weight[ids][None].requires_grad_(True)  # type: ignore[operator,union-attr]
    onehot = nn.functional.one_hot(torch.tensor([[1]]), 3).float()
    found = factoriser(e, torch.ones_like(ids), lambda z: soft_cross_entropy(z, onehot), graph=False)
    assert float(Distance(shown, "l2", visible=masks)(found).detach()) < 1e-8
    assert float(Distance(shown, "l2")(found).detach()) > 1e-6


@pytest.mark.parametrize("entries", [1.0, 0.3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
def test_sums_by_entry_equal_those_of_whole_matrices(entries: float, masked: bool, clipped: bool) -> None:
    rng = generator(3)
    draw = partial(torch.randn, generator=rng, dtype=torch.double)
    target, delta, x = draw(300, 270), draw(3, 5, 300), draw(3, 5, 270)
    mask = torch.rand(target.shape, generator=rng) > 0.5 if masked else torch.ones_like(target, dtype=torch.bool)
    target *= mask
    distance = Distance(
        {"w": target}, "l2", alpha=0.3, entries=entries, visible={"w": mask} if masked else None,
        norm=2.0 if clipped else None, rng=generator(4),
    )  # fmt: skip
    rows, columns = distance.parts.get("w", (torch.arange(300), torch.arange(270)))

    def slow(delta: Tensor, x: Tensor) -> Tensor:
        own = (delta.transpose(1, 2) @ x) * mask
        drawn, aim = own[:, rows][:, :, columns], target[rows][:, columns]
        up = target.numel() / aim.numel()
        square = up * drawn.square().sum((1, 2)) if masked else own.square().sum((1, 2))
        scale = (2.0 / square.sqrt()).clamp_max(1.0) if clipped else torch.ones(len(delta), dtype=torch.double)
        inner = up * (drawn * aim).sum((1, 2)) if masked else (own * target).sum((1, 2))
        size = up * aim.square().sum() if masked else target.square().sum()
        l1 = up * (scale[:, None, None] * drawn - aim).abs().sum((1, 2))
        return scale * scale * square - 2 * scale * inner + size + 0.3 * l1

    leaves = [t.requires_grad_(True) for t in (delta, x)]
    fast = distance({"w": Factor(delta, x)})
    wanted = slow(delta, x)
    assert torch.allclose(fast, wanted, rtol=1e-12)
    weights = draw(3)
    for a, b in zip(
        torch.autograd.grad((weights * fast).sum(), leaves), torch.autograd.grad((weights * wanted).sum(), leaves)
    ):
        assert float((a - b).norm() / b.norm()) < 1e-12


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("absolute", [False, True])
def test_sums_of_whole_gradients_are_those_of_their_blocks(masked: bool, absolute: bool) -> None:
    """A GPU forms gradients whole."""
    draw = partial(torch.randn, generator=generator(5), dtype=torch.double)
    delta, x, other = draw(3, 5, 300), draw(3, 5, 270), draw(300, 270)
    mask, target = (other > 0).double() if masked else None, other if absolute else None
    sums, slopes = _by_blocks(delta, x, mask, target, True)
    for one, whole in zip((sums, *slopes), _whole(delta, x, mask, target)):
        assert torch.allclose(one, whole, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 12, 40])
def test_a_gradient_of_few_tokens_is_shortened_and_one_with_noise_is_not(dtype: torch.dtype, rank: int) -> None:
    rng = generator(5)
    matrix = torch.randn(384, rank, generator=rng, dtype=dtype) @ torch.randn(rank, 300, generator=rng, dtype=dtype)
    short = shortened(matrix)
    assert isinstance(short, LowRank)
    assert float((short.left @ short.right.T - matrix).norm() / matrix.norm()) <= 10 * torch.finfo(dtype).eps
    noisy = matrix + 1e-4 * matrix.std() * torch.randn(matrix.shape, generator=rng, dtype=dtype)
    assert shortened(noisy) is noisy
    assert isinstance(shortened(torch.zeros(384, 300, dtype=dtype)), LowRank)

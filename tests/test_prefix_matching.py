"""Prefix matching: a decoder's text from what AdamW leaves of its gradient, and what the search compares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from span_setting import in_later_round
from torch import Tensor

from rasura.attacks.updates.best import Best
from rasura.attacks.updates.prefix_matching import PrefixMatching
from rasura.attacks.updates.prefix_matching.agreement import Agreement, read_layers
from rasura.attacks.updates.prefix_matching.search import Prefix, Search
from rasura.core.interfaces import Budget, NotApplicable
from rasura.core.local import Adapter
from rasura.core.rng import generator
from rasura.core.threat import THREATS, observe
from rasura.core.values import Grant, Observation
from rasura.registry import parse_defense, parse_update
from rasura.testing.tiny import CAUSAL_VOCABULARY, CLS, VOCABULARY, batch_of, tiny
from rasura.victims.step import step

TEXT = [CLS, 40, 3, 41, 9, 60, 61, 70, 44]
CALIBRATION = torch.tensor([TEXT, TEXT[::-1]])
ADAMW = "local:epochs=2/batch=0/lr=1e-4/lora=8"


def seen_of(
    update: str = ADAMW, defense: str = "none", texts: tuple[list[int], ...] = (TEXT,), dtype: torch.dtype = torch.float32
) -> Observation:
    """What a server sees of a tiny decoder, whose adapters were trained before; its own weights have ``dtype``."""
    local, _ = parse_update(update)
    model = tiny("llama", "causal", hidden=96).to(dtype)
    if local.lora:
        model = in_later_round(model, "causal", Adapter(local.lora, "attention"), 0.05)
    truth = step(
        model, batch_of(list(texts), "causal"), parse_defense(defense), task="causal", vocabulary=CAUSAL_VOCABULARY,
        rng=generator(0), local=local,
    )  # fmt: skip
    return observe(truth, THREATS["honest-server"])


@pytest.mark.parametrize("update", [ADAMW, "local:epochs=2/batch=0/lr=1e-4", "fedsgd"])
def test_a_text_comes_back_from_signs(update: str) -> None:
    guess = PrefixMatching()(seen_of(update), rng=generator(0), budget=Budget())
    assert guess.tokens == (tuple(TEXT),) and guess.confidence == "verified"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_base_in_half_precision_is_read_as_well(dtype: torch.dtype) -> None:
    seen = seen_of(dtype=dtype)
    guess = PrefixMatching()(seen, rng=generator(0), budget=Budget())
    assert guess.tokens == (tuple(TEXT),)
    assert {p.dtype for p in seen.model.parameters()} == {dtype, torch.float32}, "the model itself is left as it was"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_portfolio_reads_the_order_of_a_text_behind_its_signs(dtype: torch.dtype) -> None:
    guess = Best()(seen_of(dtype=dtype), rng=generator(0), budget=Budget())
    assert guess.tokens == (tuple(TEXT),) and guess.confidence == "verified"
    assert guess.details["attack"] == "prefix-matching" and "dlg" not in str(guess.details["tried"])


@pytest.mark.parametrize("update", ["local:epochs=1/batch=0/optimizer=sgd/lr=1e-3/lora=8", "fedsgd"])
@pytest.mark.parametrize("texts", [(TEXT,), (TEXT, [CLS, 50, 3, 51])])
def test_the_portfolio_runs_on_a_base_in_half_precision(update: str, texts: tuple[list[int], ...]) -> None:
    guess = Best()(seen_of(update, texts=texts, dtype=torch.bfloat16), rng=generator(0), budget=Budget("quick"))
    assert len(guess.tokens) == len(texts)


def test_the_portfolio_keeps_the_words_of_several_texts() -> None:
    guess = Best()(seen_of(texts=(TEXT, [CLS, 50, 3, 51])), rng=generator(0), budget=Budget())
    assert len(guess.tokens) == 2 and "prefix-matching" not in str(guess.details["tried"])


def test_adapters_are_judged_by_their_second_matrices() -> None:
    assert all("lora_B" in lin.weight for lin in read_layers(seen_of()))
    assert not any("embed" in lin.weight or "lm_head" in lin.weight for lin in read_layers(seen_of("fedsgd")))


@pytest.mark.parametrize(
    ("update", "memory", "upper"), [(ADAMW, 4096, 4), (ADAMW, 4096, 1), ("fedsgd", 4096, 4), ("fedsgd", 0, 1)]
)
def test_a_prefix_agrees_as_its_gradient_does(update: str, memory: int, upper: int) -> None:
    """The reference takes the gradient of each prefix by itself."""
    seen = seen_of(update)
    model, layers = seen.model.double(), {lin: g.double() for lin, g in read_layers(seen).items()}
    prefixes, tokens = torch.tensor([TEXT[:3], TEXT[2:5]]), torch.tensor([[9, 60], [61, 3]])

    def cosine(text: Tensor) -> float:
        weights = [model.get_parameter(lin.weight).requires_grad_(True) for lin in layers]
        loss = torch.nn.functional.cross_entropy(model(input_ids=text[None, :-1]).logits[0], text[1:])
        found = [g.T if lin.transposed else g for g, lin in zip(torch.autograd.grad(loss, weights), layers)]
        cosines = [float((s * g).sum() / g.norm().clamp_min(1e-30)) for s, g in zip(layers.values(), found)]
        return sum(cosines) / len(cosines)

    agreement = Agreement(model, layers, CALIBRATION, memory, upper)
    assert len(agreement.layers) == len(layers) // (1 if upper > 1 else 2)
    layers, deep = agreement.layers, Agreement(model, agreement.every, CALIBRATION, memory, len(agreement.every))
    told = agreement.followed(agreement.run(prefixes), tokens)
    for row, prefix in enumerate(prefixes):
        for column in range(2):
            text = torch.cat([prefix, tokens[row, column : column + 1]])
            agrees, expected = agreement.whole(torch.stack([text, text.flip(0)]))
            assert float(told[row, column]) == pytest.approx(cosine(text), abs=1e-5)
            assert float(agrees[0]) == pytest.approx(cosine(text), abs=1e-5)
            assert float(agreement.whole(text[None], every=True)[0]) == pytest.approx(
                float(deep.whole(text[None])[0]), abs=1e-6
            )
            logs = model(input_ids=text[None, :-1]).logits[0].log_softmax(-1)
            assert float(expected[0]) == pytest.approx(float(logs.gather(1, text[1:, None]).detach().sum()), abs=1e-5)
    begun = agreement.begun(agreement.run(text[None]))
    assert list(begun) == pytest.approx([cosine(text[:n]) for n in range(2, len(text) + 1)], abs=1e-5)


@pytest.mark.parametrize("update", [ADAMW, "fedsgd"])
def test_what_follows_is_foreseen_but_for_the_length_of_a_new_token(update: str) -> None:
    """With the length of the token itself in place of a few others', it is what ``followed`` says."""
    seen = seen_of(update)
    layers = {lin: g.double() for lin, g in read_layers(seen).items()}
    agreement = Agreement(seen.model.double(), layers, CALIBRATION, 4096, 1)
    ran = agreement.run(torch.tensor([TEXT[:4], TEXT[2:6]]))
    usual = agreement.foreseen(ran)
    for token in (9, 60, 71):
        told = agreement.followed(ran, torch.full((2, 1), token))[:, 0]
        assert usual[:, token].tolist() == pytest.approx(told.tolist(), abs=0.2)
        agreement.drawn = [token]
        assert agreement.foreseen(ran)[:, token].tolist() == pytest.approx(told.tolist(), abs=1e-4)


@pytest.mark.parametrize("update", [ADAMW, "fedsgd"])
@pytest.mark.parametrize(
    "broken",
    [
        TEXT[:1] + TEXT[2:],
        TEXT[:4] + TEXT[5:],
        [*TEXT[:4], 50, *TEXT[5:]],
        [*TEXT[:3], 50, *TEXT[3:]],
        [*TEXT, 50, 51],
        [*TEXT[:3], TEXT[4], TEXT[3], *TEXT[5:]],
    ],
)
def test_words_that_are_lost_or_wrong_or_too_many_are_put_right(update: str, broken: list[int]) -> None:
    search = Search(seen_of(update), 3, generator(0), Budget())
    before = float(search.agreement.whole(torch.tensor([broken]))[0])
    after = search.change(Prefix(tuple(broken), before, before), range(3, 12))
    assert after.tokens == tuple(TEXT) and after.agrees > before


def test_a_text_found_from_its_middle_on_grows_at_its_front() -> None:
    search = Search(seen_of("fedsgd"), 3, generator(0), Budget())
    agrees = float(search.agreement.whole(torch.tensor([TEXT[:1] + TEXT[2:5]]))[0])
    longer = search.grow([Prefix((*TEXT[:1], *TEXT[2:5]), agrees, agrees)])
    assert longer[0].tokens == tuple(TEXT[:5])


def test_the_update_raises_a_token_by_its_gradient() -> None:
    """What two runs of the model tell is the inner product of the update and the gradient of every next token."""
    seen = seen_of()
    agreement = Agreement(seen.model, read_layers(seen), CALIBRATION, 4096)
    prefix = torch.tensor([TEXT[:4]])
    moved = {n: seen.model.get_parameter(n) - p for n, p in agreement.moved.items()}
    weights = [seen.model.get_parameter(n).requires_grad_(True) for n in moved]
    ran = agreement.run(prefix)
    logs = seen.model(input_ids=prefix).logits[0, -1].log_softmax(0)
    assert torch.allclose(ran.logs[0, -1], logs.detach(), atol=1e-5)
    apart = (agreement.table - ran.mean[0, -1]).norm(dim=1)
    exact = []
    for token in range(20, 60):
        found = torch.autograd.grad(-logs[token], weights, retain_graph=True)
        exact.append(float(sum((g * m).sum() for g, m in zip(found, moved.values()))) / float(apart[token]))
    told = agreement.raised(ran, slice(-1, None))[0, 0, 20:60]
    assert float(torch.corrcoef(torch.stack([told, torch.tensor(exact)]))[0, 1]) > 0.999


def test_where_it_cannot_apply_it_says_why() -> None:
    seen = seen_of()
    for said, other in {
        "NaN": replace(seen, message=replace(seen.message, gradients={n: g * torch.nan for n, g in seen.gradients.items()})),
        "dropout": seen_of("fedsgd", "dropout:0.1"),
        "one token": replace(seen, granted={**seen.granted, Grant.LENGTHS: (1,)}),
        "queries, keys or values|query, key or value": replace(seen, message=replace(seen.message, gradients={})),
    }.items():
        with pytest.raises(NotApplicable, match=said):
            PrefixMatching()(other, rng=generator(0), budget=Budget())
    with pytest.raises(NotApplicable, match="16 bits"):
        PrefixMatching()(seen_of(dtype=torch.bfloat16), rng=generator(0), budget=Budget(memory_mb=0))
    truth = step(
        tiny("bert", "classification", num_labels=2), batch_of([TEXT], "classification", [1]), (), task="classification",
        vocabulary=VOCABULARY, rng=generator(0),
    )  # fmt: skip
    with pytest.raises(NotApplicable, match="causal language model"):
        PrefixMatching()(observe(truth, THREATS["honest-server"]), rng=generator(0), budget=Budget())

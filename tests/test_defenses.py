"""The defenses on real (tiny, random) models of four families, through the step that audits and training share."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rasura.core.interfaces import Defense, InputError
from rasura.core.rng import generator
from rasura.core.values import Message, Stage, Task, Transcript
from rasura.defenses.compose import chain, mean, none, with_aggregation
from rasura.defenses.dropout import dropout
from rasura.defenses.frozen import frozen_blocks, frozen_embeddings
from rasura.defenses.noise import gaussian_noise, laplace_noise
from rasura.defenses.pruning import magnitude_pruning, random_pruning
from rasura.defenses.qsgd import qsgd
from rasura.testing.tiny import FAMILIES, VOCABULARY, batch_for, tiny
from rasura.victims.models import parts
from rasura.victims.step import defended, gradients, step


def send(family: str, task: Task, defense: Defense, seed: int = 0, rows: int = 2) -> Transcript:
    model = tiny(family, task)
    batch = batch_for(task, rows=rows)
    return step(model, batch, defense, task=task, vocabulary=VOCABULARY, rng=generator(seed, "step"))


def message(*shapes: tuple[int, ...], seed: int = 0) -> Message:
    rng = generator(seed, "message")
    return Message({f"p{i}": torch.randn(s, generator=rng) for i, s in enumerate(shapes)})


def flat(m: Message) -> torch.Tensor:
    return torch.cat([g.flatten() for g in m.gradients.values()])


# --- composing


def test_chain_flattens_and_keeps_the_order() -> None:
    both = chain(frozen_embeddings(), chain(dropout(0.1), gaussian_noise(1e-3)), none())
    assert [t.mechanism.name for t in both] == ["frozen-embeddings", "dropout", "gaussian"]
    assert chain() == none() == ()


def test_chain_refuses_a_wrong_order_naming_both() -> None:
    with pytest.raises(InputError, match=r"'gaussian' \(wire\).*'dropout' \(model\)"):
        chain(gaussian_noise(1e-3), dropout(0.1))


def test_chain_refuses_two_aggregations_and_what_is_no_defense() -> None:
    with pytest.raises(InputError, match="'mean' and 'mean' both aggregate"):
        chain(mean(), mean())
    with pytest.raises(InputError, match="str is not a defense"):
        chain("dropout")  # type: ignore[arg-type]


def test_with_aggregation_stands_between_model_and_wire() -> None:
    whole = with_aggregation(chain(dropout(0.1), random_pruning(0.5)))
    assert [t.stage for t in whole] == [Stage.MODEL, Stage.AGGREGATE, Stage.WIRE]
    assert with_aggregation(whole) is whole
    assert chain(*whole) == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_the_explicit_mean_sends_what_no_defense_sends(family: str) -> None:
    plain, explicit = send(family, "classification", none()), send(family, "classification", chain(mean()))
    assert plain.message.gradients.keys() == explicit.message.gradients.keys()
    for name, g in plain.message.gradients.items():
        assert torch.equal(g, explicit.message.gradients[name])


# --- bad arguments


@pytest.mark.parametrize(
    "make",
    [
        lambda: frozen_blocks(-1),
        lambda: frozen_blocks(1.5),  # type: ignore[arg-type]
        lambda: dropout(1.0),
        lambda: dropout(-0.1),
        lambda: dropout(math.nan),
        lambda: gaussian_noise(-1e-3),
        lambda: gaussian_noise(math.inf),
        lambda: gaussian_noise(math.nan),
        lambda: gaussian_noise(1e-3, clip=0.0),
        lambda: laplace_noise(-1.0),
        lambda: laplace_noise(1.0, clip=math.nan),
        lambda: magnitude_pruning(1.0),
        lambda: magnitude_pruning(-0.5),
        lambda: random_pruning("half"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_one_clear_line(make: object) -> None:
    with pytest.raises(InputError) as caught:
        make()  # type: ignore[operator]
    assert "expected" in str(caught.value) and "\n" not in str(caught.value)


# --- frozen layers


@pytest.mark.parametrize(
    ("family", "task"), [(f, "classification") for f in FAMILIES] + [("gpt2", "causal"), ("llama", "causal")]
)
def test_frozen_embeddings_never_leave(family: str, task: Task) -> None:
    names = set(parts(tiny(family, task)).embedding_names)
    open_, frozen = send(family, task, none()).message, send(family, task, chain(frozen_embeddings())).message
    assert names & open_.gradients.keys()
    assert frozen.gradients.keys() == open_.gradients.keys() - names
    for name, g in frozen.gradients.items():
        assert torch.allclose(g, open_.gradients[name], atol=1e-7)


def test_freezing_a_tied_embedding_freezes_the_output_layer() -> None:
    model = tiny("gpt2", "causal")
    with defended(model, chain(frozen_embeddings())):
        assert not model.get_output_embeddings().weight.requires_grad
    assert model.get_output_embeddings().weight.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_blocks_leave_the_upper_ones(family: str) -> None:
    found = parts(tiny(family, "classification"))
    sent = send(family, "classification", chain(frozen_blocks(1))).message.gradients
    assert not set(found.embedding_names) & sent.keys()
    first, second = (f"{b.module}." for b in found.blocks[:2])
    assert not any(n.startswith(first) for n in sent)
    assert any(n.startswith(second) for n in sent)


@pytest.mark.parametrize(("family", "first", "second"), [
    ("t5", ["encoder.block.0.", "decoder.block.0."], ["encoder.block.1.", "decoder.block.1."]),
    ("electra", ["encoder.layer.0.", "embeddings_project"], ["encoder.layer.1."]),
    ("albert", ["embedding_hidden_mapping_in"], ["albert_layer_groups"]),
])  # fmt: skip
def test_frozen_blocks_are_those_of_every_stack_and_what_stands_before_them(
    family: str, first: list[str], second: list[str]
) -> None:
    """The encoder of T5, which reads the text, was trained; and so was the projection behind ELECTRA's embeddings."""
    protection = chain(frozen_blocks(0 if family == "albert" else 1))
    sent = send(family, "classification", protection).message.gradients
    assert not any(part in n for part in first for n in sent)
    assert all(any(part in n for n in sent) for part in second)


def test_frozen_blocks_zero_is_frozen_embeddings_and_too_many_are_refused() -> None:
    zero, embeddings = (send("bert", "classification", chain(d)) for d in (frozen_blocks(0), frozen_embeddings()))
    assert zero.message.gradients.keys() == embeddings.message.gradients.keys()
    model = tiny("bert", "classification")
    with pytest.raises(InputError, match="n is 9, but the model has 2 blocks"), defended(model, chain(frozen_blocks(9))):
        pass
    assert all(p.requires_grad for p in model.parameters())


def test_freezing_everything_is_refused_and_leaves_the_model_alone() -> None:
    model = tiny("bert", "classification")
    for name, p in model.named_parameters():
        p.requires_grad_("embeddings" in name)
    with pytest.raises(InputError, match="nothing to train"), defended(model, chain(frozen_embeddings())):
        pass
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(parts(model).embedding_names)


@pytest.mark.parametrize("family", FAMILIES)
def test_undo_restores_what_was_trainable(family: str) -> None:
    model = tiny(family, "classification")
    chosen = [p for i, p in enumerate(model.parameters()) if i % 3 == 0]
    for p in chosen:
        p.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    with defended(model, chain(frozen_embeddings(), frozen_blocks(1))):
        assert [p.requires_grad for p in model.parameters()] != before
    assert [p.requires_grad for p in model.parameters()] == before


def test_lora_embeddings_are_frozen_already() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny("llama", "classification"), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj", "v_proj"])
    )
    inputs = batch_for("classification").inputs()
    plain, _ = gradients(model, inputs)
    with defended(model, chain(frozen_embeddings())):
        same, _ = gradients(model, inputs)
    with defended(model, chain(frozen_blocks(1))):
        upper, _ = gradients(model, inputs)
    assert plain.keys() == same.keys()
    assert any(".layers.0." in n for n in plain) and not any(".layers.0." in n for n in upper)


# --- dropout


def dropout_state(model: nn.Module) -> list[tuple[float | None, float | None, bool]]:
    return [(getattr(m, "p", None), m.__dict__.get("attention_dropout"), m.training) for m in model.modules()]


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_active_then_restored(family: str) -> None:
    model = tiny(family, "classification")
    modules = list(model.modules())
    modules[-1].train(not modules[-1].training)
    before = dropout_state(model)
    inputs = batch_for("classification").inputs()
    with defended(model, chain(dropout(0.3))):
        assert all(m.p == 0.3 for m in model.modules() if isinstance(m, nn.Dropout)) and model.training
        torch.manual_seed(0)
        first, second = model(**inputs).loss, model(**inputs).loss
        assert not torch.equal(first, second)
    assert dropout_state(model) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_zero_is_no_dropout_and_a_seed_repeats_the_masks(family: str) -> None:
    plain = flat(send(family, "classification", none()).message)
    assert torch.allclose(flat(send(family, "classification", chain(dropout(0.0))).message), plain, atol=1e-7)
    a, b, c = (flat(send(family, "classification", chain(dropout(0.3)), seed).message) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.allclose(a, c) and not torch.allclose(a, plain)


def test_attention_dropout_alone_changes_the_gradient_of_llama() -> None:
    """Llama keeps a float, not a module: setting nn.Dropout alone would be ignored."""
    assert not any(isinstance(m, nn.Dropout) for m in tiny("llama", "classification").modules())
    a = flat(send("llama", "classification", none()).message)
    assert not torch.allclose(a, flat(send("llama", "classification", chain(dropout(0.5))).message))


# --- noise


def test_clipping_bounds_the_norm_of_the_whole_message() -> None:
    m = message((40, 30), (7,))
    (clip,) = chain(gaussian_noise(0.0, clip=0.5))
    out, _ = clip.apply(m, None, generator(0))
    assert float(flat(out).norm()) == pytest.approx(0.5, rel=1e-5)
    assert torch.allclose(flat(out) / flat(out).norm(), flat(m) / flat(m).norm(), atol=1e-6)


@pytest.mark.parametrize("make", [gaussian_noise, laplace_noise])
def test_no_noise_and_no_clipping_is_the_identity(make: object) -> None:
    m = message((5, 4), (3,))
    out, _ = make(0.0, clip=math.inf).apply(m, None, generator(0))  # type: ignore[operator]
    assert torch.equal(flat(out), flat(m))


def test_noise_has_the_stated_deviation_and_shape() -> None:
    m = Message({"w": torch.zeros(400, 500)})
    gauss = flat(gaussian_noise(0.2).apply(m, None, generator(0))[0])
    laplace = flat(laplace_noise(0.2).apply(m, None, generator(0))[0])
    assert float(gauss.std()) == pytest.approx(0.2, rel=0.02)
    assert float(laplace.std()) == pytest.approx(0.2 * math.sqrt(2), rel=0.02)
    for draws, kurtosis in ((gauss, 3.0), (laplace, 6.0)):
        assert abs(float(draws.mean())) < 0.002
        assert float((draws**4).mean() / (draws**2).mean() ** 2) == pytest.approx(kurtosis, rel=0.1)


def test_noise_spares_the_entries_that_are_not_visible() -> None:
    m = message((50, 40))
    hidden, _ = magnitude_pruning(0.5).apply(m, None, generator(0))
    noisy, _ = gaussian_noise(1.0).apply(hidden, None, generator(1))
    mask = noisy.visible["p0"]
    assert torch.equal(mask, hidden.visible["p0"])
    assert not noisy.gradients["p0"][~mask].any() and noisy.gradients["p0"][mask].all()


def test_a_seed_repeats_the_noise_and_keeps_the_dtype() -> None:
    m = Message({"w": torch.zeros(10, 10, dtype=torch.bfloat16)})
    a, b, c = (gaussian_noise(1.0).apply(m, None, generator(s))[0].gradients["w"] for s in (0, 0, 1))
    assert a.dtype is torch.bfloat16 and torch.equal(a, b) and not torch.equal(a, c)


# --- pruning


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    ratio=st.floats(0, 0.99),
    zeros=st.booleans(),
    seed=st.integers(0, 99),
)
def test_pruning_drops_exactly_its_ratio(shapes: list[tuple[int, int]], ratio: float, zeros: bool, seed: int) -> None:
    m = message(*shapes, seed=seed)
    if zeros:  # many ties, as in the rows of a word embedding
        m = Message({k: g * (g > 0.5) for k, g in m.gradients.items()})
    total = flat(m).numel()
    for prune in (magnitude_pruning(ratio), random_pruning(ratio)):
        out, _ = prune.apply(m, None, generator(seed))
        kept = torch.cat([out.visible[k].flatten() for k in m.gradients])
        assert int((~kept).sum()) == round(ratio * total)
        assert torch.equal(flat(out), flat(m) * kept)
        if prune.mechanism.name == "pruning" and 0 < int(kept.sum()) < total:
            assert flat(m)[~kept].abs().max() <= flat(m)[kept].abs().min()


def test_pruning_twice_counts_only_what_is_still_visible() -> None:
    m = message((20, 10))
    once, _ = random_pruning(0.5).apply(m, None, generator(0))
    twice, _ = random_pruning(0.5).apply(once, None, generator(1))
    assert int(once.visible["p0"].sum()) == 100 and int(twice.visible["p0"].sum()) == 50
    assert not (twice.visible["p0"] & ~once.visible["p0"]).any()


# --- rounding at random


@pytest.mark.parametrize("levels", [1, 7])
def test_qsgd_rounds_to_levels_of_the_norm_and_is_right_on_average(levels: int) -> None:
    sent = message((40, 3))
    mask = torch.rand(40, 3, generator=generator(1)) < 0.8
    gradient = sent.gradients["p0"] * mask
    unit = float(gradient.norm()) / levels
    draws = []
    for seed in range(2000):
        found, _ = qsgd(levels).apply(Message({"p0": gradient}, {"p0": mask}), None, generator(seed))
        draws.append(found.gradients["p0"] / unit)
    every = torch.stack(draws)
    assert torch.allclose(every, every.round(), atol=1e-4) and not every[:, ~mask].any()
    strayed = every - gradient / unit
    assert float(strayed.abs().max()) < 1
    assert float(strayed.mean(0).abs().max()) < 5 * 0.5 / math.sqrt(2000)


def test_qsgd_takes_whole_levels_and_leaves_an_empty_gradient() -> None:
    for wrong in (0, 1.5, True):
        with pytest.raises(InputError, match="qsgd: levels is"):
            qsgd(wrong)  # type: ignore[arg-type]
    found, _ = qsgd(1).apply(Message({"p0": torch.zeros(3)}), None, generator(0))
    assert not found.gradients["p0"].any()

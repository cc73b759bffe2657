"""The scan of a vocabulary at all places at once, against one input after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from rasura.attacks.updates.span.folding import form
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.rows import DOUBT, RowSpace
from rasura.attacks.updates.span.scan import PLACES, Scan
from rasura.core.rng import generator
from rasura.testing.tiny import ALL, PAD, UNSUPPORTED, WORDS, tiny
from rasura.victims.loading import load

READ = [f for f in ALL if f not in UNSUPPORTED]
OTHERWISE = ("bloom",)
"""Families that norm the embedding twice."""


def space_in(inputs: Inputs, words: Tensor, places: int, known: Tensor | None = None) -> RowSpace:
    """The row space of ``words`` at places one after the other; its directions are noisy."""
    x = torch.cat([inputs.first(word[None], n % places) for n, word in enumerate(words)]).double()
    x = x if known is None else x * known
    return RowSpace(torch.linalg.qr(x.T).Q, torch.logspace(-9, -2, len(words), dtype=torch.double), known)


def places_of(inputs: Inputs) -> int:
    return 1 if inputs.parts.position_embedding is None else PLACES + 3


def slow(space: RowSpace, inputs: Inputs, ids: Tensor, position: int, segment: int) -> tuple[Tensor, Tensor]:
    """``missing`` and ``doubt``, in float64 of the model's own inputs."""
    x = inputs.first(ids, position, segment).double()
    x = x if space.known is None else x * space.known
    inside = x @ space.basis
    size = x.norm(dim=1).clamp_min(1e-30)
    return 1 - (inside.norm(dim=1) / size).square(), (inside * space.noise).norm(dim=1) / size


def apart(model: nn.Module, known: Tensor | None = None) -> float:
    """The largest difference of a scan from ``slow``, over segments and some places of two groups."""
    inputs, ids = Inputs(model), torch.arange(WORDS)
    places = places_of(inputs)
    space = space_in(inputs, torch.arange(20, 40, 2), places, known)
    scan = Scan(space, inputs, ids[ids != 77], places)
    worst = 0.0
    for position in {0, places // 2, places - 1}:
        for segment in range(inputs.types):
            missing, doubt = slow(space, inputs, scan.ids, position, segment)
            found = scan.left(position, segment)
            worst = max(worst, float((found[0] - missing).abs().max()), float((found[1] - doubt).abs().max()))
    return worst


@pytest.mark.parametrize("family", READ)
def test_all_places_at_once_are_as_one_after_the_other(family: str) -> None:
    model = tiny(family, "classification")
    assert (form(model) is None) == (family in OTHERWISE)
    assert apart(model) < 1e-5


@pytest.mark.parametrize("family", ["bert", "electra", "gpt2", "gpt-neox"])
def test_the_difference_is_rounding_alone(family: str) -> None:
    torch.manual_seed(1)
    model = tiny(family, "classification").double()
    for p in model.parameters():  # gains and shifts of a new model are 1 and 0
        p.data += 0.1 * torch.randn_like(p)
    assert form(model) is not None
    assert apart(model) < 1e-9


def test_inputs_that_gradients_are_blank_in_count_on_neither_side() -> None:
    known = torch.ones(64, dtype=torch.double)
    known[torch.randperm(64, generator=generator(0))[:20]] = 0
    assert apart(tiny("bert", "classification").double(), known) < 1e-9


def test_a_model_without_a_norm_before_block_0() -> None:
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=WORDS, hidden_size=64, word_embed_proj_dim=64, num_hidden_layers=1, num_attention_heads=4, ffn_dim=64,
        max_position_embeddings=64, pad_token_id=PAD, do_layer_norm_before=False, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.OPTForCausalLM(config).eval()
    found = form(model)
    assert found is not None and found.norm.eps is None
    assert apart(model) < 1e-5


@pytest.mark.parametrize("family", ["bert", "bloom"])
@pytest.mark.parametrize("least", [1e-4, 1e-3])
def test_the_words_within_are_those_of_every_input_in_float64(family: str, least: float) -> None:
    model = tiny(family, "classification")
    inputs, ids = Inputs(model), torch.arange(3, WORDS)
    places = places_of(inputs)
    space = space_in(inputs, torch.arange(20, 40, 2), places)
    scan = Scan(space, inputs, ids, places)
    for position in range(min(places, 10)):
        x = inputs.first(ids, position).double()
        residual = (x - (x @ space.basis) @ space.basis.T).norm(dim=1) / x.norm(dim=1)
        allowed = (DOUBT * ((x @ space.basis) * space.noise).norm(dim=1) / x.norm(dim=1)).clamp(least, 0.5)
        hits, states, found = scan.within(position, least)
        assert len(hits) and sorted(hits.tolist()) == (residual < allowed).nonzero().flatten().tolist()
        assert torch.allclose(states, x[hits], atol=1e-6) and torch.allclose(found, residual[hits], atol=1e-6)
        assert bool((found.diff() >= 0).all())


def test_a_word_without_an_input_lies_in_no_row_space() -> None:
    model = tiny("llama", "causal")
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = 0.0
    inputs = Inputs(model)
    scan = Scan(space_in(inputs, torch.arange(20, 30), 1), inputs, torch.arange(WORDS), 1)
    assert 7 not in scan.within(0, 1e-3)[0].tolist()


@pytest.mark.parametrize("name", ["smollm2", "mpnet", "distilbert", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_pretrained_models_are_of_the_form(name: str, pretrained: Path) -> None:
    model = load(pretrained / name, "causal" if name in ("smollm2", "gemma3") else "classification").model
    inputs = Inputs(model)
    places = places_of(inputs)
    ids = torch.arange(0, 28_000, 11)
    space = space_in(inputs, ids[10:500:20], places)
    scan = Scan(space, inputs, ids, places)
    assert scan.form is not None
    for position in {0, places - 1}:
        missing, doubt = slow(space, inputs, ids, position, 0)
        found = scan.left(position, 0)
        assert float((found[0] - missing).abs().max()) < 1e-5
        assert float((found[1] - doubt).abs().max()) < 1e-5

"""What an attack may claim: the null of a row space, and what settles the portfolio."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from confidence_setting import TEXT, only, seen_of
from null_setting import chance_limit, stand_clear
from torch import Tensor

from rasura.attacks.shared.verify import check, in_span, prove, verified
from rasura.attacks.updates.best import EXPLAINS_NOTHING, _rank, _settled, matching
from rasura.attacks.updates.gradient_matching.presets import dlg, lamp_weighted
from rasura.attacks.updates.noise_in_sight import shows_noise
from rasura.attacks.updates.span import Span
from rasura.attacks.updates.span.attack import dager
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.null import (
    each_once,
    explained,
    outside,
    rows_believed,
)
from rasura.attacks.updates.span.rows import RowSpace
from rasura.attacks.updates.span.tokens import Row
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, WITH_LABELS_AND_LENGTHS, adversary_copy, observe
from rasura.core.values import UNKNOWN, Grant, Message, Observation, Reconstruction
from rasura.registry import attack as make_attack
from rasura.registry import parse_defense
from rasura.testing.tiny import CLS, PAD, SEP, VOCABULARY, WORDS, batch_of, tiny
from rasura.victims.models import layer_inputs, parts
from rasura.victims.step import step

QUICK = Budget("quick")


# --- the null of a row space


def test_chance_limit_is_exact_in_one_dimension() -> None:
    x = torch.linspace(-1, 1, 201, dtype=torch.double)[:, None]
    deviation = float(x.std())
    assert chance_limit(x, 100.0) == pytest.approx(1e-4 * math.sqrt(math.pi / 2) * deviation, rel=1e-6)
    assert chance_limit(x, 10.0) == pytest.approx(10 * chance_limit(x, 100.0), rel=1e-6)
    assert chance_limit(x + 5, 100.0) == pytest.approx(chance_limit(x, 100.0), rel=1e-6)


@pytest.mark.parametrize("dimensions", [2, 6, 30])
def test_fewer_than_one_search_in_a_hundred_has_a_token_below_the_limit(dimensions: int) -> None:
    rng, trials = generator(dimensions), 50
    shape = torch.logspace(0, -1, dimensions, dtype=torch.double)
    limit = chance_limit(torch.randn(600, dimensions, generator=rng, dtype=torch.double) * shape, trials)
    draws = torch.randn(4000, trials, dimensions, generator=rng, dtype=torch.double) * shape
    hits = (draws.norm(dim=-1) < limit).any(1).double().mean()
    assert limit > 0 and float(hits) <= 0.015
    wide = (draws.norm(dim=-1) < 3 * limit).any(1).double().mean()
    assert float(wide) > float(hits), "the limit is no empty one"


def test_without_others_or_directions_no_limit_is_known() -> None:
    for nothing in (torch.empty(0, 4), torch.ones(1, 4), torch.ones(9, 4)):
        assert chance_limit(nothing, 10) == 0
    assert chance_limit(torch.full((9, 4), math.nan), 10) == 0
    assert not stand_clear(torch.zeros(1), [], 10) and not stand_clear(torch.zeros(0), [torch.randn(9, 4)], 10)
    assert not stand_clear(torch.zeros(1), [torch.empty(0, 4)], 10)


def test_a_residual_stands_clear_at_half_of_the_next() -> None:
    beside = torch.nn.functional.normalize(torch.randn(400, 40, generator=generator(1), dtype=torch.double), dim=1)
    assert chance_limit(beside, 100) > 0.4
    assert stand_clear(torch.tensor([0.1, 0.3]), [beside, beside], 100)
    near = torch.cat([beside, 0.5 * beside[:1]])
    assert stand_clear(torch.tensor([0.24]), [near], 100) and not stand_clear(torch.tensor([0.26]), [near], 100)
    assert not stand_clear(torch.tensor([0.1, 0.3]), [beside, near], 100)
    assert not stand_clear(torch.tensor([math.nan]), [beside], 100)


def space_of(x: Tensor, noise: float = 1e-9) -> RowSpace:
    basis = torch.linalg.qr(x.T).Q
    return RowSpace(basis, torch.full((basis.shape[1],), noise, dtype=torch.double))


def test_a_guess_explains_the_whole_row_space_or_is_not_believed() -> None:
    x = torch.randn(6, 40, generator=generator(2), dtype=torch.double)
    space = space_of(x)
    assert explained(space, x) and explained(space, torch.cat([x, x[:1]]))
    assert not explained(space, x[:5])
    assert not explained(space, x[[0, 0, 0, 0, 0, 0]])
    assert not explained(space, torch.cat([x[:5], x[:1]]))
    noisy = replace(space, noise=torch.tensor([1e-9] * 5 + [0.9], dtype=torch.double))
    tilted = torch.cat([space.basis.T[:5], torch.randn(1, 40, generator=generator(3), dtype=torch.double)])
    assert explained(noisy, tilted) and not explained(space, tilted)


def test_texts_that_use_a_row_twice_or_leave_one_out_are_not_believed() -> None:
    rows = [Row(n, t, 0, torch.ones(4), 0.0) for n, t in ((0, CLS), (1, 7), (1, 8), (2, 9), (3, SEP))]
    one, other = [(CLS, 0), (7, 0), (9, 0), (SEP, 0)], [(CLS, 0), (8, 0), (SEP, 0)]
    assert each_once(rows, [one, other], {CLS, SEP})
    assert each_once(rows, [one, [*other, (UNKNOWN, 0)]], {CLS, SEP})
    assert not each_once(rows, [one, [(CLS, 0), (7, 0), (SEP, 0)]], {CLS, SEP})
    assert not each_once(rows, [one], {CLS, SEP})
    assert not each_once(rows, [one, other, other], {CLS, SEP})
    assert not each_once(rows, [[(CLS, 0), (9, 0), (7, 0)], other], {CLS, SEP})


def test_outside_leaves_out_inputs_of_size_zero() -> None:
    x = torch.randn(6, 40, generator=generator(2), dtype=torch.double)
    left = outside(space_of(x[:3]), torch.cat([x, torch.zeros(1, 40)]))
    assert len(left) == 6 and float(left[:3].norm(dim=1).max()) < 1e-9 < float(left[3:].norm(dim=1).min())
    assert torch.allclose(left.norm(dim=1), space_of(x[:3]).residual(x), atol=1e-12)


def test_rows_are_believed_if_they_fill_the_row_space_and_leave_too_little_for_chance() -> None:
    space = space_of(torch.randn(8, 128, generator=generator(0), dtype=torch.double))
    row = Row(0, 1, 0, torch.ones(128), 1e-6)
    assert rows_believed(space, [row] * 8, 1e4, 0) and rows_believed(space, [row] * 7, 1e4, 1)
    assert not rows_believed(space, [row] * 7 + [replace(row, residual=0.9)], 1e4, 0)
    assert not rows_believed(space, [], 1e4, 8)
    for count in (7, 9):
        assert not rows_believed(space, [row] * count, 1e4, 0)


def test_special_tokens_alone_are_no_text() -> None:
    seen = seen_of(tiny("bert", "classification"), [TEXT])
    with pytest.raises(AttackFailed, match="only special tokens"):
        in_span(((CLS, UNKNOWN, SEP),), seen, believed=True)
    assert in_span(((CLS, 40, SEP),), seen, believed=True).confidence == "span"
    assert in_span(((CLS, 40, SEP),), seen, believed=False).confidence == "matched"


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_an_overfull_row_space_is_never_a_span(family: str) -> None:
    model = tiny(family, "causal", hidden=16)
    for seed in range(2):
        rows = [[CLS, *(20 + torch.randint(200, (11,), generator=generator(seed, k))).tolist()] for k in range(4)]
        seen = seen_of(model, rows, "causal")
        for name in ("span", "dager"):
            try:
                guess = make_attack(name)(seen, rng=generator(0), budget=QUICK)
            except (AttackFailed, NotApplicable):
                continue
            assert guess.confidence not in ("span", "verified") or sorted(guess.tokens) == sorted(map(tuple, rows))


def test_stories_that_overfill_the_width_are_never_a_span(shared: Path) -> None:
    from rasura.data.text import load_examples
    from rasura.victims.loading import load

    victim = load(shared / "models" / "stories260K-hf", "causal")
    texts = [e.text for e in load_examples(shared / "data" / "tinystories.validation.parquet")[4:8]]
    vocabulary = victim.vocabulary
    rows = [[*vocabulary.prefix, *vocabulary.encode(text[:800])[30:53]] for text in texts]
    assert len({t for row in rows for t in row}) > 64
    batch = batch_of(rows, "causal")
    sent = step(victim.model, batch, task="causal", vocabulary=vocabulary, rng=generator(0))
    for keep in ("", "layers.1", "layers.3"):
        seen = observe(sent, HONEST_SERVER)
        seen = only(seen, *[n for n in seen.gradients if keep in n])
        try:
            guess = Span()(seen, rng=generator(0), budget=QUICK)
        except (AttackFailed, NotApplicable):
            continue
        assert guess.confidence in ("matched", "none")


def test_positions_that_a_model_counts_itself_are_read_right() -> None:
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, ffn_dim=128, num_attention_heads=4, pad_token_id=PAD,
        max_position_embeddings=64, word_embed_proj_dim=64, bos_token_id=CLS, eos_token_id=SEP, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.OPTForSequenceClassification(config).eval()
    inputs, ids = Inputs(model), torch.tensor([TEXT[:-1]])
    module = inputs.parts.blocks[0].qkv[0].module
    whole = layer_inputs(model, [module], input_ids=ids, attention_mask=torch.ones_like(ids))[module][0]
    alone = torch.cat([inputs.first(t[None], n) for n, t in enumerate(ids[0])])
    assert torch.allclose(alone, whole, atol=1e-5)
    guess = Span()(seen_of(model, [TEXT[:-1]]), rng=generator(0), budget=QUICK)
    assert guess.tokens == (tuple(TEXT[:-1]),) and guess.confidence == "verified"


def minilm(path: Path, defense: str, scale: float = 0.0) -> Observation:
    """What is seen of one sentence, with the adversary's weights off by ``scale`` of their deviation."""
    from rasura.victims.loading import load

    victim = load(path, "classification")
    ids = victim.vocabulary.encode("the cat sat on the old mat")
    row = [*victim.vocabulary.prefix, *ids, *victim.vocabulary.suffix]
    batch = replace(batch_of([row], "classification", [1]), special_ids=victim.vocabulary.special_ids)
    rng = generator(0, "step")
    sent = step(
        victim.model, batch, parse_defense(defense), task="classification", vocabulary=victim.vocabulary, rng=rng
    )  # fmt: skip
    seen = observe(sent, HONEST_SERVER)
    with torch.no_grad():
        for p in victim.model.parameters():
            p.add_(scale * p.std() * torch.randn(p.shape, generator=rng) if p.numel() > 1 else 0.0)
    return replace(seen, granted={**seen.granted, Grant.MODEL: adversary_copy(victim.model)})


def test_weights_that_are_a_little_off_give_the_text_or_a_failure_in_words(minilm_path: Path) -> None:
    seen = minilm(minilm_path, "frozen-embeddings", 1e-4)
    guess = Span()(seen, rng=generator(0), budget=QUICK)
    assert seen.vocabulary.text(guess.tokens[0]) == "the cat sat on the old mat"
    with pytest.raises(AttackFailed, match="only special tokens"):
        dager()(seen, rng=generator(0), budget=QUICK)


@pytest.mark.parametrize("defense", ["gaussian:1e-5", "random-pruning:0.5"])
def test_a_residual_that_other_tokens_reach_is_no_span(minilm_path: Path, defense: str) -> None:
    seen = minilm(minilm_path, f"frozen-embeddings+{defense}")
    guess = dager()(seen, rng=generator(0), budget=QUICK)
    assert guess.confidence == "matched" and guess.residual is not None and guess.residual > 0.3


@pytest.mark.slow
def test_in_weak_noise_the_portfolio_goes_on_to_the_sentence(minilm_path: Path) -> None:
    seen = minilm(minilm_path, "frozen-embeddings+gaussian:1e-5")
    guess = make_attack("best")(seen, rng=generator(0), budget=QUICK)
    assert guess.details["attack"] == "pursuit"
    assert seen.vocabulary.text(guess.tokens[0]) == "the cat sat on the old mat"


# --- the portfolio


def test_only_whole_worded_ordered_spans_settle() -> None:
    seen = seen_of(tiny("bert", "classification"), [TEXT])
    whole = Reconstruction((tuple(TEXT),), "span")
    assert _settled(whole, seen, "span") and not _settled(replace(whole, confidence="matched"), seen, "span")
    assert not _settled(replace(whole, ordered=False), seen, "span")
    for tokens in ((), ((CLS, SEP),), ((CLS, UNKNOWN, 40, SEP),), ((CLS, 40, SEP), (CLS, SEP))):
        assert not _settled(replace(whole, tokens=tokens), seen, "span")
    told_lengths = replace(seen, granted={**seen.granted, Grant.LENGTHS: (7,)})
    assert _settled(whole, told_lengths, "span")
    assert not _settled(replace(whole, tokens=((CLS, 40, SEP),)), told_lengths, "span")
    proven = prove(seen, [TEXT])
    assert proven is not None and _settled(verified(proven, {}), told_lengths, "span")


def test_a_causal_text_settles_without_its_last_word() -> None:
    """It is no input. The portfolio went on for minutes to attacks that could not name it either."""
    seen = seen_of(tiny("llama", "causal"), [TEXT], "causal")
    whole = Reconstruction(((*TEXT[:-1], UNKNOWN),), "span")
    assert _settled(whole, seen, "span") and not _settled(replace(whole, confidence="matched"), seen, "span")
    assert not _settled(replace(whole, tokens=((*TEXT[:-2], UNKNOWN, TEXT[-1]),)), seen, "span")
    assert not _settled(whole, seen_of(tiny("llama", "classification"), [TEXT]), "span")


def test_a_bag_comes_before_an_ordered_text_that_explains_nothing_of_a_causal_update() -> None:
    text, wrong, near = (CLS, 40, 3, 41, 9, 42), (CLS, 77, 77, 77), (CLS, 40, 3, 41, 9, 43)
    seen = seen_of(tiny("llama", "causal"), [list(text)], task="causal")
    bag = Reconstruction((tuple(sorted(text)),), "matched", ordered=False)
    junk, close = (Reconstruction((tokens,), "matched") for tokens in (wrong, near))
    assert check(seen, [near])[0] < EXPLAINS_NOTHING < check(seen, [wrong])[0]
    assert _rank(junk, seen) < _rank(bag, seen) < _rank(close, seen)
    dropped = (parse_defense("dropout:0.1")[0].mechanism,)
    blurred = replace(seen, granted={**seen.granted, Grant.MECHANISM: dropped})
    assert _rank(junk, blurred) > _rank(bag, blurred), "of a right text, too, the error is large"
    noisy = seen_of(tiny("llama", "causal"), [list(text)], "causal", "gaussian:0.01")
    assert check(noisy, [text])[0] > EXPLAINS_NOTHING, "noise makes up most of the update"
    assert _rank(junk, noisy) < _rank(bag, noisy) < _rank(Reconstruction((text,), "matched"), noisy)


@pytest.mark.parametrize(
    "defense", ["dp-sgd:1.0/clip=0.5", "normalised:1.0", "gaussian:0.001", "directional:1e5/blocks=parameters"]
)
def test_noise_that_shows_itself_is_played_with_weighted_lamp(defense: str) -> None:
    seen = seen_of(tiny("bert", "classification"), [TEXT], defense=defense)
    silent = replace(seen, granted={**seen.granted, Grant.MECHANISM: ()})
    assert shows_noise(silent) and matching(silent) is lamp_weighted
    frozen = {n: g for n, g in seen.gradients.items() if "embeddings" not in n}
    assert shows_noise(replace(silent, message=Message(frozen)))


@pytest.mark.parametrize("defense", ["none", "dropout:0.2", "fp16", "bf16", "frozen-embeddings", "pruning:0.5"])
def test_an_update_without_noise_shows_none(defense: str) -> None:
    for threat in (HONEST_SERVER, WITH_LABELS_AND_LENGTHS):
        rows = [TEXT, [CLS, 50, 51, 4, 52, SEP]]
        rng = generator(0, "step")
        sent = step(
            tiny("bert", "classification"), batch_of(rows, "classification", [1, 0]), parse_defense(defense),
            task="classification", vocabulary=VOCABULARY, rng=rng,
        )  # fmt: skip
        seen = observe(sent, threat)
        assert not shows_noise(seen) and matching(seen) is dlg


def test_a_high_rank_shows_noise_where_lengths_allow_less() -> None:
    seen = seen_of(tiny("bert", "classification"), [TEXT])
    block = parts(seen.model).blocks[0]
    kept = {lin.weight: seen.gradients[lin.weight] for lin in block.qkv}
    for noise, shown in ((0.0, False), (1.0, True)):
        drawn = {n: g + noise * g.std() * torch.randn(g.shape, generator=generator(1)) for n, g in kept.items()}
        part = Observation(Message(drawn), seen.task, {**seen.granted, Grant.LENGTHS: (7,)})
        assert shows_noise(part) == shown
        assert not shows_noise(replace(part, granted=seen.granted)), "without lengths a full batch looks the same"


# --- the law


def null_draws() -> ModuleType:
    # By its path: another library installs a package of the name benchmarks.
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "null_draws.py"
    spec = spec_from_file_location("null_draws", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("draws", [3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["embedding-rows", "span", "dager", "dlg", "decepticons"])
def test_where_nothing_can_be_read_nothing_is_claimed(name: str, draws: int) -> None:
    law = null_draws()
    rows = [law.run(name, kind, draw) for kind in law.KINDS for draw in range(draws)]
    assert not any(row["false"] for row in rows)
    assert sum(row["outcome"] != "not applicable" for row in rows) > len(rows) / 2


@pytest.mark.slow
def test_the_law_of_null_draws() -> None:
    law = null_draws()
    for name in law.ATTACKS:
        rows = [law.run(name, kind, draw) for kind in law.KINDS for draw in range(20)]
        assert not any(r["false"] and r["outcome"] == "verified" for r in rows), name
        assert sum(r["false"] for r in rows) <= 0.01 * len(rows), name

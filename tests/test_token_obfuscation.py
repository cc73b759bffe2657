"""GHOST: the search against a plain reference, the selection's laws, and protecting a file as a person does."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from audit_setting import TEXTS, model_folder
from commands import rasura_command, refused, refused_process
from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.core.rng import generator
from rasura.core.values import Vocabulary
from rasura.ghost.defense import ghost
from rasura.ghost.models import made_for
from rasura.ghost.neighbours import common, neighbours
from rasura.ghost.selection import Selector
from rasura.ghost.selection_settings import Selection
from rasura.ghost.table import RELAXED, ShadowSettings, ShadowTable, search, usable_tokens
from rasura.ghost.words import lemmas
from rasura.registry import parse_defense
from rasura.runs import ghost_file
from rasura.runs.ghost_obfuscator import GhostObfuscator
from rasura.testing.tiny import CLS, SEP, VOCABULARY, WORDS, batch_of, tiny
from rasura.victims.loading import load
from rasura.victims.step import step

__all__ = ["model_folder"]

SMALL = ShadowSettings(k=12, overlap=0.3, grow=4, max_k=40, language=None)


def clustered(tokens: int = 400, seed: int = 0) -> Tensor:
    """Rows in clusters, so that neighbourhoods overlap as in a trained embedding."""
    rng = generator(seed)
    centres = torch.randn(25, 16, generator=rng)
    return centres[torch.randint(25, (tokens,), generator=rng)] + 0.7 * torch.randn(tokens, 16, generator=rng)


def plain_search(table: Tensor, names: Sequence[str], usable: Tensor, s: ShadowSettings) -> list[tuple[list[int], int, int]]:
    """Algorithm 1 in loops, in float64: (substitutes, k, what was given up) of every token."""
    rows = torch.nn.functional.normalize(table.double(), dim=1)
    cosines = rows @ rows.T
    cosines[:, ~usable] = -2
    cosines.fill_diagonal_(-2)
    near = cosines.argsort(dim=1, descending=True, stable=True)[:, : s.max_k].tolist()
    sizes = [*range(s.k, s.max_k, s.grow), s.max_k]
    out: list[tuple[list[int], int, int]] = []
    for t in range(len(table)):
        found: tuple[list[int], int, int] = ([], 0, 3)
        for level, k in [(0, k) for k in sizes] + [(1, s.max_k), (2, s.max_k)] if usable[t] else []:
            own = near[t][:k]
            left = []
            for other in own:
                theirs = near[other][:k]
                too_common = level < 1 and s.indirect and len(set(own) & set(theirs)) > s.overlap * k
                if not (too_common or (level < 2 and s.direct and t in theirs) or (s.lemma and names[t] == names[other])):
                    left.append(other)
            if left:
                found = (left, k, level)
                break
        out.append(found)
    return out


@pytest.mark.parametrize("criteria", [{}, {"direct": False}, {"indirect": False}, {"lemma": False}])
def test_search_equals_the_plain_loops(criteria: dict[str, bool]) -> None:
    table = clustered()
    names = [f"l{i // 3}" for i in range(len(table))]
    usable = torch.ones(len(table), dtype=torch.bool)
    usable[:7] = False
    settings = ShadowSettings(k=12, overlap=0.3, grow=4, max_k=40, language=None, **criteria)
    found = search(table, names, usable, settings)
    wanted = plain_search(table, names, usable, settings)
    assert [(found.of(t).tolist(), int(found.k[t]), int(found.relaxed[t])) for t in range(len(table))] == wanted
    if not criteria:
        assert {level for _, _, level in wanted} >= {0, 3} and len({k for _, k, _ in wanted}) > 2, "growth is exercised"


@pytest.mark.parametrize("tokens", [90, 2000])
def test_neighbours_are_the_nearest_in_order_in_blocks_of_any_size(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table, usable = clustered(tokens), torch.rand(tokens, generator=generator(1)) > 0.1
    found = neighbours(table, 20, usable)
    rows = torch.nn.functional.normalize(table.double(), dim=1)
    cosines = (rows @ rows.T).masked_fill(~usable, -2.0)
    cosines.fill_diagonal_(-2)
    best = cosines.topk(20).values
    assert torch.allclose(cosines.gather(1, found.long()), best, atol=1e-6)
    assert bool((found.long() != torch.arange(tokens)[:, None]).all()) and bool(usable[found.long()].all())
    assert torch.equal(neighbours(table, 20, usable, upto=33), found[:33])
    monkeypatch.setattr("rasura.ghost.neighbours.BLOCK_BYTES", 1 << 14)
    assert torch.equal(neighbours(table, 20, usable), found)
    with pytest.raises(ValueError, match="neighbours"):
        neighbours(table, 20, torch.arange(tokens) < 20)


def test_common_counts_only_what_is_asked() -> None:
    near = neighbours(clustered(), 12, torch.ones(400, dtype=torch.bool))
    asked = torch.rand(50, 12, generator=generator(2)) > 0.4
    shared, back = common(near, torch.arange(50), asked)
    for t in range(50):
        for j, other in enumerate(near[t].tolist()):
            mine, theirs = set(near[t].tolist()), set(near[other].tolist())
            assert int(shared[t, j]) == (len(mine & theirs) if asked[t, j] else 0)
            assert bool(back[t, j]) == (t in theirs if asked[t, j] else False)


def test_lemmas_join_forms_and_take_a_subword_for_its_letters() -> None:
    words = ["went", "go", "##ing", "going", "houses", "house", "7", "ing", "##7", "##", "##houses"]
    vocabulary = Vocabulary(len(words), lambda ids: " ".join(words[i] for i in ids), lambda text: [])
    found = lemmas(vocabulary, "en")
    assert found[0] == found[1] == found[3] and found[4] == found[5]
    # A subword in place of the word that it is would show the word.
    assert found[2] == found[7] == "ing" and found[6] == found[8] == "7" and found[9] == "##" and found[10] == "house"
    assert lemmas(vocabulary, None) == ["went", "go", "ing", "going", "houses", "house", "7", "ing", "7", "##", "houses"]
    with pytest.raises(InputError, match="no lemmas for the language 'xx'"):
        lemmas(vocabulary, "xx")


@pytest.mark.parametrize("language", ["en", None])
def test_what_reads_like_the_token_has_its_lemma(language: str | None) -> None:
    """An account number's ``3`` became ``₃``, ``三`` or ``three``, and the report said that it was replaced by another
    meaning."""
    alike = [
        ("3", "##₃", "³", "３", "三", "\N{ARABIC-INDIC DIGIT THREE}"),
        ("k", "##\N{CYRILLIC SMALL LETTER KA}", "\N{GREEK SMALL LETTER KAPPA}"),
        ("!", "！"),
        ("...", "…"),
        ("said", "ſaid"),
        ("é", "e", "É"),
        ("fi", "##ﬁ"),
        ("ss", "ß"),
    ]
    words = [word for some in alike for word in some]
    vocabulary = Vocabulary(len(words), lambda ids: " ".join(words[i] for i in ids), lambda text: [])
    found = dict(zip(words, lemmas(vocabulary, language)))
    assert [len({found[word] for word in some}) for some in alike] == [1] * len(alike)
    assert len(set(found.values())) == len(alike)


def table_of(family: str = "bert", task: str = "classification") -> ShadowTable:
    return made_for(tiny(family, task), VOCABULARY, SMALL)


def test_tokenizers_that_share_an_embedding_have_tables_of_their_own() -> None:
    marked = replace(VOCABULARY, special_ids=VOCABULARY.special_ids | {40})
    plain, model = table_of(), tiny("bert", "classification")
    assert 40 in plain.ids and len(plain.of(40))
    made = made_for(model, marked, SMALL)
    assert 40 not in made.ids and not len(made.of(40))
    assert made_for(model, replace(VOCABULARY), SMALL) is plain


def test_a_table_is_a_file_that_only_its_model_opens(tmp_path: Path) -> None:
    table = table_of()
    table.save(tmp_path / "shadows.safetensors")
    again = ShadowTable.load(tmp_path / "shadows.safetensors", table.model)
    assert all(torch.equal(again.of(t), table.of(t)) for t in range(len(table)))
    assert again.settings == SMALL and torch.equal(again.relaxed, table.relaxed)
    with pytest.raises(InputError, match="made for another model"):
        ShadowTable.load(tmp_path / "shadows.safetensors", "0" * 32)
    (tmp_path / "broken.safetensors").write_bytes(b"no table")
    with pytest.raises(InputError, match="is not a shadow table"):
        ShadowTable.load(tmp_path / "broken.safetensors")
    with pytest.raises(InputError, match="made for another model"):
        Selector(tiny("bert", "classification", seed=1), table, frozenset())


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_selection_takes_substitutes_only_and_lowers_the_error(family: str) -> None:
    task = "classification" if family == "bert" else "causal"
    model, table = tiny(family, task), table_of(family, task)
    texts = [[CLS, 40, 41, 9, 50, SEP], [CLS, 60, 61, 62, 63, SEP], [CLS, 70, 71, SEP]]
    first = Selector(model, table, VOCABULARY.special_ids, Selection(sweeps=1, tried=1))(texts, generator(0))
    done = Selector(model, table, VOCABULARY.special_ids)(texts, generator(0))
    for text, one, quick in zip(texts, done, first):
        assert one.ids[0] == CLS and one.ids[-1] == SEP
        assert all(new in table.of(old).tolist() for old, new in zip(text[1:-1], one.ids[1:-1]) if len(table.of(old)))
        assert not any(new == old for old, new in zip(text[1:-1], one.ids[1:-1]) if len(table.of(old)))
        assert one.error <= quick.error + 1e-6
    again = Selector(model, table, VOCABULARY.special_ids)(texts, generator(0))
    assert again == done


def test_first_order_candidates_come_near_the_exact_choice() -> None:
    model, table = tiny("bert", "classification"), table_of()
    texts = [[CLS, *torch.randint(20, WORDS, (8,), generator=generator(k)).tolist(), SEP] for k in range(6)]

    def error(selection: Selection) -> float:
        found = Selector(model, table, VOCABULARY.special_ids, selection)(texts, generator(0))
        return sum(one.error for one in found)

    exact = error(Selection(tried=0))
    assert error(Selection(tried=6)) < 1.1 * exact
    assert error(Selection(tried=0, beam=3)) <= 1.001 * exact


def test_what_has_no_good_substitute_is_told() -> None:
    model, table = tiny("bert", "classification"), table_of()
    relaxed = table.relaxed.clone()
    relaxed[40] = 1
    offsets = table.offsets.clone()
    gone = int(offsets[42] - offsets[41])
    ids = torch.cat([table.ids[: int(offsets[41])], table.ids[int(offsets[42]) :]])
    offsets[42:] -= gone
    changed = replace(table, offsets=offsets, ids=ids, relaxed=relaxed)
    (one,) = Selector(model, changed, VOCABULARY.special_ids)([[CLS, 40, 41, 50, SEP]], generator(0))
    assert one.weak == {1: RELAXED[1]} and one.kept == (2,) and one.ids[2] == 41


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_step_behind_ghost_sends_the_gradient_of_the_substitutes(family: str) -> None:
    task = "classification" if family == "bert" else "causal"
    model = tiny(family, task)
    batch = batch_of([[CLS, 40, 41, 9, 50, SEP]], task)
    sent = step(model, batch, (ghost(shadows=SMALL),), task=task, vocabulary=VOCABULARY, rng=generator(0))  # type: ignore[arg-type]
    (done,) = Selector(model, table_of(family, task), VOCABULARY.special_ids)([list(batch.ids(0))], generator(0))
    hidden = batch_of([list(done.ids)], task)
    plain = step(model, hidden, task=task, vocabulary=VOCABULARY, rng=generator(0))  # type: ignore[arg-type]
    assert all(torch.allclose(g, plain.message.gradients[n]) for n, g in sent.message.gradients.items())
    assert sent.batch.ids(0) == batch.ids(0), "the truth is the original"
    assert sent.mechanism[0].name == "ghost" and sent.mechanism[0].parameters["k"] == 12


def test_options_are_told_as_text() -> None:
    (one,) = parse_defense("ghost:k=200/overlap=0.2/lemma=false/group=8/start=random/sweeps=0/language=none")
    told = one.mechanism.parameters
    assert (told["k"], told["max_k"], told["overlap"], told["lemma"], told["group"]) == (200, 200, 0.2, False, 8)
    assert (told["start"], told["sweeps"], told["language"]) == ("random", 0, None)
    assert parse_defense("ghost")[0].mechanism == ghost().mechanism
    for wrong, message in [
        ("ghost:gruop=8", "no option 'gruop'"), ("ghost:k=many", "k is 'many'"), ("ghost:lemma=1", "lemma is '1'"),
        ("ghost:start=far", "expected nearest or random"), ("ghost:k=0", "0 < k"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=message):
            parse_defense(wrong)


def test_a_start_without_sweeps_is_nearest_or_random() -> None:
    model, table = tiny("bert", "classification"), table_of()
    text = [CLS, 40, 41, 50, 60, 61, SEP]
    rows = model.base_model.get_input_embeddings().weight.detach()  # type: ignore[operator, union-attr]
    (near,) = Selector(model, table, VOCABULARY.special_ids, Selection(sweeps=0))([text], generator(0))
    for old, new in zip(text[1:-1], near.ids[1:-1]):
        own = table.of(old)
        assert new == int(own[(rows[own] - rows[old]).norm(dim=1).argmin()])
    chance = Selector(model, table, VOCABULARY.special_ids, Selection(sweeps=0, start="random"))
    assert len({chance([text], generator(k))[0].ids for k in range(8)}) > 4


def test_the_prefix_of_a_decoder_is_computed_once_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, table = tiny("llama", "causal"), table_of("llama", "causal")
    texts = [[CLS, *torch.randint(20, WORDS, (9,), generator=generator(k)).tolist(), SEP] for k in range(4)]
    selector = Selector(model, table, VOCABULARY.special_ids)
    assert selector.causal and not Selector(tiny("bert", "classification"), table_of(), frozenset()).causal
    seen = []
    forward = Selector.states
    monkeypatch.setattr(Selector, "states", lambda *a: (seen.append(a[1].shape[:2].numel()), forward(*a))[1])
    quick = selector(texts, generator(0))
    with_prefix = sum(seen)
    seen.clear()
    monkeypatch.setattr(Selector, "causal", False)
    plain = selector(texts, generator(0))
    assert [one.ids for one in quick] == [one.ids for one in plain]
    assert with_prefix < 0.75 * sum(seen)


def test_usable_tokens_leave_special_and_unused_ones_out() -> None:
    usable = usable_tokens(VOCABULARY)
    assert not usable[[0, CLS, SEP]].any() and bool(usable[3:].all())


def test_control_tokens_are_neither_replaced_nor_used_as_substitutes() -> None:
    """SmolLM2 flags ``<file_sep>`` and thirteen others as special, but gives them no named place."""
    model, settings = tiny("bert", "classification"), ShadowSettings(k=8, overlap=0.5, language=None)
    plain = made_for(model, VOCABULARY, settings)
    token = next(i for i in range(SEP + 1, VOCABULARY.size) if len(plain.of(i)) and (plain.ids == i).any())
    known = replace(VOCABULARY, control_ids=frozenset({token}))
    with pytest.raises(InputError, match="replaces control tokens"):
        ghost(plain).init((model, known))
    selector = ghost(shadows=settings).init((model, known))
    assert not len(selector.table.of(token)) and not (selector.table.ids == token).any()
    (done,) = selector([(CLS, token, token + 1, SEP)], generator(0))
    assert done.ids[1] == token


# --- a file


def notes(folder: Path, rows: int) -> Path:
    path = folder / "notes.jsonl"
    path.write_text("".join(json.dumps({"text": TEXTS[k % len(TEXTS)], "label": k % 2}) + "\n" for k in range(rows)))
    return path


OPTIONS = ("--k", "12", "--overlap", "0.5", "--language", "none")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_protected_file_holds_every_row_its_label_and_no_original_word(
    suffix: str, tmp_path: Path, model_folder: Path
) -> None:
    target = tmp_path / f"hidden{suffix}"
    done = rasura_command("protect", "ghost", notes(tmp_path, 5), target, "--model", model_folder, *OPTIONS, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["rows"] == 5 and told["kept"] == told["unchanged"] == 0
    if suffix == ".jsonl":
        rows = [json.loads(line) for line in target.read_text().splitlines()]
    elif suffix == ".csv":
        with target.open(newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        import pyarrow.parquet as parquet

        rows = parquet.read_table(target).to_pylist()
    assert [int(r["label"]) for r in rows] == [0, 1, 0, 1, 0]
    for k, row in enumerate(rows):
        words = TEXTS[k % len(TEXTS)].lower().split()
        assert not any(a == b for a, b in zip(words, row["text"].split()))
    report = [json.loads(line) for line in target.with_suffix(".report.jsonl").read_text().splitlines()]
    assert [r["row"] for r in report] == list(range(5)) and all(r["kept"] == [] for r in report)
    card = target.with_suffix(".card.md").read_text()
    assert (
        "Does not protect" in card and "5 texts" in card and f"Protects {told['tokens']} of {told['tokens']} tokens" in card
    )
    assert not target.with_suffix(suffix + ".part").exists()


def test_private_tokens_that_stay_are_counted_whatever_keeps_them(tmp_path: Path, model_folder: Path) -> None:
    source, target = tmp_path / "notes.jsonl", tmp_path / "hidden.jsonl"
    source.write_text(
        "".join(json.dumps({"text": t, "label": 0}) + "\n" for t in ("4 1 1 7 2 9 0", "7 9 1 2 3 " + TEXTS[0]))
    )
    options = ("--model", model_folder, *OPTIONS, "--keep-numbers")
    done = rasura_command("protect", "ghost", source, target, *options)
    words = len(TEXTS[0].split())
    assert f"2 texts, {12 + words} tokens: " in done.stdout and "12 unchanged" in done.stdout, done.stdout + done.stderr
    assert "unchanged: 0 have no substitute, the settings keep the others" in done.stdout
    card = target.with_suffix(".card.md").read_text()
    assert "| tokens left unchanged | 12, of which 0 have no" in card and f"Protects {words} of {12 + words} tokens" in card
    reported = [json.loads(line) for line in target.with_suffix(".report.jsonl").read_text().splitlines()]
    assert [len(row["unchanged"]) for row in reported] == [7, 5]
    source.write_text(json.dumps({"text": "4 1 1 7 2 9 0", "label": 0}) + "\n")
    rasura_command("protect", "ghost", source, tmp_path / "plain.jsonl", *options)
    assert "Protects nothing: no token was replaced" in (tmp_path / "plain.card.md").read_text()


def test_an_interrupted_protection_resumes_without_doubles(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = notes(tmp_path, 7)
    settings = ShadowSettings(k=12, overlap=0.5, language=None)
    monkeypatch.setattr(ghost_file, "CHUNK", 2)
    whole = ghost_file.obfuscate_file(source, tmp_path / "whole.jsonl", model=str(model_folder), shadows=settings)

    class Stopped(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done == 4:
            raise Stopped

    with pytest.raises(Stopped):
        ghost_file.obfuscate_file(source, tmp_path / "cut.jsonl", model=str(model_folder), shadows=settings, progress=stop)
    part = tmp_path / "cut.jsonl.part"
    part.write_text(part.read_text() + '{"text": "half a r')
    with pytest.raises(InputError, match="other data or settings"):
        ghost_file.obfuscate_file(source, tmp_path / "cut.jsonl", model=str(model_folder), shadows=settings, seed=1)
    again = ghost_file.obfuscate_file(source, tmp_path / "cut.jsonl", model=str(model_folder), shadows=settings)
    assert (whole.resumed, again.resumed) == (0, 4)
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_data_set_is_mapped(model_folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    victim = load(model_folder, "classification")
    hide = GhostObfuscator(victim, shadows=ShadowSettings(k=12, overlap=0.5, language=None))
    rows = datasets.Dataset.from_dict({"text": list(TEXTS), "label": [0] * len(TEXTS)}).map(hide, batched=True)
    assert rows["label"] == [0] * len(TEXTS)
    assert all(new != old.lower() for new, old in zip(rows["text"], TEXTS))
    assert all(row[0] == victim.vocabulary.prefix[0] for row in rows["input_ids"])


@pytest.mark.slow
def test_bad_input_is_refused_in_one_line(tmp_path: Path, model_folder: Path) -> None:
    source, common = notes(tmp_path, 2), ("--model", model_folder, *OPTIONS)
    assert "unknown file type" in refused("protect", "ghost", source, tmp_path / "x.txt", *common)
    assert "already exists" in refused("protect", "ghost", source, source, *common)
    unknown = rasura_command("protect", "ghosts", source, tmp_path / "x.csv", *common)
    assert unknown.returncode == 2 and unknown.stderr.count("Did you mean 'ghost'") == 1
    assert "0 < k" in refused("protect", "ghost", source, tmp_path / "x.csv", "--model", model_folder, "--k", "0")
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "alpha " * 3000}))
    assert "the model takes" in refused_process("protect", "ghost", tmp_path / "long.jsonl", tmp_path / "x.csv", *common)

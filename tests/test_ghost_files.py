"""Files of training text behind GHOST: the table's settings, pairs that an ordinary trainer takes, names of labels."""

from __future__ import annotations

import csv
import errno
import json
import random
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import transformers
from audit_setting import TEXTS, model_folder
from commands import refused
from safetensors.torch import load_file, save_file

from rasura.cli.ghost import Rate
from rasura.core.interfaces import InputError
from rasura.data.columns import Columns
from rasura.data.text import encode, load_examples
from rasura.ghost.selection_settings import Selection
from rasura.ghost.table import SCHEMA, ShadowSettings, ShadowTable
from rasura.registry import parse_defense
from rasura.runs import ghost_file
from rasura.runs.ghost_obfuscator import GhostObfuscator
from rasura.victims.loading import load

__all__ = ["model_folder"]

SETTINGS = ShadowSettings(k=12, overlap=0.5, language=None)


def written(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_table_of_other_settings_is_refused_and_its_own_are_taken(tmp_path: Path, model_folder: Path) -> None:
    source = written(tmp_path / "notes.jsonl", [{"text": t, "label": 0} for t in TEXTS])
    table, model = tmp_path / "table.safetensors", str(model_folder)
    first = ghost_file.obfuscate_file(source, tmp_path / "a.jsonl", model=model, table=table, shadows=SETTINGS)
    again = ghost_file.obfuscate_file(source, tmp_path / "b.jsonl", model=model, table=table)
    assert again.settings == first.settings and "k 12 up to 170, overlap 0.5" in again.settings
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    line = refused("protect", "ghost", source, tmp_path / "c.jsonl", "--model", model, "--table", table, "--group", "8")
    assert "made with other settings (group 1, requested 8)" in line
    with pytest.raises(InputError, match=r"k 12, requested 70.*language None, requested en"):
        ghost_file.obfuscate_file(source, tmp_path / "c.jsonl", model=model, table=table, shadows=ShadowSettings())
    assert not (tmp_path / "c.jsonl.part").exists()


def test_the_card_names_the_audit_of_this_file_and_figures_of_no_other_settings(tmp_path: Path, model_folder: Path) -> None:
    """A file in groups of two had the figures of groups of eight, and the command audited another model without groups."""
    source = written(tmp_path / "my notes.jsonl", [{"Satz": t, "Art": 0} for t in TEXTS])
    for group, others in ((2, ("groups of 8", " 13 %")), (8, ())):
        shadows = ShadowSettings(k=12, overlap=0.5, language=None, group=group, keep_numbers=True)
        made = ghost_file.obfuscate_file(
            source, tmp_path / f"{group}.jsonl", model=str(model_folder), shadows=shadows, beam=2,
            columns=Columns("Satz", label="Art"),
        )  # fmt: skip
        card = made.card.read_text()
        assert "was not measured with these settings" in card and not any(figure in card for figure in others)
        (line,) = [line.strip() for line in card.splitlines() if line.strip().startswith("rasura audit")]
        words = shlex.split(line)
        told = dict(zip(words[3::2], words[4::2], strict=True))
        assert words[2] == str(source) and told["--model"] == str(model_folder) and told["--text-column"] == "Satz"
        assert told["--attack"] == "ghost-lattice,ghost-generation" and "--reference" in told
        (part,) = parse_defense(told["--defense"])
        assert part.mechanism.parameters == {**asdict(shadows), **asdict(Selection(beam=2))}
    shadows = ShadowSettings(language=None)
    assert "was not measured with these settings" in "".join(ghost_file._risk(ghost_file._defense(asdict(shadows), 1)))
    for published, figures in (
        (ShadowSettings(), "52 %"),
        (ShadowSettings(group=8), "13 %"),
        (ShadowSettings(group=16), "8 %"),
    ):
        said = "".join(ghost_file._risk(ghost_file._defense(asdict(published), 1)))
        assert figures in said and "not measured" not in said


@pytest.mark.parametrize("group", [1, 4])
def test_with_groups_no_written_file_depends_on_more_than_the_groups(tmp_path: Path, model_folder: Path, group: int) -> None:
    """The report held the error against the private tokens at full precision, by which a guess of them was confirmed."""
    shadows = ShadowSettings(k=12, overlap=0.4, grow=4, max_k=40, language=None, group=group, choices=6)
    victim = load(model_folder, "classification")
    words, table = victim.vocabulary, GhostObfuscator(victim, shadows=replace(shadows, group=4)).table
    read = [t for t in range(words.size) if len(table.of(t)) and words.encode(words.decode([t])) == [t]]
    pairs = []
    for number in table.groups[read].unique().tolist():
        members = sorted((t for t in read if table.groups[t] == number), key=lambda t: int(table.relaxed[t]))
        pairs.append((members[0], members[-1]))
    assert sum(a != b for a, b in pairs) >= 8 and any(table.relaxed[a] != table.relaxed[b] for a, b in pairs)
    files = []
    for side in (0, 1):
        rows = [{"text": words.decode([p[side] for p in pairs[k : k + 6]]), "label": 0} for k in range(0, len(pairs), 6)]
        source, target = written(tmp_path / "notes.jsonl", rows), tmp_path / str(side) / "hidden.jsonl"
        target.parent.mkdir()
        made = ghost_file.obfuscate_file(source, target, model=str(model_folder), shadows=shadows)
        assert made.weak > 0 or group == 1
        files.append({path.name: path.read_bytes() for path in target.parent.iterdir()})
        said = made.card.read_text()
        assert ("confirm a guess" in said) == (group == 1) and ("depends on its group alone" in said) == (group > 1)
    assert files[0].keys() == {"hidden.jsonl", "hidden.report.jsonl", "hidden.card.md"}
    assert (files[0] == files[1]) == (group > 1), "published GHOST tells them apart"


def test_a_place_that_cannot_be_written_is_refused_before_the_search(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def searched(*args: object) -> ShadowTable:
        raise AssertionError("the search was begun")

    monkeypatch.setattr("rasura.runs.ghost_obfuscator.made_for", searched)
    source, nowhere = written(tmp_path / "notes.jsonl", [{"text": t, "label": 0} for t in TEXTS]), tmp_path / "none"
    for target, table in ((tmp_path / "a.jsonl", nowhere / "table.safetensors"), (nowhere / "a.jsonl", None)):
        with pytest.raises(InputError, match=r"none.* cannot be written"):
            ghost_file.obfuscate_file(source, target, model=str(model_folder), table=table, shadows=SETTINGS)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_run_is_not_resumed_under_other_weights_behind_the_same_embedding(tmp_path: Path, model_folder: Path) -> None:
    """The choice of substitutes depends on the hidden states of all layers."""
    model = shutil.copytree(model_folder, tmp_path / "model")
    source = written(tmp_path / "notes.jsonl", [{"text": t, "label": 0} for t in TEXTS])
    target = tmp_path / "hidden.jsonl"

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ghost_file.obfuscate_file(source, target, model=str(model), shadows=SETTINGS, progress=stop)
    weights = load_file(model / "model.safetensors")
    name = next(n for n in weights if n.endswith("intermediate.dense.weight"))
    save_file({**weights, name: weights[name] * 1.5}, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="begun with other data or settings"):
        ghost_file.obfuscate_file(source, target, model=str(model), shadows=SETTINGS)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert ghost_file.obfuscate_file(source, target, model=str(model), shadows=SETTINGS).rows == len(TEXTS)


@pytest.mark.parametrize("beside", ["report.jsonl", "card.md"])
def test_no_file_beside_the_target_is_written_over(tmp_path: Path, model_folder: Path, beside: str) -> None:
    kept = written(tmp_path / f"notes.{beside}", [{"text": t, "label": 0} for t in TEXTS])
    text = kept.read_bytes()
    source = kept if beside.endswith("jsonl") else written(tmp_path / "source.jsonl", [{"text": t} for t in TEXTS])
    with pytest.raises(InputError, match=f"notes.{beside} already exists"):
        ghost_file.obfuscate_file(source, tmp_path / "notes.jsonl", model=str(model_folder), shadows=SETTINGS)
    assert kept.read_bytes() == text and not (tmp_path / "notes.jsonl").exists()


def test_a_damaged_table_is_refused(tmp_path: Path, model_folder: Path) -> None:
    victim = load(model_folder, "classification")
    path = tmp_path / "table.safetensors"
    GhostObfuscator(victim, table=path, shadows=SETTINGS)
    whole = ShadowTable.load(path)
    about = {
        "schema": str(SCHEMA),
        "model": whole.model,
        "tokenizer": whole.tokenizer,
        "settings": json.dumps({**vars(SETTINGS), "k": "12"}),
    }
    save_file(load_file(path), path, metadata=about)
    with pytest.raises(InputError, match="its settings cannot be read"):
        ShadowTable.load(path)
    about["settings"] = json.dumps(vars(SETTINGS))
    for name, bad in (("ids", whole.ids + 10_000), ("offsets", whole.offsets.flip(0)), ("k", whole.k.float())):
        save_file({**load_file(path), name: bad.contiguous()}, tmp_path / "bad.safetensors", metadata=about)
        with pytest.raises(InputError, match="its tensors are not those of a shadow table"):
            ShadowTable.load(tmp_path / "bad.safetensors")


def test_a_table_of_another_tokenizer_is_refused(tmp_path: Path, model_folder: Path) -> None:
    """Two tokenizers of one size over one embedding: the table says of an id what is true of another word."""
    victim, path = load(model_folder, "classification"), tmp_path / "table.safetensors"
    GhostObfuscator(victim, table=path, shadows=SETTINGS)
    GhostObfuscator(victim, table=path)
    plain = victim.vocabulary
    turned = replace(plain, decode=lambda ids: plain.decode([max(plain.special_ids) + 1 if i == 9 else i for i in ids]))
    other = replace(victim, vocabulary=turned)
    with pytest.raises(InputError, match="made for another tokenizer"):
        GhostObfuscator(other, table=path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_pairs_are_trained_on_by_a_plain_trainer(suffix: str, tmp_path: Path, model_folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows: list[dict[str, object]] = [{"text": TEXTS[0], "label": 0}]
    rows += [{"text": a, "text_pair": b, "label": k % 2} for k, (a, b) in enumerate(zip(TEXTS, TEXTS[1:] + TEXTS[:1]))]
    source = written(tmp_path / "pairs.jsonl", rows)
    target = tmp_path / f"hidden{suffix}"
    found = ghost_file.obfuscate_file(source, target, model=str(model_folder), shadows=SETTINGS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    kind = {".jsonl": "json", ".parquet": "parquet"}[suffix]
    data = datasets.load_dataset(kind, data_files=str(target), split="train", cache_dir=str(tmp_path / "cache"))
    for row, original in zip(data, rows, strict=True):
        private = tokenizer(original["text"], original.get("text_pair"))
        assert row["token_type_ids"] == private["token_type_ids"] and len(row["input_ids"]) == len(private["input_ids"])
        special = set(tokenizer.all_special_ids)
        for new, old in zip(row["input_ids"], private["input_ids"]):
            assert (new == old) == (old in special)
        assert row["text"].split() == tokenizer.decode(row["input_ids"]).split("[SEP]")[0].split()[1:]
    assert found.tokens == sum(sum(i not in special for i in r["input_ids"]) for r in data)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(model_folder)
    before = model.bert.embeddings.word_embeddings.weight.detach().clone()
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=3, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, learning_rate=0.1, weight_decay=0.0,
    )  # fmt: skip
    collator = transformers.DataCollatorWithPadding(tokenizer)
    transformers.Trainer(model, arguments, train_dataset=data, data_collator=collator).train()
    assert not torch.equal(before, model.bert.embeddings.word_embeddings.weight)
    batch = encode(load_examples(target), tokenizer, "classification", max_length=64, num_labels=2)
    assert batch.token_type_ids is not None
    assert [list(batch.ids(k)) for k in range(len(data))] == [row["input_ids"] for row in data]


def test_a_data_set_of_pairs_is_mapped(model_folder: Path) -> None:
    hide = GhostObfuscator(load(model_folder, "classification"), shadows=SETTINGS)
    out = hide({"text": [TEXTS[0], TEXTS[1]], "text_pair": [TEXTS[1], None]})
    assert out["token_type_ids"][0].count(1) > 0 and set(out["token_type_ids"][1]) == {0}
    assert out["text_pair"][0] and len(out["input_ids"][0]) == len(out["token_type_ids"][0])


def test_a_data_set_is_mapped_row_by_row_too(model_folder: Path) -> None:
    """``map`` without ``batched`` gives one row, whose text was taken for as many texts as it has characters."""
    datasets = pytest.importorskip("datasets")
    hide = GhostObfuscator(load(model_folder, "classification"), shadows=SETTINGS)
    rows = datasets.Dataset.from_dict({"text": TEXTS[:2], "text_pair": [TEXTS[1], None]})
    out = rows.map(hide)
    assert len(out) == 2 and all(isinstance(text, str) for text in out["text"])
    for one, given in zip(out, rows):
        alone = hide({name: [value] for name, value in given.items()})
        assert one["text"] == alone["text"][0] and one["input_ids"] == alone["input_ids"][0]


def test_a_pair_that_is_too_long_together_is_refused_before_the_first_row(tmp_path: Path, model_folder: Path) -> None:
    rows: list[dict[str, str]] = [{"text": "alpha"}] * 40 + [{"text": "alpha " * 40, "text_pair": "bravo " * 40}]
    source = written(tmp_path / "long.jsonl", rows)
    with pytest.raises(InputError, match=r"long.jsonl, row 41: the text has 83 tokens, the model takes 64"):
        ghost_file.obfuscate_file(source, tmp_path / "x.jsonl", model=str(model_folder), shadows=SETTINGS)
    assert not (tmp_path / "x.jsonl.part").exists()


def test_names_of_labels_go_along(tmp_path: Path, model_folder: Path) -> None:
    names = ["spam", "ham", "spam"]
    source = written(tmp_path / "notes.jsonl", [{"text": t, "label": n} for t, n in zip(TEXTS, names)])
    ghost_file.obfuscate_file(source, tmp_path / "hidden.csv", model=str(model_folder), shadows=SETTINGS)
    hidden = load_examples(tmp_path / "hidden.csv")
    assert hidden.label_names == ("spam", "ham") and [e.label for e in hidden] == [0, 1, 0]
    other = written(tmp_path / "test.jsonl", [{"text": TEXTS[0], "label": "ham"}])
    assert load_examples(other, label_names=hidden.label_names)[0].label == 1


def test_the_rate_is_told_from_the_first_rows_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0])
    monkeypatch.setattr("rasura.cli.ghost.time.monotonic", lambda: next(clock))
    rate = Rate()
    assert rate(32, 100) == "starting"
    assert rate(52, 100) == "2.00 rows/s, 0.4 minutes left"


def test_every_sixteen_rows_are_kept(tmp_path: Path, model_folder: Path) -> None:
    random.seed(0)
    source = written(tmp_path / "notes.jsonl", [{"text": random.choice(TEXTS), "label": 0} for _ in range(40)])
    seen: list[tuple[int, int]] = []
    part = tmp_path / "h.jsonl.part"
    part.touch(0o644)  # as of a run that was ended before its first line

    def stop(done: int, total: int) -> None:
        seen.append((done, total))
        assert part.stat().st_mode & 0o777 == 0o600
        if done == 16:
            with pytest.raises(InputError, match=r"h.jsonl.part is being written by another run"):
                ghost_file.obfuscate_file(source, tmp_path / "h.jsonl", model=str(model_folder), shadows=SETTINGS)
        if done == 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ghost_file.obfuscate_file(source, tmp_path / "h.jsonl", model=str(model_folder), shadows=SETTINGS, progress=stop)
    assert seen == [(0, 40), (16, 40), (32, 40)] and len(part.read_text().splitlines()) == 33
    kept = part.read_text()
    part.write_text(kept.replace(f'"table": {SCHEMA}', f'"table": {SCHEMA - 1}'))  # by a version whose tables differ
    with pytest.raises(InputError, match="begun with other data or settings"):
        ghost_file.obfuscate_file(source, tmp_path / "h.jsonl", model=str(model_folder), shadows=SETTINGS)
    part.write_text(kept)
    again = ghost_file.obfuscate_file(source, tmp_path / "h.jsonl", model=str(model_folder), shadows=SETTINGS)
    assert (again.resumed, again.rows) == (32, 40)


def test_a_target_is_there_whole_or_not_at_all(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills while the target is written; with more room, the same command goes on."""
    source, target = written(tmp_path / "notes.jsonl", [{"text": t, "label": 0} for t in TEXTS]), tmp_path / "out.csv"

    def full(self: csv.DictWriter[str], row: Mapping[str, object]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def run() -> ghost_file.Protected:
        return ghost_file.obfuscate_file(source, target, model=str(model_folder), shadows=SETTINGS)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(csv.DictWriter, "writerow", full)
        run()
    assert not target.exists()
    found = run()
    assert found.rows == len(TEXTS) == len(target.read_text().splitlines()) - 1
    assert target.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.jsonl", "out.card.md", "out.csv", "out.report.jsonl"]

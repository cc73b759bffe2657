"""Data files as people have them: Excel's, exports, damaged ones; and what is said of them, never quoting a text."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from audit_setting import TEXTS, model_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from rasura.core.interfaces import InputError
from rasura.data import lines as line_reader
from rasura.data.columns import Columns
from rasura.data.lines import Lines
from rasura.data.text import Example, encode, load_examples
from rasura.runs.audit import Audit
from rasura.runs.fields import typed
from rasura.runs.plans import Plan, from_toml
from rasura.runs.service_plan import ServicePlan
from rasura.runs.train_plan import TrainPlan
from rasura.runs.training import Training
from rasura.studies.files import load_study
from rasura.victims.recipe import Recipe

__all__ = ["model_folder"]

GERMAN = [("Größe: 1,80 m; „gut“", "negativ"), ('Sie sagte "ja", dann „nein“', "positiv"), ("Übel\nzweite Zeile", "negativ")]


def table(rows: Sequence[tuple[str, ...]], separator: str = ";", end: str = "\r\n") -> str:
    file = io.StringIO()
    csv.writer(file, delimiter=separator, lineterminator=end).writerows(rows)
    return file.getvalue()


@pytest.mark.parametrize("separator", [";", ",", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_excel_s_csv_simply_works(tmp_path: Path, encoding: str, separator: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "notizen.csv"
    # Excel leaves empty rows and columns behind.
    rows = [("Nr", "Text", "Kategorie", ""), *((str(k), *r, "") for k, r in enumerate(GERMAN)), ("", "", "", "")]
    path.write_bytes(table(rows, separator).encode(encoding))
    with caplog.at_level(logging.INFO, "rasura.data"):
        found = load_examples(path)
    assert [(e.text, e.label) for e in found] == [(t, int(n == "positiv")) for t, n in GERMAN]
    assert found.label_names == ("negativ", "positiv")
    (line,) = caplog.messages
    assert "text from column 'Text', label from column 'Kategorie', labels: 0 = negativ, 1 = positiv" in line
    assert ("read as cp1252" in line, "read as UTF-16-LE" in line) == (encoding == "cp1252", encoding == "utf-16")
    assert {";": "separator semicolon" in line, "\t": "separator tab" in line, ",": "separator" not in line}[separator]


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("gb2312", "患者李小明住院治疗三天"),
        ("big5", "患者李小明住院治療三天"),
        ("euc_kr", "환자는 병원에 입원했다"),
        ("cp1251", "Пациент Иванов поступил в больницу"),
        ("koi8_r", "Пациент Иванов поступил в больницу"),
        ("cp1253", "Η Μαρία ζει στην Αθήνα"),
        ("cp1250", "Pacjent Łukasz Żółć zgłosił ból"),
        ("mac_roman", "Der Müller heißt Jürgen"),
        ("mac_roman", "El niño comió mañana en Málaga"),
    ],
)
def test_text_of_another_encoding_is_not_read_as_western(tmp_path: Path, encoding: str, text: str) -> None:
    """It was read as cp1252: other letters, of which each was private text to the audit."""
    (tmp_path / "notes.csv").write_bytes(f"text,label\n{text},1\n".encode(encoding))
    with pytest.raises(InputError, match="not text of a Western European language; save it as UTF-8") as refused:
        load_examples(tmp_path / "notes.csv")
    assert text.encode(encoding).decode("cp1252") not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "Öl", "été", "Die Größe der Tür: „fünf m²“ und 3 m³ Öl, 20 °C für 20 €", "L’été, « l'élève » naïf a mangé à L’HAŸ",
        "¿Qué pasó? ¡El niño añadió 1ª y 2º!", "Não há ações nem corações", "På ö är æbler; Åse får øl og smørrebrød",
        "Hääyöaie, jäätelö ja jäääär", "W/m²K, ½ cup, 5±2 µg ©2020 – “yes”…", "ÉCOLE ET ÉTÉ, MÜLLER, ŒUVRE", "col·legi",
    ],
)  # fmt: skip
def test_western_text_in_cp1252_is_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes.jsonl").write_bytes(json.dumps({"text": text}, ensure_ascii=False).encode("cp1252"))
    assert [e.text for e in load_examples(tmp_path / "notes.jsonl")] == [text]


def test_a_plain_file_needs_no_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.csv").write_text("text,label\nÄrger und Öl,1\n", encoding="utf-8")
    with caplog.at_level(logging.INFO, "rasura.data"):
        assert load_examples(tmp_path / "a.csv") == [Example("Ärger und Öl", None, 1)]
    assert caplog.messages == []


def test_other_ways_to_write_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("sep=|\ntext|label\na, b; c|1\n")
    assert load_examples(tmp_path / "a.csv")[0].text == "a, b; c"
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one", "label": 0}, {"text": "two", "label": 1}], indent=1))
    assert [e.text for e in load_examples(tmp_path / "a.json")] == ["one", "two"]
    (tmp_path / "a.tsv").write_text("premise\thypothesis\tlabel\na\tb\t0\n")
    assert load_examples(tmp_path / "a.tsv") == [Example("a", "b", 0)]
    (tmp_path / "mac.csv").write_bytes(b"text,label\rone,0\rtwo,1\r")
    assert [e.label for e in load_examples(tmp_path / "mac.csv")] == [0, 1]


def test_columns_are_chosen_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("Frage,Antwort,Note,label\nw1,w2,1,kind\n")
    found = load_examples(tmp_path / "a.csv", columns=Columns("frage", "Antwort", "Note"))
    assert found == [Example("w1", "w2", 1)]
    assert load_examples(tmp_path / "a.csv", columns=Columns("Antwort", label="none"))[0].label is None
    for columns, says in ((Columns("Text"), "no column text named 'Text'"), (Columns("Frage", label="x"), "no column 'x'")):
        with pytest.raises(InputError, match=says):
            load_examples(tmp_path / "a.csv", columns=columns)


def test_labels_of_two_files_mean_the_same(tmp_path: Path) -> None:
    train, test = tmp_path / "train.csv", tmp_path / "test.csv"
    train.write_text("text,label\na,pos\nb,neg\n")
    test.write_text("text,label\nc,neg\nd,pos\n")
    names = load_examples(train).label_names
    assert [e.label for e in load_examples(test, label_names=names)] == [1, 0]
    test.write_text("text,label\nc,neg\nd,other\n")
    with pytest.raises(InputError, match=r"row 2: the label does not occur in the other file: pos, neg"):
        load_examples(test, label_names=names)
    test.write_text("text,label\nc,1\n")
    with pytest.raises(InputError, match="row 1: the label is a number; expected, as in the other file, pos, neg"):
        load_examples(test, label_names=names)
    train.write_text("text,label\na,0\n")
    test.write_text("text,label\nc,neg\n")
    with pytest.raises(InputError, match="row 1: the label is text; expected a number"):
        load_examples(test, label_names=load_examples(train).label_names)


def test_names_are_stored_with_the_model_and_read_by_them(tmp_path: Path, model_folder: Path) -> None:
    rows = [(f"{t} w{k}", ("ham", "spam")[k % 2]) for k, t in enumerate(TEXTS * 2)]
    (tmp_path / "train.csv").write_text(table([("text", "label"), *rows], ",", "\n"))
    plan = TrainPlan(str(tmp_path / "train.csv"), model=str(model_folder), recipe=Recipe(epochs=1, batch_size=4))
    (result,) = Training(plan, tmp_path / "run").run()
    assert result["label_names"] == ["ham", "spam"]
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["label_names"] == ["ham", "spam"]
    model = str(tmp_path / "run" / "none-0" / "model")
    (tmp_path / "other.csv").write_text("text,label\na,spam\nb,ham\n")
    other = load_examples(tmp_path / "other.csv", model=model)
    assert [e.label for e in other] == [1, 0] and other.label_names == ("ham", "spam")
    (tmp_path / "other.csv").write_text("text,label\na,spam\nb,eggs\n")
    with pytest.raises(InputError, match=r"row 2: the label is not one of the model's classes \(ham, spam\)"):
        load_examples(tmp_path / "other.csv", model=model)


def test_a_limit_reads_no_more_than_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "endless.csv"
    with path.open("w") as file:
        file.write("text,label\n")
        file.truncate(1 << 33)  # 8 GiB of zero bytes that are never reached
        file.seek(11)
        file.write(("x" * 997 + ",0\n") * 3000)
    assert len(load_examples(path, limit=3)) == 3
    with pytest.raises(InputError, match="zero bytes near line"):
        load_examples(path)
    monkeypatch.setattr(line_reader, "MAX_LINE", 1000)
    (tmp_path / "a.jsonl").write_text('{"text": "' + "x" * 2000 + '"}\n')
    with pytest.raises(InputError, match="line 1 has more than 1000 characters"):
        load_examples(tmp_path / "a.jsonl")


def test_damaged_utf8_is_not_taken_for_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("text\nGröße für Müller\n".encode() + b"\xff\n")
    with pytest.raises(InputError, match="read as UTF-8, but bytes after line 1 are not valid in it"):
        load_examples(tmp_path / "a.csv")


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "cp1252"])
def test_pieces_cut_no_character(tmp_path: Path, piece: int, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_reader, "PIECE", max(piece, 2) if encoding == "utf-16" else piece)
    text = "abc\r\nGröße\nÜbel €\rende" if encoding != "utf-8" else "abc\r\nGröße\n😀 Übel €\rende"
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert "".join(Lines(tmp_path / "a.txt")) == text


LATIN = st.characters(min_codepoint=0x20, max_codepoint=0xFF, blacklist_characters="".join(map(chr, range(0x7F, 0xA0))))
ANY = st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff")


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / f"round.{data.draw(st.sampled_from(['csv', 'jsonl', 'parquet']))}"
    encoding = data.draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "latin-1"]))
    latin = encoding == "latin-1" and path.suffix == ".csv"
    letters = st.text(LATIN if latin else ANY, min_size=1, max_size=30)
    letters = letters.map(" ".join) if latin else letters  # letters at random would be words of no Western language
    texts = data.draw(st.lists(letters.filter(str.strip), min_size=1, max_size=6))
    rows = [{"text": t, "label": k % 3} for k, t in enumerate(texts)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_bytes("".join(json.dumps(r, ensure_ascii=encoding == "latin-1") + "\n" for r in rows).encode(encoding))
    else:
        separator = data.draw(st.sampled_from([",", ";", "\t"]))
        whole = table([("text", "label"), *((t, str(k % 3)) for k, t in enumerate(texts))], separator)
        content = whole.encode(encoding)
        if encoding == "latin-1" and not content.isascii():
            try:  # letters that happen to be UTF-8 as well are read as such
                content.decode("utf-8")
                return
            except UnicodeDecodeError:
                if any(not c.isascii() for c in content.decode("utf-8", errors="ignore")):
                    return
        path.write_bytes(content)
    found = load_examples(path)
    assert [(e.text, e.label) for e in found] == [(r["text"], r["label"]) for r in rows]
    assert load_examples(path, limit=1) == list(islice(found, 1))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_files_raise_nothing_but_input_errors(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / f"damaged.{data.draw(st.sampled_from(['csv', 'jsonl', 'json', 'parquet']))}"
    rows = [{"text": f"{SECRET} {k}", "text_pair": "ü", "label": k, "input_ids": [1, 2]} for k in range(3)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        path.write_text(table([("text", "label"), *((str(r["text"]), str(r["label"])) for r in rows)]))
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows)))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        content[place : place + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=12))
    path.write_bytes(bytes(content))
    try:
        load_examples(path)
    except InputError as error:
        assert "\n" not in str(error) and SECRET not in str(error)


# --- private text in messages

SECRET = "Zyxwvut"
NOTE = f"{SECRET} owes the clinic money"

BAD = {
    "headerless.csv": f"{NOTE},1\n{NOTE},0\n",
    "headerless.tsv": f"{NOTE}\t{NOTE}\n",
    "quote.csv": f'text,label\n"{NOTE},1\n',
    "cells.csv": f"text,label\n{NOTE},{NOTE},1\n",
    "mixed.csv": f"text,label\n{NOTE},1\n{NOTE},yes\n",
    "range.csv": f"text,label\n{NOTE},70000\n",
    "below.csv": f"text,label\n{NOTE},-1\n",
    "missing.csv": f"text,label\n{NOTE},\n",
    "nan.csv": f"text,label\n{NOTE},nan\n",
    "long.csv": f"text,label\n{NOTE * 400},0\n",
    "label.csv": f"text,label\nx,{NOTE * 9}\n",
    "two.csv": f"{NOTE},{NOTE}\n",
    "cut.jsonl": f'{{"text": "{NOTE}", "label": 1',
    "escape.jsonl": f'{{"text": "{NOTE} \\ud800", "label": 1}}',
    "keys.jsonl": json.dumps({NOTE: 1}),
    "list.jsonl": json.dumps([NOTE]),
    "ids.jsonl": json.dumps({"text": NOTE, "label": 0, "input_ids": NOTE}),
    "many.jsonl": json.dumps({"text": NOTE, "label": 0, "input_ids": [99999]}),
    "pair.jsonl": json.dumps({"text": NOTE, "text_pair": NOTE * 90, "label": 0}),
    "broken.json": f'[{{"text": "{NOTE}"}},',
    "text.parquet": NOTE,
    "zero.csv": f"text\n{NOTE}\0\n",
    "empty.jsonl": json.dumps({"text": NOTE, "label": 0}) + '\n{"text": " "}\n',
}


def test_a_column_of_words_without_a_header_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "words.csv"
    path.write_text(f"{SECRET}\nmet\nbravo\n")
    with pytest.raises(InputError, match="one column, whose first row may be text") as left:
        load_examples(path)
    assert SECRET not in str(left.value)


@pytest.mark.parametrize("name", BAD)
def test_no_message_quotes_a_text(
    name: str, tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from rasura import cli

    path = tmp_path / name
    path.write_text(BAD[name])
    monkeypatch.chdir(tmp_path)
    commands = [["audit", path, "--out", tmp_path / "a"]]
    if name in ("long.csv", "below.csv", "two.csv", "pair.jsonl"):
        commands += [
            ["train", path, "--out", tmp_path / "t"], ["calibrate", path, "--out", tmp_path / "c"],
            ["protect", "ghost", path, tmp_path / "hidden.jsonl", "--language", "none"],
            ["membership", model_folder, "--base", model_folder, "--members", path, "--non-members", path],
        ]  # fmt: skip
        if name == "below.csv":
            del commands[3]  # whose labels are as they come
    for command in commands:
        model = [] if command[0] == "membership" else ["--model", model_folder]
        monkeypatch.setattr("sys.argv", ["rasura", *map(str, [*command, *model])])
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        assert left.value.code == 2, (command, said.err)
        assert len(said.err.strip().splitlines()) == 1 and (path.name in said.err or command[0] == "membership"), said.err
        for out in (said.out, said.err, caplog.text):
            assert SECRET not in out and "Traceback" not in out
        assert not any(SECRET in p.name for p in tmp_path.rglob("*"))


def test_the_command_says_how_a_file_was_read(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rasura import cli

    path = tmp_path / "notizen.csv"
    path.write_bytes(
        table([("Nr", "Vermerk", "Art"), *((str(k), t, "äöü"[k]) for k, t in enumerate(TEXTS[:3]))]).encode("cp1252")
    )
    # With too few classes the command ends after it has read the file.
    options = ["--text-column", "Vermerk", "--label-column", "Art", "--num-labels", "2", "--out", tmp_path / "run"]
    monkeypatch.setattr("sys.argv", ["rasura", *map(str, ["audit", path, "--model", model_folder, *options])])
    with pytest.raises(SystemExit) as left:
        cli.main()
    first, second = capsys.readouterr().err.strip().splitlines()
    line = "read as cp1252, separator semicolon, text from column 'Vermerk', label from column 'Art', labels: 0 = ä, 1 = ö"
    assert left.value.code == 2 and line in first and "row 3: label 2 is outside" in second
    plan = Plan(model=str(model_folder), data=str(path), text_column="Vermerk", label_column="Art", attacks=("blind",))
    assert Audit(plan).plan.canonical()["label_names"] == ["ä", "ö", "ü"]


def test_columns_that_are_not_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """QNLI's questions were left out without a word, and the audit was of the answers alone."""
    caplog.set_level("INFO", "rasura.data")
    path = tmp_path / "a.csv"
    path.write_text("idx,question,sentence,label\n0,who,he,1\n")
    assert [(e.text, e.text_pair) for e in load_examples(path)] == [("who", "he")]
    load_examples(path, columns=Columns(text="sentence"))
    path.write_text("id,text,author,label\n0,who,Ada,1\n")
    load_examples(path)
    path.write_text(",text,\nAda,who,x\n")
    load_examples(path)
    qnli, one, other, bare = (record.getMessage() for record in caplog.records)
    assert "text from column 'question', pair from column 'sentence'" in qnli and "not read" not in qnli
    assert one.endswith("not read: question") and other.endswith("not read: author")
    assert bare.endswith("not read: 2 without a name"), "it said: not read: none"


def test_keys_that_only_later_rows_have_are_named_when_they_are_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rasura.data")
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two", "label": 1, "answer": "three"}\n{"text": "four", "class": 0}\n')
    assert [e.label for e in load_examples(path)] == [None, 1, None]
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.endswith("not read: answer, class")


def test_a_text_without_label_or_out_of_range_is_named_by_its_row(tmp_path: Path, model_folder: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    (tmp_path / "a.csv").write_text("text,label\na,0\nb,\nc,5\nd,-1\n")
    rows = load_examples(tmp_path / "a.csv")
    for k, says in ((1, "row 2 has no label"), (2, "row 3: label 5 is outside"), (3, "row 4: label -1 is below 0")):
        with pytest.raises(InputError, match=f"a.csv, {says}"):
            encode([rows[0], rows[k]], tokenizer, "classification", max_length=8, num_labels=2)


# --- plans and studies


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('limit = "3"', "limit is the text '3'; expected a whole number"),
        ("limit = true", "limit is the truth value True; expected a whole number"),
        ("limit = 2.5", "limit is the number 2.5; expected a whole number"),
        (f"seed = {10**30}", "seed is a number beyond 64 bits"),
        ("limit = -1", "limit is -1; expected at least 1"),
        ("truncate = 1", "truncate is the number 1; expected true or false"),
        ("attacks = [1]", "attacks is the number 1; expected text"),
        ('batch_sizes = ["1"]', "batch_sizes is the text '1'; expected a whole number"),
        ("data = 3", "data is the number 3; expected text"),
        ("reference = []", "reference is a list; expected text"),
        ("entries = nan", "NaN or infinity"),
        ("num_labels = {a = 1}", "num_labels is a table; expected a whole number"),
        ("attakcs = []", "did you mean attacks"),
        ("x = " + "[" * 5000, "not valid TOML"),
    ],
)
def test_plans_of_wrong_types_are_refused(tmp_path: Path, body: str, says: str) -> None:
    (tmp_path / "plan.toml").write_text(body)
    with pytest.raises(InputError, match=r"expected|mean|TOML") as caught:
        from_toml(tmp_path / "plan.toml").checked()
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_plan_that_is_not_utf8_or_has_a_mark(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_bytes(b'model = "\xff"')
    with pytest.raises(InputError, match="not UTF-8"):
        from_toml(tmp_path / "plan.toml")
    (tmp_path / "plan.toml").write_bytes("limit = 3\r\nentries = 1".encode("utf-8-sig"))
    assert from_toml(tmp_path / "plan.toml") == Plan(limit=3, entries=1.0)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("plan = 3", "plan is not a table"),
        ("title = 3", "title is the number 3; expected text"),
        ("figures = 3", "figures are not tables"),
        ("figures = [3]", "figures are not tables"),
        ('[[figures]]\nattack = "span"', "a figure needs either row"),
        ('[train]\ndata = "a"\nepochs = "3"', "epochs is the text '3'; expected a whole number"),
        ('[train]\ndata = "a"\nschedule = "linaer"', "did you mean linear"),
        ('[train]\ndefenses = ["none"]', "train has no data"),
        ('[train]\ndata = "a"\n[membership]\nfprs = ["x"]', "fprs is the text 'x'; expected a number"),
        ("[service]\nlimit = 3", "data is missing"),
        ('[service]\ndata = "a"\nreference = "b"\nattacks = [1]', "attacks is the number 1"),
        ('[train]\ndata = "a"\n[deviations]\ntexts = "x"', "deviations compare|texts is the text"),
    ],
)
def test_studies_of_wrong_types_are_refused(tmp_path: Path, body: str, says: str) -> None:
    (tmp_path / "one.toml").write_text(body)
    with pytest.raises(InputError, match=says):
        load_study("one", tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(cls=st.sampled_from([Plan, TrainPlan, Recipe, ServicePlan]), value=JSON, data=st.data())
def test_any_value_has_its_field_s_type_or_is_refused(cls: type, value: object, data: st.DataObject) -> None:
    from dataclasses import fields

    name = data.draw(st.sampled_from([f.name for f in fields(cls) if f.name != "recipe"]))
    try:
        found = typed(cls, {name: value}, "a plan")[name]
    except InputError as error:
        assert name in str(error) and "\n" not in str(error)
    else:
        assert isinstance(found, str | int | float | tuple)


def test_a_text_in_place_of_a_file_is_neither_quoted_nor_asked_of_a_server() -> None:
    for name in (NOTE, f"{NOTE}: 4250 euros, {NOTE}" * 90, f"{SECRET}\0"):
        with pytest.raises(InputError, match="FILE") as caught:
            load_examples(name)
        assert SECRET not in str(caught.value)


def test_a_date_in_an_image_s_name_makes_no_head_of_millions(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    from rasura.data.images import load_images

    image.new("RGB", (4, 4)).save(tmp_path / "IMG_20240131.png")
    with pytest.raises(InputError, match=r"is its label; expected at most 9999. Rename the file"):
        load_images(tmp_path)

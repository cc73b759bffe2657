"""The commands, as a person types them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from audit_setting import TEXTS, model_folder
from commands import rasura_command, rasura_process, refused, refused_process
from safetensors.torch import load_file, save_file

import rasura
from rasura.cli.read import _each

__all__ = ["model_folder"]


@pytest.mark.parametrize("command", ["audit", "read", "report", "list", "doctor"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = rasura_command(command, "--help")
    assert done.returncode == 0 and "Example: rasura" in done.stdout


def test_audit_prints_the_sentence_and_writes_the_report(tmp_path: Path, model_folder: Path) -> None:
    notes = tmp_path / "notes.csv"
    notes.write_text("text,label\n" + "\n".join(f"{t},{k % 2}" for k, t in enumerate(TEXTS)) + "\n")
    common = ["audit", notes, "--model", model_folder, "--attack", "blind,span", "--defense", "none,gaussian:0.1"]
    common += ["--limit", "2", "--out", tmp_path / "run"]
    done = rasura_command(*common)
    assert done.returncode == 0, done.stderr
    assert "the server read back 100 %" in " ".join(done.stdout.split())
    assert (tmp_path / "run" / "report.html").is_file()
    again = rasura_command(*common, "--json", "--fail-above", "0.2")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "The line is the limit of --fail-above, 20\N{NO-BREAK SPACE}%" in page and 'x1="20.00%" x2="20.00%"' in page
    assert "The line is the target" not in page
    assert again.returncode == 4 and "8 done before" in again.stderr, again.stderr
    assert "--fail-above judges: gaussian:0.1" in again.stderr, "the baseline is not judged"
    assert "not measured against an adversary who knows it: add --attack pursuit,lamp-weighted" in again.stderr
    told = json.loads(again.stdout)
    assert told["verdicts"]["none"]["verdict"] == "reads" and told["gate"]["exit"] == 4
    assert "another plan" in refused(*common, "--seeds", "2")
    assert rasura_command("report", tmp_path / "run").returncode == 0


def test_the_gate_s_exit_codes(tmp_path: Path, model_folder: Path) -> None:
    notes = tmp_path / "notes.csv"
    notes.write_text("text,label\n" + "\n".join(f"{t},{k % 2}" for k, t in enumerate(TEXTS)) + "\n")
    common = ["audit", notes, "--model", model_folder, "--limit", "2", "--attack", "span", "--fail-above", "0.5"]
    read = rasura_command(*common, "--defense", "bf16", "--out", tmp_path / "read")
    assert read.returncode == 3, read.stderr
    assert "bf16: span read 100 %, above --fail-above 50 %" in read.stderr
    alone = [*common[:-4], "--attack", "blind", "--fail-above", "0.9", "--defense", "bf16", "--out", tmp_path / "blind"]
    blind = rasura_command(*alone)
    assert blind.returncode == 4 and "no attack was run that looks for notes in the data sent" in blind.stderr
    assert "--fail-above is nan" in refused(*common[:-1], "nan", "--out", tmp_path / "nan")


def test_no_text_is_printed_with_an_emoji_in_place_of_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    from rasura.cli.shared import err, out, say

    name = "directional:100: a guarantee"  # ":100:" is the name of an emoji
    table = Table("defense")
    table.add_row(name)
    for console in (out, err):
        say(name, to=console)
        console.print(table)
    told = capsys.readouterr()
    assert told.out.count(name) == told.err.count(name) == 2


def captured(tmp_path: Path, folder: Path) -> Path:
    victim = rasura.load(folder, "classification")
    batch = victim.tokenizer([TEXTS[0]], return_tensors="pt")
    path = tmp_path / "update.safetensors"
    rasura.capture(victim.model, {**batch, "labels": torch.tensor([1])}, path)
    return path


def test_read_gives_the_text_back(tmp_path: Path, model_folder: Path) -> None:
    done = rasura_process("read", captured(tmp_path, model_folder), "--model", model_folder, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["texts"] == ["alpha met bravo in delta."] and found["confidence"] == "verified"
    assert {"texts", "confidence", "attack", "tokens", "seconds"} <= set(found)


def test_read_takes_many_updates_and_says_which_one_is_refused(tmp_path: Path, model_folder: Path) -> None:
    path, bad = captured(tmp_path, model_folder), tmp_path / "bad.safetensors"
    bad.write_text("not safetensors")
    done = rasura_command("read", path, bad, path, "--model", model_folder, "--json")
    first, second, third = map(json.loads, done.stdout.splitlines())
    assert first["update"] == str(path) and second["update"] == str(bad)
    assert first["texts"] == third["texts"] == ["alpha met bravo in delta."]
    assert "is not a safetensors file" in second["refused"] and "texts" not in second
    assert done.returncode == 2 and str(bad) in done.stderr, "an update that could not be read in"
    assert rasura_command("read", path, path, "--model", model_folder).returncode == 0


def test_an_update_at_which_reading_breaks_does_not_end_the_others(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer breaks at the first update, and its message, which may quote a text, is left out."""
    path, victim = captured(tmp_path, model_folder), rasura.load(model_folder, "classification")
    whole, breaks = victim.vocabulary, [RuntimeError("alpha met bravo")]

    def decode(ids: Sequence[int]) -> str:
        if breaks:
            raise breaks.pop()
        return whole.decode(ids)

    with pytest.raises(typer.Exit) as ended:
        _each([path, path], replace(victim, vocabulary=replace(whole, decode=decode)), rasura.ReadRequest(), as_json=True)
    told = capsys.readouterr()
    first, second = map(json.loads, told.out.splitlines())
    assert first["update"] == str(path) and first["crashed"].startswith("RuntimeError in decode") and "refused" not in first
    assert second["texts"] == ["alpha met bravo in delta."]
    said = " ".join(told.err.split())
    assert ended.value.exit_code == 2 and "reading crashed: RuntimeError in decode" in said and "alpha" not in said


def test_read_refuses_what_no_text_of_the_model_has(tmp_path: Path, model_folder: Path) -> None:
    path = captured(tmp_path, model_folder)
    common = ("read", path, path, "--model", model_folder, "--batch-size", "1")
    assert "label 2 is none of the classes 0 .. 1" in refused(*common, "--labels", "2")
    assert "length 500 is that of no text" in refused(*common, "--lengths", "500")


def test_read_refuses_to_have_nothing_to_read(tmp_path: Path, model_folder: Path) -> None:
    path = captured(tmp_path, model_folder)
    common = ("read", "--model", model_folder)
    assert "or --watch FOLDER" in refused(*common)
    assert "or --watch FOLDER" in refused(*common, path, "--watch", tmp_path)
    assert "is not a folder" in refused(*common, "--watch", path)
    assert "--candidates takes one update" in refused(*common, path, path, "--candidates", tmp_path / "texts.jsonl")


def test_read_takes_reference_text(tmp_path: Path, model_folder: Path) -> None:
    update = captured(tmp_path, model_folder)
    (tmp_path / "reference.jsonl").write_text('{"text": "w20 w21 the w20"}\n')
    options = ("--attack", "blind", "--reference", tmp_path / "reference.jsonl", "--json")
    with_text = rasura_command("read", update, "--model", model_folder, *options)
    without = rasura_command("read", update, "--model", model_folder, "--attack", "blind", "--json")
    assert json.loads(with_text.stdout)["tokens"] != json.loads(without.stdout)["tokens"]
    assert "missing.jsonl" in refused("read", update, "--model", model_folder, "--reference", tmp_path / "missing.jsonl")


def test_read_completes_hidden_entries(tmp_path: Path, model_folder: Path) -> None:
    path = captured(tmp_path, model_folder)
    mask = {n: g.abs() > g.abs().flatten().kthvalue(int(0.8 * g.numel())).values for n, g in load_file(path).items()}
    save_file(mask, tmp_path / "hidden.safetensors")
    found = rasura_command("read", path, "--model", model_folder, "--hidden", tmp_path / "hidden.safetensors", "--json")
    assert json.loads(found.stdout)["texts"] == ["alpha met bravo in delta."], found.stderr
    save_file({n: m.float() for n, m in mask.items()}, tmp_path / "floats.safetensors")
    line = refused("read", path, "--model", model_folder, "--hidden", tmp_path / "floats.safetensors")
    assert "expected bool, true where an entry is hidden" in line


@pytest.mark.slow
def test_read_refuses_updates_that_are_not_this_model_s(tmp_path: Path, model_folder: Path) -> None:
    path = captured(tmp_path, model_folder)
    whole = load_file(path)
    name = "classifier.weight"

    def attempt(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, tmp_path / "bad.safetensors")
        return refused("read", tmp_path / "bad.safetensors", "--model", model_folder)

    assert "did you mean classifier.weight" in attempt({"clasifier.weight": whole[name]})
    assert "has shape (2, 3), but the model's is (2, 64)" in attempt({name: torch.zeros(2, 3)})
    assert "NaN or infinity" in attempt({name: torch.full((2, 64), float("nan"))})
    (tmp_path / "bad.safetensors").write_text("not safetensors")
    assert "is not a safetensors file" in refused("read", tmp_path / "bad.safetensors", "--model", model_folder)
    assert "does not exist" in refused("read", tmp_path / "none.safetensors", "--model", model_folder)
    assert "2 labels for a batch of 1" in refused_process(
        "read", path, "--model", model_folder, "--labels", "0,1", "--batch-size", "1"
    )


@pytest.mark.slow
def test_bad_input_is_one_line(tmp_path: Path, model_folder: Path) -> None:
    assert "did you mean span" in refused("audit", "--attack", "sapn", "--out", tmp_path / "x")
    assert "unknown list" in refused("list", "atacks")
    assert "does not exist" in refused_process(
        "audit", tmp_path / "no.csv", "--model", model_folder, "--out", tmp_path / "x"
    )
    assert "expected whole numbers" in refused("audit", "--batch-size", "one", "--out", tmp_path / "x")
    for device in ("tpu", "cpu:0", "cuda:x", "cuda:"):
        assert f"--device is '{device}'" in refused("audit", "--device", device, "--out", tmp_path / "x")
    assert "--device cuda:99 is not available" in refused("audit", "--device", "cuda:99", "--out", tmp_path / "x")
    assert "holds no run" in refused("report", tmp_path)
    assert not (tmp_path / "x").exists(), "nothing half-written"


def test_lists_and_doctor() -> None:
    for kind, name in (("attacks", "span"), ("defenses", "dropout:X"), ("threats", "honest-server"), ("metrics", "rouge1")):
        done = rasura_command("list", kind, "--json")
        assert name in json.loads(done.stdout)
    found = json.loads(rasura_command("doctor", "--json").stdout)
    assert found["torch"] and "WordNet (METEOR)" in found
    assert rasura_process("--version").stdout == f"rasura {rasura.__version__}\n"

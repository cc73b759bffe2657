"""What the command line says before anything runs: its front page, lists, help, and wrong names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from audit_setting import TEXTS, model_folder
from commands import rasura_command, refused
from huggingface_hub import HfApi

from rasura.cli import app
from rasura.cli.about import USES
from rasura.cli.panels import PANELS
from rasura.runs.plans import Plan

__all__ = ["model_folder"]

BIG = ("audit", "read", "calibrate", "train", "membership", "reproduce", "check-dp", "diagnose")
PLANNED = {
    "attack": "attacks", "defense": "defenses", "update": "updates", "threat": "threats",
    "batch_size": "batch_sizes", "seeds": "seeds", "seed": "seed", "max_memory": "max_memory",
}  # fmt: skip
"""Options of ``rasura audit`` whose default stands in ``Plan``."""


def options(command: str) -> list[Any]:
    group: Any = typer.main.get_command(app)
    return list(group.commands[command].params)


def test_rasura_alone_says_what_people_come_for() -> None:
    done = rasura_command()
    assert done.returncode == 0
    for what, command in USES:
        assert what in done.stdout and command in done.stdout
        assert rasura_command(command.split()[1], "--help").returncode == 0


def test_list_says_what_there_is_to_list() -> None:
    found = json.loads(rasura_command("list", "--json").stdout)
    assert "span" in found["attacks"] and "gaussian" in found["defenses"] and "honest-server" in found["threats"]
    assert rasura_command("list").stdout.count("rasura list ") == len(found)
    assert set(found["models"]) == set(json.loads(rasura_command("list", "models", "--json").stdout)) >= {"minilm", "lenet"}


@pytest.mark.parametrize("command", BIG)
def test_every_option_is_in_a_panel_and_shows_its_default(command: str) -> None:
    help_ = rasura_command(command, "--help").stdout
    for option in options(command):
        assert option.rich_help_panel in PANELS, option.name
        if not option.required and not getattr(option, "is_flag", False):
            assert option.default is not None or isinstance(option.show_default, str), option.name
    assert all(f"─ {panel} ─" in help_ for panel in {o.rich_help_panel for o in options(command)})


def commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, one in group.commands.items():
        yield from commands(one, f"{before}{name} ") if hasattr(one, "commands") else [(before + name, one)]


def test_every_argument_and_option_says_what_it_is() -> None:
    found = {f"{name} {p.name}": p.help for name, one in commands(typer.main.get_command(app)) for p in one.params}
    assert "protect ghost target" in found and "read updates" in found and len(found) > 200
    assert [name for name, help_ in found.items() if not help_] == []


def test_an_option_of_one_value_is_not_given_twice() -> None:
    """Only the last would count, and what was asked first would be left out without a word."""
    group: Any = typer.main.get_command(app)
    asked = 0
    for name, command in commands(group):
        for option in command.params:
            if option.param_type_name == "option" and not option.multiple and not option.is_flag:
                with pytest.raises(Exception, match=f"{option.opts[0]} is given 2 times; give it once"):
                    command.make_context(name, [option.opts[0], "1", option.opts[0], "2"])
                asked += 1
    assert asked > 200
    repeated = group.commands["audit"].make_context("audit", ["--text", "a", "--text", "b", "--json", "--json"])
    assert list(repeated.params["text"]) == ["a", "b"]


def test_the_defaults_that_help_shows_are_those_of_the_plan() -> None:
    plan, shown = Plan(), {o.name: o.show_default for o in options("audit")}
    for option, field in PLANNED.items():
        value = getattr(plan, field)
        assert shown[option] == (", ".join(map(str, value)) if isinstance(value, tuple) else str(value))
    assert shown["model"].startswith(plan.model) and shown["limit"].startswith(str(plan.limit))
    assert shown["budget"].startswith(plan.budget)


def test_a_batch_size_that_the_examples_do_not_fill_is_said(tmp_path: Path, model_folder: Path) -> None:
    common = ["audit", "--model", model_folder, "--attack", "blind", "--defense", "none", "--out", tmp_path / "run"]
    done = rasura_command(*common, *(word for text in TEXTS for word in ("--text", text)), "--batch-size", "1,2,40")
    assert done.returncode == 0, done.stderr
    assert "--batch-size 2: 1 of 3 examples are left over and not used" in done.stderr
    assert "--batch-size 40: only 3 examples, all in one update" in done.stderr and "size 1:" not in done.stderr


def test_a_wrong_model_name_is_answered_at_once(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(HfApi, "model_info", lambda self, name, timeout: asked.append(name))
    (tmp_path / "my-model").symlink_to(model_folder)
    monkeypatch.chdir(tmp_path)
    assert "did you mean minilm?" in refused("audit", "--model", "minlm", "--out", tmp_path / "x")
    assert "did you mean ./my-model?" in refused("audit", "--model", "./my-modle", "--out", tmp_path / "x")
    assert "did you mean my-model?" in refused("audit", "--model", "my-modle", "--out", tmp_path / "x")
    assert "nor a name that the hub allows" in refused("audit", "--model", "a model", "--out", tmp_path / "x")
    assert asked == [], "nothing was asked of the hub"


def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def away(self: object, name: str, timeout: float) -> None:
        asked.append(name)
        raise ConnectionError("no network")

    monkeypatch.setattr(HfApi, "model_info", away)
    said = refused("audit", "--model", "someone/model", "--out", tmp_path / "x")
    assert "the Hugging Face hub was not reached (ConnectionError)" in said and asked == ["someone/model"]


def test_arguments_stand_in_the_order_of_the_words_on_the_command_line() -> None:
    import inspect

    for command in app.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "")
        made = typer.main.get_command(app).commands[name.replace("_", "-")]  # type: ignore[attr-defined]
        told = [p.name for p in made.params if p.param_type_name == "argument"]
        assert told == [p for p in inspect.signature(command.callback).parameters if p in told], name  # type: ignore[arg-type]

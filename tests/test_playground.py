"""The playground: right answers, in a real browser, for one person on this machine."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import urlencode

import pytest
from audit_setting import TEXTS, model_folder
from browser_setting import Driven

from rasura.attacks.shared.verify import prove
from rasura.attacks.updates.span import attack
from rasura.core.errors import InputError
from rasura.core.rounding import percent
from rasura.report.template import filled
from rasura.runs.playground import ADVERSARIES, FIRST, PROTECTIONS, Playground, Question
from rasura.server.loopback import Answers, Loopback

__all__ = ["model_folder"]


@pytest.fixture(scope="module")
def known(model_folder: Path) -> Playground:
    return Playground((str(model_folder),))


@contextmanager
def served(known: Playground, answers: Answers | None = None) -> Iterator[Loopback]:
    page = filled(
        "playground.html", models=known.names, protections=PROTECTIONS, adversaries=ADVERSARIES, first=TEXTS[0], texts=TEXTS
    )
    with Loopback(page, answers or known.answers) as made:
        thread = Thread(target=made.serve_forever, daemon=True)
        thread.start()
        try:
            yield made
        finally:  # also where a test is skipped: on a closed socket the thread would use a whole core
            made.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server(known: Playground) -> Iterator[Loopback]:
    with served(known) as made:
        yield made


def test_a_text_is_read_back_and_guessing_stands_beside_it(known: Playground) -> None:
    (model,) = known.victims
    command, *told = known.answers({"model": model, "text": TEXTS[0], "attack": "span"})
    (update,) = [one for one in told if one["kind"] == "update"]
    blind, rows, span = [one for one in told if one["kind"] == "attack"]
    assert command["command"].startswith("rasura audit --text ") and TEXTS[0] in command["command"]
    assert update["bytes"] > 0 and (blind["attack"], rows["attack"]) == ("blind", "embedding-rows")
    assert span["status"] == "ok" and span["recall"] == 1.0 and blind["recall"] < span["recall"]
    assert all(hit for _, hit, _ in span["words"])


def test_a_text_that_was_cut_is_said_to_be_and_a_rest_is_not_rounded_away(known: Playground, tmp_path: Path) -> None:
    (model,) = known.victims
    told = list(known.answers({"model": model, "text": " ".join(TEXTS * 20)[:1900], "attack": "embedding-rows"}))
    (update,) = [one for one in told if one["kind"] == "update"]
    blind, rows = [one for one in told if one["kind"] == "attack"]
    assert update["cut"] and update["cut"][0] < update["cut"][1]
    assert all(one["percent"] == percent(one["recall"]) for one in (blind, rows))
    rows |= {"status": "ok", "confidence": "matched", "recall": 0.996, "percent": 99.0}
    with served(known, lambda _: iter([update, {"kind": "began", "attack": "blind"}, rows])) as server:
        state, _, ((_, _, shown, _),) = in_browser(server, TEXTS[0], tmp_path)
    assert state.startswith(f"The text was cut: {update['cut'][0]} of its {update['cut'][1]} tokens were sent, and")
    assert "99 % of the tokens" in shown


def test_words_are_told_one_by_one_and_more_of_them_each_time(known: Playground) -> None:
    (model,) = known.victims
    told = list(known.answers({"model": model, "text": TEXTS[0], "attack": "span"}))
    kinds = [(one["kind"], one["attack"]) for one in told if one["kind"] != "command" and one["kind"] != "update"]
    parts = [attack for kind, attack in kinds if kind == "began"]
    assert parts == ["blind", "embedding-rows", "span"] and ("reading", "blind") not in kinds
    begins = kinds.index(("began", "span"))
    assert kinds[begins + 1 : -1] == [("reading", "span")] * (len(kinds) - begins - 2) and kinds[-1] == ("attack", "span")
    hits = [sum(hit for _, hit, _ in one["words"]) for one in told if one["kind"] == "reading" and one["attack"] == "span"]
    assert hits == sorted(hits) and len(set(hits)) > 4 and hits[-1] == len(TEXTS[0].split())


def test_the_command_is_one_that_the_command_line_takes() -> None:
    import shlex

    import typer

    from rasura.cli import app

    told = {"text": "it's Lena's", "protection": "noise", "noise": 0.01, "rank": 8, "batch": 2, "attack": "pursuit"}
    asked = Question.of(told)
    words = shlex.split(asked.command("classification"))
    commands: Any = typer.main.get_command(app)
    took = commands.commands[words[1]].make_context(words[1], words[2:]).params
    assert took["text"][0] == "it's Lena's" and len(took["text"]) == 2 and took["defense"] == "gaussian:0.01"
    assert (took["update"], took["batch_size"], took["truncate"]) == ("lora:8", "2", True)
    asked.plan("classification").checked()


def test_a_first_round_of_adapters_is_not_blamed_on_the_width(known: Playground) -> None:
    (model,) = known.victims
    *_, span = known.answers({"model": model, "text": TEXTS[0], "attack": "span", "rank": 4, "batch": 4})
    assert span["status"] == "not_applicable" and "adapters in their first round" in span["reason"], span


@pytest.mark.parametrize(
    "told", [{"text": ""}, {"text": "x" * 9999}, {"protection": "prayer"}, {"attack": "x"}, {"batch": 99}, {"rank": True},
             {"noise": float("nan")}, {"noise": "1"}, {"colour": "red"}],
)  # fmt: skip
def test_a_wrong_question_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Question.of(told)


def sent(server: Loopback, body: str, **headers: str) -> tuple[int, list[Any]]:
    usual = {"Host": f"127.0.0.1:{server.server_port}", "Origin": server.url, "Content-Type": "application/json"}
    line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    line.request("POST", "/read", body, {**usual, **{k.replace("_", "-"): v for k, v in headers.items()}})
    got = line.getresponse()
    text = got.read().decode()
    return got.status, [json.loads(one) for one in text.splitlines()] if got.status == 200 else []


def test_only_its_own_page_is_answered(server: Loopback) -> None:
    assert server.server_address[0] == "127.0.0.1"
    question = json.dumps({"text": TEXTS[0]})
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Content_Type": "text/plain"}):
        assert sent(server, question, **headers)[0] == 403
    status, told = sent(server, question)
    assert status == 200 and told == [{"kind": "error", "says": told[0]["says"]}] and "not loaded" in told[0]["says"]
    assert sent(server, "no json")[1][0]["kind"] == "error" and sent(server, "[]")[1][0]["kind"] == "error"


def in_browser(server: Loopback, text: str, folder: Path) -> tuple[str, str, list[Any]]:
    """The state and the command in the end; of each attack its name, after how many seconds its first and last words were
    shown, what is shown, and how many words of the text came back."""
    page = Driven(f"{server.url}/?{urlencode({'text': text})}", folder)
    try:
        page.until("document.getElementById('text') && document.getElementById('text').value")
        page.value("document.getElementById('go').click()")
        page.until("/Done in|Not answered/.test(document.getElementById('state').textContent)")
        state, command = (page.value(f"document.getElementById('{name}').textContent") for name in ("state", "command"))
        seconds = "`${l.dataset.first || l.dataset.after} to ${l.dataset.after}`"
        shown = f"[l.dataset.attack, {seconds}, l.innerText, l.querySelectorAll('.hit').length]"
        return state, command, page.value(f"[...document.querySelectorAll('.leaf')].map(l => {shown})")
    finally:
        page.close()


def test_a_browser_shows_what_came_back(server: Loopback, tmp_path: Path) -> None:
    state, command, leaves = in_browser(server, TEXTS[0], tmp_path)
    assert re.fullmatch(r"The update has [\d.]+ kB\. Done in [\d.]+ s\.", state), state
    assert command.startswith("rasura audit --text ") and TEXTS[0] in command
    assert [name for name, *_ in leaves] == ["blind", "embedding-rows", "span"]
    assert "100 % of the tokens" in leaves[2][2] and leaves[2][3] == len(TEXTS[0].split())


@pytest.mark.slow
def test_a_browser_shows_tokens_before_the_attack_ends(
    server: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack is held before its last part, the proof."""
    go_on = Event()

    def held(*arguments: Any) -> Any:
        assert go_on.wait(120)
        return prove(*arguments)

    monkeypatch.setattr(attack, "prove", held)
    page = Driven(f"{server.url}/?{urlencode({'text': TEXTS[0], 'ask': 1})}", tmp_path)
    span = "document.querySelector('.leaf[data-attack=span]')"
    try:
        page.until(f"{span} && {span}.querySelectorAll('.hit').length === {len(TEXTS[0].split())}")
        leaf = "({state: l.dataset.state, told: Number(l.dataset.told), first: l.dataset.first, text: l.innerText})"
        running = page.value(f"(l => {leaf})({span})")
        assert running["state"] == "running" and running["told"] > 4 and running["first"]
        assert "nothing is certain yet" in running["text"] and "alpha met bravo" in running["text"]
        assert page.value(f"{span}.querySelectorAll('.lost').length") == 0
        assert "verified" not in running["text"] and "%" not in running["text"]
        go_on.set()
        page.until(f"{span}.dataset.state === 'ended'")
        assert "100 % of the tokens · verified" in page.value(f"{span}.innerText")
    finally:
        go_on.set()
        page.close()


def test_what_an_attack_that_did_not_end_had_read_is_taken_back(known: Playground, tmp_path: Path) -> None:
    def answers(asked: Any) -> Iterator[dict[str, Any]]:
        yield {"kind": "began", "attack": "span"}
        yield {"kind": "reading", "attack": "span", "ordered": True, "words": [["Alpha", True, True]], "read": "alpha"}
        raise RuntimeError

    with served(known, answers) as server:
        state, _, ((name, _, shown, hits),) = in_browser(server, TEXTS[0], tmp_path)
    assert "Not answered" in state and name == "span" and hits == 0
    assert "did not end, which shows nothing" in shown and "alpha" not in shown


@pytest.mark.slow
@pytest.mark.parametrize(("model", "task"), [("minilm", "classification"), ("smollm2", "causal")])
def test_a_pretrained_model_is_read_in_a_browser(model: str, task: Any, pretrained: Path, tmp_path: Path) -> None:
    """Prints after how many seconds each answer was shown: ``pytest -s`` shows them."""
    known = Playground((model if model == "minilm" else str(pretrained / model),), task)
    with served(known) as server:
        for question in range(3):
            (tmp_path / str(question)).mkdir()
            state, _, leaves = in_browser(server, FIRST, tmp_path / str(question))
            print(model, *(f"{name} {after} s" for name, after, *_ in leaves), state)
            assert [name for name, *_ in leaves] == ["blind", "embedding-rows", "span"]
            assert "100 % of the tokens" in leaves[2][2] and leaves[2][3] == len(FIRST.split())

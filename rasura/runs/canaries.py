"""Canary texts: drawn with a coin each, mixed into training texts, and scored by the trained model (black box)."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rasura.accounting import LowerBound, gaussian_run_bound, one_run_bound, right_guesses
from rasura.core.answers import Answers
from rasura.core.errors import InputError
from rasura.core.files import read_limited, write_new
from rasura.core.values import Task
from rasura.data.columns import NAMES as LABEL_TEXT
from rasura.data.columns import Columns
from rasura.data.text import Example, Examples, load_examples
from rasura.runs.training import encoded
from rasura.victims.adapters import revision_of
from rasura.victims.loading import Victim, load, with_one_label, with_own_head
from rasura.victims.outputs import answers
from rasura.victims.weights import classes_for, is_adapter

COINS, MIXED = "canaries.json", "train.jsonl"
"""The canaries with their coins, which must stay secret; and the texts to train on."""

NAMES = ("text", "text_pair", "label", LABEL_TEXT)
"""The columns of the texts to train on."""

VERSION, MAX_BYTES, LENGTH, TRIES = 1, 1 << 26, 10, 100_000


@dataclass(frozen=True)
class Canary:
    """A text of random words, its label (None for a causal model), and whether it is to be trained on."""

    text: str
    label: int | None
    included: bool


def draw(
    model: str,
    data: str | None,
    number: int,
    folder: Path,
    *,
    task: Task,
    num_labels: int | None = None,
    columns: Columns | None = None,
) -> tuple[Canary, ...]:
    """Draw ``number`` canaries for ``model`` and write two files into ``folder``: the canaries with their coins, and the
    texts of ``data`` together with the canaries that are in, in random order.

    A canary is ``LENGTH`` random words of the model's vocabulary, each one token. Coins, words, labels and order come from
    the operating system. ``num_labels``: None for the classes of the folder's head, or as many as ``data`` needs.
    ``columns``: those of ``data``. Names of labels are kept, and so is its ``unit``, which says whose each text is; each
    canary is a person of its own.
    Raises ``InputError`` for fewer than 20 canaries, for existing files, and for a vocabulary with too few words.
    """
    columns = columns or Columns()
    if data is None and columns != Columns():
        raise InputError("columns of training texts were given, but no training texts; also pass --data")
    if number < 20:
        raise InputError(f"{number} canaries; expected at least 20, and some hundreds for a bound that says something")
    if (unit := columns.unit) in NAMES:
        raise InputError(f"unit is {unit!r}; expected a column of the training texts beside {', '.join(NAMES)}")
    given = load_examples(data, columns=columns, model=model) if data else Examples()
    if any(e.input_ids is not None for e in given):
        raise InputError(
            f"{data} holds input_ids that a protection chose, which would be lost; draw canaries into the original texts "
            "and protect the mixed file"
        )
    if task == "classification":
        num_labels = num_labels or classes_for(model, 1 + max((e.label or 0 for e in given), default=0))
    victim = with_one_label(load(model, task, num_labels=num_labels, attacked=False))
    num_labels = victim.num_labels or 2
    words = _words(victim, 400)
    texts: set[str] = set()
    while len(texts) < number:
        texts.add(" ".join(secrets.choice(words) for _ in range(LENGTH)))
    labels = [None if task == "causal" else secrets.randbelow(num_labels) for _ in texts]
    canaries = tuple(Canary(text, label, bool(secrets.randbits(1))) for text, label in zip(sorted(texts), labels))
    own = [None if unit is None else f"canary {secrets.token_hex(8)}" for _ in canaries]
    rows = [*given, *(Example(c.text, label=c.label, unit=who) for c, who in zip(canaries, own) if c.included)]
    secrets.SystemRandom().shuffle(rows)
    told = {"version": VERSION, "task": task, "num_labels": num_labels, "canaries": [vars(c) for c in canaries]}
    mixed = "".join(_row(one, unit, given.label_names or ()) for one in rows)
    write_new(folder, {COINS: json.dumps(told, ensure_ascii=False), MIXED: mixed})
    return canaries


def _row(example: Example, unit: str | None, names: Sequence[str]) -> str:
    number = example.label
    # Where some rows have names all must: a class that the data lacks is called by its number.
    name = None if not names or number is None else names[number] if number < len(names) else str(number)
    about = dict(zip(NAMES, (example.text, example.text_pair, number, name)))
    about |= {} if unit is None else {unit: example.unit}
    return json.dumps({k: v for k, v in about.items() if v is not None}, ensure_ascii=False) + "\n"


def _words(victim: Victim, number: int) -> list[str]:
    """Random words of the vocabulary that are one token each, also between other words."""
    found: set[str] = set()
    for _ in range(TRIES):
        word = victim.tokenizer.decode([secrets.randbelow(victim.vocabulary.size)]).strip()
        if word.isascii() and word.isalnum() and word not in found:
            bare = victim.tokenizer(f"{word} {word}", add_special_tokens=False)["input_ids"]
            if len(bare) == 2:
                found.add(word)
        if len(found) == number:
            break
    if len(found) < 40:
        raise InputError(f"the vocabulary has {len(found)} words of one token; expected at least 40")
    return sorted(found)


def read_canaries(folder: Path) -> tuple[Task, int, tuple[Canary, ...]]:
    """The task, the number of classes and the canaries that ``draw`` wrote. Raises ``InputError`` for anything else."""
    content, _ = read_limited(folder / COINS, "file of canaries", MAX_BYTES)
    try:
        told: Any = json.loads(content)
        task, labels, rows = told["task"], told["num_labels"], told["canaries"]
        canaries = tuple(Canary(one["text"], one["label"], one["included"]) for one in rows)
        whole = told["version"] == VERSION and task in ("classification", "causal") and type(labels) is int
        if not whole or not all(type(c.included) is bool and isinstance(c.text, str) and c.text for c in canaries):
            raise ValueError
    except (ValueError, LookupError, TypeError):
        raise InputError(f"{folder / COINS} does not hold canaries; expected what rasura canaries draw wrote") from None
    return task, labels, canaries


@dataclass(frozen=True)
class Extracted:
    """How many canaries a causal model writes to their end, word for word, after the first half of their tokens.

    It takes the likeliest token each time. ``included`` of ``trained`` were trained on, ``left_out`` of ``others`` were not.
    """

    included: int
    trained: int
    left_out: int
    others: int


@dataclass(frozen=True)
class Measured:
    """What one trained model shows: the bound for any training, and the one that assumes Gaussian noise, which is None at a
    delta of 0: no epsilon holds for such noise there.

    ``exposure``: the mean exposure of the canaries that were trained on, in bits; ``chance``: that of the others. Both are
    None where all coins fell alike. ``extracted``: None for a classifier.
    """

    bound: LowerBound
    gaussian: LowerBound | None
    exposure: float | None
    chance: float | None
    extracted: Extracted | None

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        gaussian = None if self.gaussian is None else self.gaussian.epsilon
        more = {"gaussian_epsilon": gaussian, "exposure": self.exposure, "exposure_by_chance": self.chance}
        return {**vars(self.bound), **more, "extracted": None if self.extracted is None else vars(self.extracted)}


def exposures(scores: NDArray[np.float64], included: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The exposure of each canary in bits, ``(canaries,)``: ``log2(n / rank)`` among the n - 1 others that were left out.

    ``scores`` ``(canaries,)``: larger where a canary seems to be in the training. Equal scores count against an exposure. By
    chance it is about 1.44 bits on average; it is at most ``log2(n)`` (Carlini et al. 2019, section 4.2, with ranks among a
    random sample, the canaries left out, as in 4.3). NaN where no other canary was left out.
    """
    out = np.full(len(scores), math.nan)
    for k, score in enumerate(scores):
        others = scores[~included & (np.arange(len(scores)) != k)]
        if len(others):
            out[k] = math.log2((len(others) + 1) / (1 + int((others >= score).sum())))
    return out


def measure(
    folder: Path, model: str, *, base: str | None, delta: float, guesses: int | None = None, confidence: float = 0.95
) -> Measured:
    """The lower bounds of epsilon that the trained ``model`` shows for the canaries in ``folder``.

    The score of a canary is how much lower its loss is than under ``base``, the model that training started from; without
    one, how low its loss is. ``guesses``: a fifth of the canaries if None, which does not depend on the coins. Raises
    ``InputError`` for invalid files and values, for a classifier without its head, and for losses that are not finite.
    """
    task, labels, canaries = read_canaries(folder)
    labels = labels if task == "causal" else classes_for(model, labels)  # the training may have had more
    examples = [Example(one.text, label=one.label) for one in canaries]
    trained = with_one_label(with_own_head(load(model, task, num_labels=labels, attacked=False)))
    said = _answers(trained, task, examples)
    scores = -said.losses.numpy()
    if base is not None:
        revision = revision_of(Path(model), base) if is_adapter(model) else None
        began = load(base, task, num_labels=labels, attacked=False, revision=revision)
        scores = scores + _answers(began, task, examples).losses.numpy()
    included = np.array([one.included for one in canaries])
    asked = max(2, len(canaries) // 10 * 2) if guesses is None else guesses
    right = right_guesses(scores, included, asked)
    figures = (len(canaries), asked, right, delta, confidence)
    bits = exposures(scores, included)
    told, chance = (
        float(bits[some].mean()) if some.any() and not np.isnan(bits).any() else None for some in (included, ~included)
    )
    bound, gaussian = one_run_bound(*figures), gaussian_run_bound(*figures) if delta else None
    return Measured(bound, gaussian, told, chance, _extracted(said, included))


def _answers(victim: Victim, task: Task, examples: Sequence[Example]) -> Answers:
    rows = encoded(victim, examples, max_length=None, truncate=False)
    return answers(victim.model, rows, victim.vocabulary.pad_id or 0, tokens=task == "causal")


def _extracted(said: Answers, included: NDArray[np.bool_]) -> Extracted | None:
    """Writing the likeliest token each time, a model writes a text to its end exactly if each of its tokens is the likeliest
    one after the true beginning."""
    if not said.tokens:
        return None
    whole = np.array([bool(one.first[len(one.first) // 2 :].all()) for one in said.tokens])
    return Extracted(
        int((whole & included).sum()), int(included.sum()), int((whole & ~included).sum()), int((~included).sum())
    )

"""The evaluation of a guess: its scores, the recovered part of each example, and the versions that the figures depend on."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import compress, groupby
from typing import Any

from rasura.core.answers import ServiceTranscript, TokenReading
from rasura.core.batches import Batch
from rasura.core.errors import FAULTS, InputError, Unavailable, broken
from rasura.core.interfaces import Metric
from rasura.core.records import LABELS, MASK
from rasura.core.so_far import SoFar
from rasura.core.values import UNKNOWN, Message, Reconstruction, Transcript, Vocabulary
from rasura.core.wire import AUDITED, to_bytes
from rasura.data.images import data_url
from rasura.metrics.image import paired_images, ssim
from rasura.metrics.intervals import mean_or_interval
from rasura.metrics.labels import label_hits
from rasura.metrics.matching import named_text, own_tokens, paired, read_texts, unknown_words, worded
from rasura.metrics.sensitive import marked_words, tells_names
from rasura.metrics.service import RougeL
from rasura.metrics.text import TokenMetric, rouge
from rasura.registry import SERVICE_METRICS
from rasura.report.scores import NAMED, NAMED_BLIND
from rasura.runs.sources import STORED

OPEN = "·"
"""Stands for a place of a text where no token was found yet."""


def score(metric: Metric[Reconstruction], guess: Reconstruction, truth: Transcript) -> dict[str, Any]:
    """The values of ``metric`` for every example, their mean with its interval, and the worst of them. A text without a
    token of its own has NaN, not measured, whatever the metric says. Raises ``InputError`` unless there is a value for
    each."""
    images = None if guess.images is None else guess.images.clone()
    given = replace(guess, images=images), replace(truth, batch=truth.batch.copied())  # a metric may write into them
    values = [float(v) for v in metric(*given)]
    if len(values) != len(truth.batch):
        raise InputError(f"{metric.name} has {len(values)} values for {len(truth.batch)} examples")
    if isinstance(truth.batch, Batch):
        worded = [bool(own_tokens(truth.batch.ids(row), truth)) for row in range(len(truth.batch))]
        values = [v if there else math.nan for v, there in zip(values, worded, strict=True)]
    return score_of(values, metric.unit, metric.higher_is, metric.bounds)


def scored(metric: Metric[Reconstruction], guess: Reconstruction, truth: Transcript) -> dict[str, Any]:
    """As ``score``, whatever the metric does: one that fails has no value, and says why. Raises ``Unavailable`` as it
    does."""
    try:
        return score(metric, guess, truth)
    except Unavailable:
        raise
    except FAULTS as error:
        return no_value(metric, broken(error), len(truth.batch))


def named_in_batch(guess: Reconstruction, truth: Transcript) -> list[float]:
    """For each text of the batch, the share of the tokens in the guess at it that stand in any of the texts, counting
    repeats. A bag of the words of all texts is right about each of them, and one of the whole vocabulary about none."""
    batch = truth.text_batch
    every = Counter(i for row in range(len(batch)) for i in own_tokens(batch.ids(row), truth))

    def right(_: Sequence[int], found: Sequence[int]) -> float:
        return sum((Counter(found) & every).values()) / len(found) if found else 0.0

    return list(TokenMetric("named_in_batch", right)(guess, truth))


def naming(guess: Reconstruction, blind: Reconstruction | None, truth: Transcript) -> dict[str, list[float]]:
    """``named_in_batch`` of ``guess`` and of guessing, as the details of a record; nothing of images."""
    if not isinstance(truth.batch, Batch):
        return {NAMED: [], NAMED_BLIND: []}
    return {NAMED: named_in_batch(guess, truth), NAMED_BLIND: named_in_batch(blind or Reconstruction(()), truth)}


def no_value(metric: Metric[Reconstruction], why: str, n: int) -> dict[str, Any]:
    """As ``score``, of a metric that has no value for any of ``n`` examples. It is not left out: an attack without any score
    would have given up."""
    return {**score_of([math.nan] * n, metric.unit, metric.higher_is, metric.bounds), "reason": f"no value: {why}"}


_interval = lru_cache(maxsize=4096)(mean_or_interval)
"""Kept: cells of one text have few values, and an interval costs more than many attacks' scores."""


def score_of(values: list[float], unit: str, higher_is: str, bounds: tuple[float, float] | None) -> dict[str, Any]:
    """The same of the ``values`` of a metric."""
    mean, low, high = _interval(tuple(values), bounds and (bounds[0], bounds[1]))
    there = [v for v in values if v == v]
    worst = (max if higher_is == "worse" else min)(there, default=float("nan"))
    return {
        "per_record": values, "mean": mean, "low": low, "high": high, "worst": worst, "n": len(there),
        "unit": unit, "higher_is": higher_is, "bounds": bounds,
    }  # fmt: skip


def label_scores(read: Sequence[int] | None, truth: Transcript) -> dict[str, Any]:
    """As ``score``, of the labels ``read`` from a batch; empty where none were read, and for a causal model, which has its
    tokens as labels."""
    if read is None or truth.task == "causal":
        return {}
    return {LABELS: score_of(label_hits(read, truth.batch.labels.tolist()), "share", "worse", (0.0, 1.0))}


def service_scores(guess: TokenReading, truth: ServiceTranscript) -> dict[str, Any]:
    """As ``score``, for all applicable metrics of a guess at the texts of a service. A text of which the tokenizer knows no
    word has NaN, not measured, whatever a metric says. So has ROUGE of one without letters and digits.

    Raises ``InputError`` where a figure is not a number for every other text.
    """
    found = {name: spec.make()(guess, truth) for name, spec in SERVICE_METRICS.items()}
    measured = [worded(ids, truth.vocabulary) for ids in truth.ids]
    written = [there and bool(rouge("rougeL").units(truth.vocabulary.text(i))) for i, there in zip(truth.ids, measured)]
    return {
        n: fractions_of(n, values, written if n == RougeL.name else measured)
        for n, values in found.items()
        if values is not None
    }


def fractions_of(name: str, values: Sequence[float], measured: Sequence[bool], higher_is: str = "worse") -> dict[str, Any]:
    """As ``score``, for the recovered fraction of each text, NaN where it is not ``measured``. Raises ``InputError`` unless
    there is a number for each other."""
    if len(values) != len(measured) or not all(map(math.isfinite, compress(values, measured))):
        raise InputError(f"{name} is not a number for every text")
    kept = [float(v) if there else math.nan for v, there in zip(values, measured)]
    return score_of(kept, "share", higher_is, (0.0, 1.0))


def likeness(
    read: Sequence[Sequence[int]], true: Sequence[Sequence[int]], vocabulary: Vocabulary, higher_is: str = "worse"
) -> dict[str, Any]:
    """ROUGE of the continuations ``read`` with the ``true`` ones, each the ids of a text; NaN for a true one of which the
    tokenizer knows no word, or which has no letters and digits. ``higher_is``: ``worse`` if an adversary reads them,
    ``better`` if the client does."""
    out = {}
    for kind in ("rouge1", "rougeL"):
        metric = rouge(kind)
        values = [metric.score(vocabulary.text(a), named_text(b, vocabulary)) for a, b in zip(true, read, strict=True)]
        measured = [worded(ids, vocabulary) and bool(metric.units(vocabulary.text(ids))) for ids in true]
        out[f"continuation_{kind}"] = fractions_of(f"continuation_{kind}", values, measured, higher_is)
    return out


def recovered(guess: Reconstruction, truth: Transcript, show: bool) -> list[dict[str, Any]]:
    """What was recovered from each text, word by word: (word, recovered?, sensitive?); masked unless ``show``. ``unknown``:
    where the tokenizer does not know a word, how many it does not know, and of how many. For images, the original and the
    guess as ``data:`` URLs; unless ``show``, only their similarity.
    """
    if guess.images is not None:
        return _recovered_images(guess, truth, show)
    batch, words = truth.text_batch, truth.vocabulary
    shown = list(guess.texts) or [words.text(t) for t in guess.tokens]
    out = []
    named = read_texts(guess, truth)
    for row, (score, place) in enumerate(paired(batch.seen, named, rouge("rouge1").score)):
        read = (shown[place], named[place]) if place >= 0 else ("", "")
        told = _unknown(unknown_words(batch.ids(row), words), len(own_tokens(batch.ids(row), truth)))
        out.append({**_recovered_text(batch.texts[row], *read, score, show), **told})
    return out


def _unknown(count: int, known: int) -> dict[str, list[int]]:
    """That the tokenizer does not know ``count`` words of a text, beside ``known`` tokens; nothing where it knows all."""
    return {"unknown": [count, count + known]} if count else {}


def recovered_so_far(so_far: SoFar, batch: Batch, vocabulary: Vocabulary, show: bool) -> dict[str, Any]:
    """What an attack has read so far of the first text of ``batch``, as ``recovered`` says it, with ``OPEN`` for each place
    that is still open in what was read.

    Of as many texts as there are in the batch, it takes the one that ``recovered`` would.
    """
    tokens = so_far.tokens[: len(batch.texts)]
    _, place = paired(batch.seen, [named_text(t, vocabulary) for t in tokens], rouge("rouge1").score)[0]
    ids = tokens[place] if place >= 0 else ()
    runs = [(there, list(some)) for there, some in groupby(ids, key=lambda t: t != UNKNOWN)]
    found = [vocabulary.text(some) if there else [OPEN] * len(some) for there, some in runs]
    read = " ".join(text for text in found if isinstance(text, str))
    shown = [[text if show else " ".join(MASK for _ in text.split())] if isinstance(text, str) else text for text in found]
    row = _recovered_text(batch.texts[0], read, named_text(ids, vocabulary), 0.0, show)
    return {"words": row["words"], "read": " ".join(s for some in shown for s in some if s)}


def recovered_texts(guess: TokenReading, truth: ServiceTranscript, show: bool) -> list[dict[str, Any]]:
    """The same for the texts sent to a service, with the first guess at each token."""
    words, metric, out = truth.vocabulary, rouge("rouge1"), []
    for ids, ranked in zip(truth.ids, guess.ranked, strict=True):
        sent, read = words.text(ids), ranked[:, 0].tolist()
        named = named_text(read, words)
        row = _recovered_text(sent, words.text(read), named, metric.score(sent, named), show)
        known = sum(i not in words.special_ids for i in ids)
        out.append({**row, **_unknown(unknown_words(ids, words), known)})
    return out


def _recovered_text(text: str, read: str, named: str, score: float, show: bool) -> dict[str, Any]:
    """``named``: what of ``read`` names a word (``named_text``); the mark of a word that the tokenizer does not know is
    shown, and hits none."""
    words = [[w if show else MASK, hit, hurts] for w, hit, hurts in marked_words(text, named)]
    shown = read if show else " ".join(MASK for _ in read.split())
    sent = text if show else " ".join(str(w[0]) for w in words)
    return {"sent": sent, "read": shown, "words": words, "score": score, "tells_names": tells_names(text)}


def _recovered_images(guess: Reconstruction, truth: Transcript, show: bool) -> list[dict[str, Any]]:
    images = truth.image_batch.pixel_values
    out: list[dict[str, Any]] = []
    for image, place in zip(images, paired_images(images, guess.images)):
        if place < 0 or guess.images is None:
            continue
        read = guess.images[place]
        row = {"sent": data_url(image), "read": data_url(read)} if show else {"sent": "", "read": ""}
        out.append({**row, "words": [], "image": True, "score": ssim(image, read)})
    return out


def sent_bytes(message: Message) -> int:
    """The size of ``message`` on the wire if something is sealed, otherwise of its entries, in bytes."""
    clear = sum(g.numel() * g.element_size() for g in message.gradients.values())
    whole = len(to_bytes(message)) if message.sealed else clear
    return int(str(message.header.get(AUDITED, whole)))


def versions() -> dict[str, str]:
    """The versions of the libraries that the figures depend on."""
    found = {"python": platform.python_version()}
    for name in STORED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found

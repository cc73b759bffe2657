"""The evaluation of a guess: its scores, the recovered part of each example, and the versions that the figures depend on."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import Any

from rasura.core.answers import ServiceTranscript, TokenReading
from rasura.core.batches import Batch
from rasura.core.errors import InputError, Unavailable, broken
from rasura.core.interfaces import Metric
from rasura.core.records import LABELS, MASK
from rasura.core.so_far import SoFar
from rasura.core.values import UNKNOWN, Message, Reconstruction, Transcript, Vocabulary
from rasura.core.wire import to_bytes
from rasura.data.images import data_url
from rasura.metrics.image import paired_images, ssim
from rasura.metrics.intervals import mean_or_interval
from rasura.metrics.labels import label_hits
from rasura.metrics.matching import own_tokens, paired, read_texts, unknown_words
from rasura.metrics.sensitive import marked_words, tells_names
from rasura.metrics.text import TokenMetric, rouge
from rasura.registry import SERVICE_METRICS
from rasura.report.readings import NAMED, NAMED_BLIND
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
    except Exception as error:
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


def score_of(values: list[float], unit: str, higher_is: str, bounds: tuple[float, float] | None) -> dict[str, Any]:
    """The same of the ``values`` of a metric."""
    mean, low, high = mean_or_interval(values, bounds)
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
    """As ``score``, for all applicable metrics of a guess at the texts of a service.

    Raises ``InputError`` where a figure is not a number for every text.
    """
    found = {name: spec.make()(guess, truth) for name, spec in SERVICE_METRICS.items()}
    return {n: fractions_of(n, values, len(truth.ids)) for n, values in found.items() if values is not None}


def fractions_of(name: str, values: Sequence[float], texts: int, higher_is: str = "worse") -> dict[str, Any]:
    """As ``score``, for the recovered fraction of each text. Raises ``InputError`` unless there is a number for each."""
    if len(values) != texts or not all(map(math.isfinite, values)):
        raise InputError(f"{name} is not a number for every text")
    return score_of(list(values), "share", higher_is, (0.0, 1.0))


def likeness(
    read: Sequence[Sequence[int]], true: Sequence[Sequence[int]], vocabulary: Vocabulary, higher_is: str = "worse"
) -> dict[str, Any]:
    """ROUGE of the continuations ``read`` with the ``true`` ones, each the ids of a text. ``higher_is``: ``worse`` if an
    adversary reads them, ``better`` if the client does."""
    out = {}
    for kind in ("rouge1", "rougeL"):
        metric = rouge(kind).score
        values = [metric(vocabulary.text(a), vocabulary.text(b)) for a, b in zip(true, read, strict=True)]
        out[f"continuation_{kind}"] = fractions_of(f"continuation_{kind}", values, len(true), higher_is)
    return out


def recovered(guess: Reconstruction, truth: Transcript, show: bool) -> list[dict[str, Any]]:
    """What was recovered from each text, word by word: (word, recovered?, sensitive?); masked unless ``show``. ``unknown``:
    where the tokenizer does not know a word, how many it does not know, and of how many. For images, the original and the
    guess as ``data:`` URLs; unless ``show``, only their similarity.
    """
    if guess.images is not None:
        return _recovered_images(guess, truth, show)
    texts = read_texts(guess, truth)
    metric = rouge("rouge1")
    out = []
    batch = truth.text_batch
    for row, (text, (score, place)) in enumerate(zip(batch.texts, paired(batch.seen, texts, metric.score))):
        read = texts[place] if place >= 0 else ""
        unknown = unknown_words(batch.ids(row), truth)
        told = {"unknown": [unknown, unknown + len(own_tokens(batch.ids(row), truth))]} if unknown else {}
        out.append({**_recovered_text(text, read, score, show), **told})
    return out


def recovered_so_far(so_far: SoFar, batch: Batch, vocabulary: Vocabulary, show: bool) -> dict[str, Any]:
    """What an attack has read so far of the first text of ``batch``, as ``recovered`` says it, with ``OPEN`` for each place
    that is still open in what was read.

    Of as many texts as there are in the batch, it takes the one that ``recovered`` would.
    """
    tokens = so_far.tokens[: len(batch.texts)]
    _, place = paired(batch.seen, [vocabulary.text(t) for t in tokens], rouge("rouge1").score)[0]
    ids = tokens[place] if place >= 0 else ()
    runs = [(there, list(some)) for there, some in groupby(ids, key=lambda t: t != UNKNOWN)]
    found = [vocabulary.text(some) if there else [OPEN] * len(some) for there, some in runs]
    read = " ".join(text for text in found if isinstance(text, str))
    shown = [[text if show else " ".join(MASK for _ in text.split())] if isinstance(text, str) else text for text in found]
    row = _recovered_text(batch.texts[0], read, 0.0, show)
    return {"words": row["words"], "read": " ".join(s for some in shown for s in some if s)}


def recovered_texts(guess: TokenReading, truth: ServiceTranscript, show: bool) -> list[dict[str, Any]]:
    """The same for the texts sent to a service, with the first guess at each token."""
    text, metric = truth.vocabulary.text, rouge("rouge1")
    pairs = [(text(ids), text(ranked[:, 0].tolist())) for ids, ranked in zip(truth.ids, guess.ranked, strict=True)]
    return [_recovered_text(sent, read, metric.score(sent, read), show) for sent, read in pairs]


def _recovered_text(text: str, read: str, score: float, show: bool) -> dict[str, Any]:
    words = [[w if show else MASK, hit, hurts] for w, hit, hurts in marked_words(text, read)]
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
    return int(str(message.header.get("sent_bytes", whole)))


def versions() -> dict[str, str]:
    """The versions of the libraries that the figures depend on."""
    found = {"python": platform.python_version()}
    for name in STORED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found

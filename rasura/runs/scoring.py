"""What is made of a guess: its scores, what was read of each example, and the versions that the figures depend on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rasura.core.interfaces import Metric
from rasura.core.values import Reconstruction, Transcript
from rasura.data.images import data_url
from rasura.metrics.image import paired_images, ssim
from rasura.metrics.intervals import mean_or_interval
from rasura.metrics.matching import paired, read_texts
from rasura.metrics.sensitive import marked_words
from rasura.metrics.text import rouge


def score(metric: Metric[Reconstruction], guess: Reconstruction, truth: Transcript) -> dict[str, Any]:
    """The values of ``metric`` for every example, their mean with its interval, and the worst of them."""
    values = [float(v) for v in metric(guess, truth)]
    mean, low, high = mean_or_interval(values, metric.bounds)
    there = [v for v in values if v == v]
    worst = (max if metric.higher_is == "worse" else min)(there, default=float("nan"))
    return {
        "per_record": values, "mean": mean, "low": low, "high": high, "worst": worst, "n": len(there),
        "unit": metric.unit, "higher_is": metric.higher_is, "bounds": metric.bounds,
    }  # fmt: skip


def recovered(guess: Reconstruction, truth: Transcript, show: bool) -> list[dict[str, Any]]:
    """What was read of each text, word by word: (word, read back?, sensitive?); masked unless ``show``.

    Of images, both as ``data:`` URLs; unless ``show``, only how alike they are.
    """
    if guess.images is not None:
        return _recovered_images(guess, truth, show)
    texts = read_texts(guess, truth)
    metric = rouge("rouge1")
    out = []
    for text, (score, place) in zip(truth.text_batch.texts, paired(truth.text_batch.seen, texts, metric.score)):
        read = texts[place] if place >= 0 else ""
        words = [[w if show else "█" * len(w), hit, hurts] for w, hit, hurts in marked_words(text, read)]
        shown = read if show else " ".join("█" * len(w) for w in read.split())
        sent = text if show else " ".join(str(w[0]) for w in words)
        out.append({"sent": sent, "read": shown, "words": words, "score": score})
    return out


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


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"python": platform.python_version()}
    for name in ("rasura", "torch", "transformers", "tokenizers", "numpy", "rouge-score"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found

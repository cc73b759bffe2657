"""Values of metrics as the tables and figures of studies have them: names, scales, ranges, means with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isnan, nan
from statistics import fmean
from typing import Any, NamedTuple

from rasura.metrics.intervals import crossed_interval
from rasura.report.pooled import pooled
from rasura.report.scores import means_of, notes_of, together


def spread_text(found: Sequence[float | None], metric: str) -> str:
    """The mean of a figure over seeds, with its range where there are several; a word where one was not measured."""
    scale, digits = SCALES.get(metric, SHARE)
    values = [v for v in found if v is not None and v == v]
    if len(values) < len(found):
        return "not measured"
    mean, low, high = (scale * v for v in (sum(values) / len(values), min(values), max(values)))
    return f"{mean:.{digits}f}" + (f" [{low:.{digits}f}, {high:.{digits}f}]" if len(values) > 1 else "")


def row_of(cells: Iterable[Any]) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


NAMES = {
    "top1": "top-1",
    "top3": "top-3",
    "bag_f1": "bag F1",
    "answer_top1": "answer top-1",
    "answer_rougeL": "answer R-L",
    "continuation_rouge1": "continuation R-1",
    "continuation_rougeL": "continuation R-L",
    "rouge1": "R-1",
    "rouge2": "R-2",
    "rougeL": "R-L",
    "mcc": "MCC",
    "f1": "F1",
    "leakage": "leakage at its own threshold",
    "mse": "MSE",
    "psnr": "PSNR",
    "auc": "AUC",
    "embedding_distance": "embedding distance",
}


SHARE = (100, 1)


SCALES = {"loss": (1, 2), "embedding_distance": (1, 3), "perplexity": (1, 2), "mse": (1, 3), "psnr": (1, 1), "ssim": (1, 2)}
"""Factor and digits of metrics that are not fractions. Fractions are given in percent."""

BOUNDS: Mapping[str, tuple[float, float] | None] = {
    "loss": None, "perplexity": None, "lpips": None, "embedding_distance": None, "psnr": (0.0, 100.0),
    "ssim": (-1.0, 1.0), "sentence_cosine": (-1.0, 1.0), "mcc": (-1.0, 1.0),
}  # fmt: skip
"""Ranges of metrics that are not in [0, 1]; None for those without one."""


ENOUGH = 5
"""Values, one for each group of texts that share no update, from which on a figure has an interval worth showing."""


class Values(NamedTuple):
    """The values of a metric that count once each, one for every group of texts that share no update; and of how many
    ``texts`` they are."""

    draws: list[float]
    texts: int

    def text(self, metric: str) -> str:
        """Their mean with its 95 % interval."""
        return level_text(level_of(self.draws, metric), metric)


def values_of(records: Iterable[Mapping[str, Any]], metric: str, side: str) -> Values:
    """Values of a metric, one for each group of texts that were sent together, as in the report: the mean over its texts
    of their means over attempts with all seeds. An attempt that failed has the score of guessing. On the ``side`` blind,
    guessing at the same texts: none where the attack crashed or did not apply."""
    records, found = list(records), dict[int, list[float]]()
    for r in records:
        scores = r[side] if r["status"] == "ok" else r["blind"] if r["status"] == "failed" else {}
        values = scores.get(metric, {}).get("per_record", [])
        for note, value in zip(notes_of(r), values, strict=bool(values)):
            if value is not None:
                found.setdefault(note, []).append(value)
    means = {note: fmean(some) for note, some in found.items()}
    return Values(means_of(means, together(records, means)), len(means))


def seeds_of(records: Iterable[Mapping[str, Any]]) -> int:
    """With how many seeds each text has a value: of a row that is not finished, those of the text with the fewest."""
    tried = seeds_by_text(r for r in records if r["status"] in ("ok", "failed"))
    return min(map(len, tried.values()), default=0)


def seeds_by_text(records: Iterable[Mapping[str, Any]]) -> dict[int, set[int]]:
    """The seeds with which each text was attacked, by its number."""
    tried: dict[int, set[int]] = {}
    for r in records:
        for note in notes_of(r):
            tried.setdefault(note, set()).add(r["seed"])
    return tried


def level_of(values: Sequence[float], metric: str) -> tuple[float, float, float]:
    """Mean of ``values``, each of which counts once, and the ends of its interval, in the unit that is shown; NaN where
    there are none.

    A metric without a range has no interval, and fewer than ``ENOUGH`` values have none: its ends are NaN.
    """
    level, (scale, _) = pooled(values, BOUNDS.get(metric, (0.0, 1.0))), SCALES.get(metric, SHARE)
    if level is None:
        return nan, nan, nan
    low, high = (level.low, level.high) if len(values) >= ENOUGH else (nan, nan)
    return scale * level.mean, scale * low, scale * high


def keyed_level(behind_keys: Sequence[Mapping[str, Any]], metric: str) -> tuple[float, float, float]:
    """As ``level_of``, of records of the same texts behind several keys: the interval is over keys and texts. NaN for an
    attack that read behind some keys only, and for a metric without a range."""
    rows = [r["scores"].get(metric, {}).get("per_record", []) for r in behind_keys]
    if len(rows) == 1:
        return level_of([v for v in rows[0] if v is not None], metric)
    bounds, (scale, _) = BOUNDS.get(metric, (0.0, 1.0)), SCALES.get(metric, SHARE)
    if bounds is None or not all(rows) or len({len(row) for row in rows}) > 1:
        return nan, nan, nan
    every = [[nan if v is None else v for v in row] for row in rows]
    mean, low, high = crossed_interval(every, low=bounds[0], high=bounds[1])
    return scale * mean, scale * low, scale * high


def level_text(level: tuple[float, float, float], metric: str) -> str:
    """A ``level`` of a metric, its mean with the 95 % interval."""
    mean, low, high = level
    if isnan(mean):
        return "–"
    digits = SCALES.get(metric, SHARE)[1]
    if isnan(low):
        return f"{mean:.{digits}f}"
    ends = max(0, digits - 1)
    return f"{mean:.{digits}f} [{low:.{ends}f}, {high:.{ends}f}]"

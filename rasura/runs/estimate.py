"""How long an audit takes: what each attack costs on MiniLM, scaled by this model's measured step and the texts' lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rasura.core.batches import Batch
from rasura.core.specs import AttackSpec
from rasura.registry import Adversaries
from rasura.runs.cells import Cell

REFERENCE_SECONDS = 0.07
"""CPU seconds of one step of MiniLM (a 6-layer BERT) on a text of ``REFERENCE_TOKENS``, where the attacks' ``seconds`` were
measured."""

REFERENCE_TOKENS = 11

BESIDE = 0.1
"""CPU seconds of a cell beside the attack and the step: the blind guess and the metrics."""

FIRST = 5.0
"""CPU seconds of the first cell of a process beyond that: what the metrics read once, such as WordNet."""


@dataclass(frozen=True)
class StepTime:
    """CPU seconds of a forward and backward pass, as a straight line over the number of tokens."""

    start: float
    per_token: float

    def __call__(self, tokens: int) -> float:
        """The seconds of a step on so many tokens."""
        return self.start + self.per_token * tokens


def measured_step(take: Callable[[Batch], object], batches: Sequence[Batch]) -> StepTime:
    """From two steps, on the batches with the fewest and the most tokens, after one to warm up. ``take`` takes a step."""
    ordered = sorted(batches, key=_tokens)
    few, many = ordered[0], ordered[-1]
    _seconds(take, few)
    fast, slow = _seconds(take, few), _seconds(take, many)
    more = _tokens(many) - _tokens(few)
    per_token = max(0.0, slow - fast) / more if more else 0.0
    return StepTime(max(0.0, fast - per_token * _tokens(few)), per_token)


def _tokens(batch: Batch) -> int:
    return int(batch.input_ids.numel())


def _seconds(take: Callable[[Batch], object], batch: Batch) -> float:
    before = time.process_time()
    take(batch)
    return time.process_time() - before


def cell_seconds(
    cell: Cell,
    tokens: int,
    level: str,
    step: StepTime,
    attacks: Mapping[str, AttackSpec],
    known_by: Adversaries,
    *,
    causal: bool = False,
) -> float:
    """Rough CPU seconds of ``cell``, whose batch has so many ``tokens`` in all; ``known_by``: who knows its protection.
    ``causal``: the model predicts the next token, whose texts are told apart one by one."""
    own, scale = step(tokens), tokens / REFERENCE_TOKENS
    pairs = 0 if causal or cell.batch_size == 1 else cell.batch_size * tokens

    def cost(spec: AttackSpec) -> float:
        several = max(1.0, pairs / spec.pairs) if spec.pairs else 1.0
        return float(spec.seconds * spec.work[level] * (own / REFERENCE_SECONDS) * scale**spec.growth * several)

    spec = attacks[cell.attack]
    seconds = cost(spec)
    if (portfolio := spec.portfolio) is not None:
        beyond = {*portfolio.always, *portfolio.left_out.get(level, ())}
        if hard := {a for a in known_by.attacks if a in attacks} - portfolio.always:
            # Nothing is certain there, so that the portfolio runs to its end.
            ends = portfolio.instead if portfolio.instead in hard - beyond else portfolio.last
            seconds += sum(cost(attacks[a]) for a in {*(hard - beyond), ends})
    return own + BESIDE + seconds


def image_seconds(cell: Cell, level: str, attacks: Mapping[str, AttackSpec]) -> float:
    """Rough CPU seconds of a cell on images."""
    spec: Any = attacks[cell.attack]
    return float(spec.seconds * spec.work[level] * cell.batch_size)

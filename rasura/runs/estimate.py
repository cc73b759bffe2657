"""How long an audit takes: what each attack costs on MiniLM, scaled by this model's measured step and the texts' lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rasura import registry
from rasura.core.batches import Batch
from rasura.core.errors import InputError
from rasura.core.specs import AttackSpec
from rasura.registry import Adversaries, Methods
from rasura.runs.cells import Cell
from rasura.victims.models import parts

REFERENCE_SECONDS = 0.07
"""CPU seconds of one step of MiniLM (a 6-layer BERT) on a text of ``REFERENCE_TOKENS``, where the attacks' ``seconds`` were
measured."""

REFERENCE_TOKENS = 11

BESIDE = 0.1
"""CPU seconds of a cell beside the attack and the step: the blind guess and the metrics."""

FIRST = 5.0
"""CPU seconds of the first cell of a process beyond that: what the metrics read once, such as WordNet."""


@dataclass(frozen=True)
class Load:
    """Of a batch: ``padded``, the entries of its ids; ``tokens``, those that belong to texts; ``inputs``, the different
    words and places among these. ``width``: how many inputs a layer of the model has; None if that is not known.
    ``frozen``: whether the word embedding is, as where only adapters are trained.

    The inputs of block 0 span at most as many dimensions as there are words and places. Those of the layers behind it are
    one for each token of each text. Only while these are fewer than ``width`` can an attack tell the texts apart.
    """

    padded: int
    tokens: int
    inputs: int
    width: int | None = None
    frozen: bool = False

    @property
    def apart(self) -> bool:
        """Whether the texts can be told apart by a layer's inputs."""
        return self.width is None or self.tokens < self.width

    @property
    def told(self) -> bool:
        """Whether words can be told by block 0's inputs."""
        return self.width is None or self.inputs < self.width


def load_of(batch: Batch, model: nn.Module) -> Load:
    """The load of ``batch`` on ``model``."""
    width, frozen = None, False
    with suppress(InputError):  # a model without blocks
        known = parts(model)
        width, frozen = known.hidden, not model.get_parameter(known.word_embedding).requires_grad
    there = batch.attention_mask.bool()
    inputs = len(set(batch.input_ids[there].tolist())) + batch.input_ids.shape[1]
    return Load(int(batch.input_ids.numel()), int(there.sum()), inputs, width, frozen)


@dataclass(frozen=True)
class StepTime:
    """CPU seconds of a forward and backward pass, as a straight line over the number of tokens."""

    start: float
    per_token: float

    def __call__(self, tokens: int) -> float:
        """The seconds of a step on so many tokens."""
        return self.start + self.per_token * tokens


def measured_step(take: Callable[[Batch], object], batches: Sequence[Batch]) -> StepTime:
    """From two steps, on the batches with the fewest and the most tokens, after one to warm up. ``take`` takes a step.

    Where all batches have as many tokens, the first is the beginning of one text: a line needs two points.
    """
    ordered = sorted(batches, key=_tokens)
    few, many = ordered[0], ordered[-1]
    if _tokens(few) == _tokens(many):
        few = _beginning(few)
    _seconds(take, few)
    fast, slow = _seconds(take, few), _seconds(take, many)
    more = _tokens(many) - _tokens(few)
    per_token = max(0.0, slow - fast) / more if more else 0.0
    return StepTime(max(0.0, fast - per_token * _tokens(few)), per_token)


def _beginning(batch: Batch) -> Batch:
    """At most ``REFERENCE_TOKENS`` of one text of ``batch``: that with the most."""
    row = int(batch.attention_mask.sum(1).argmax())
    one = slice(row, row + 1)
    types, places = batch.token_type_ids, slice(REFERENCE_TOKENS)
    return replace(
        batch, input_ids=batch.input_ids[one, places], attention_mask=batch.attention_mask[one, places],
        labels=batch.labels[one] if batch.labels.dim() == 1 else batch.labels[one, places],
        token_type_ids=None if types is None else types[one, places], texts=batch.texts[one], seen=batch.seen[one],
    )  # fmt: skip


def _tokens(batch: Batch) -> int:
    return int(batch.input_ids.numel())


def _seconds(take: Callable[[Batch], object], batch: Batch) -> float:
    before = time.process_time()
    take(batch)
    return time.process_time() - before


def cell_seconds(
    cell: Cell,
    load: Load,
    level: str,
    step: StepTime,
    attacks: Mapping[str, AttackSpec],
    known_by: Adversaries,
    *,
    causal: bool = False,
) -> float:
    """Rough CPU seconds of ``cell``, whose batch is the ``load``; ``known_by``: who knows its protection. ``causal``: the
    model predicts the next token, whose texts are told apart one by one.

    What searches for the texts of a batch (``pairs``) ends early where the batch holds more than a layer can tell.
    """
    own, short = step(load.padded), step(REFERENCE_TOKENS)
    several = not causal and cell.batch_size > 1
    pairs = cell.batch_size * load.tokens if several and load.apart else 0

    def cost(spec: AttackSpec) -> float:
        alone = spec.causal_seconds if causal and spec.causal_seconds is not None else spec.seconds
        usual = alone * spec.work[level] / REFERENCE_SECONDS
        if spec.embedding:
            return float(usual * short)
        if spec.pairs and several and load.width is not None and not load.told:
            # It gives up within seconds, or searches for minutes as if dropout were on. Both were seen.
            return float(usual * short * max(1.0, cell.batch_size * load.width / spec.pairs))
        more = max(1.0, pairs / spec.pairs) if spec.pairs else 1.0
        return float(usual * own * (load.tokens / REFERENCE_TOKENS) ** spec.growth * more)

    spec = attacks[cell.attack]
    if spec.protection and cell.defense == "none":
        return own + BESIDE  # it does not run
    seconds = cost(spec)
    if (portfolio := spec.portfolio) is not None:
        hard = {a for a in known_by.attacks if a in attacks} - portfolio.always
        if hard or (several and not load.apart):
            # Nothing is certain there, so that the portfolio runs to its end.
            ends = portfolio.causal if causal else portfolio.instead if portfolio.instead in hard else portfolio.last
            seconds += sum(cost(attacks[a]) for a in {*hard, ends})
        local = registry.parse_update(cell.update)[0]
        if causal and cell.batch_size == 1 and local.adaptive and (local.lora or load.frozen):
            seconds += cost(attacks[portfolio.signs])
    return own + BESIDE + seconds


def all_seconds(
    cells: Sequence[Cell],
    loads: Mapping[str, Load],
    level: str,
    step: StepTime,
    methods: Methods,
    known_by: Mapping[str, Adversaries],
    *,
    causal: bool = False,
) -> dict[str, float]:
    """``cell_seconds`` of each of ``cells``, by its key like ``loads``; ``known_by`` is by protection. The first cell of a
    step has what its protection takes as well, and the first of an attack behind a protection what is learned once."""
    attacks, speed = methods.attacks, step(REFERENCE_TOKENS) / REFERENCE_SECONDS
    found = {c.key: cell_seconds(c, loads[c.key], level, step, attacks, known_by[c.defense], causal=causal) for c in cells}
    for cell in {c.of_step: c for c in reversed(cells)}.values():
        protecting = sum(methods.defenses[name].seconds for name, _ in registry.parts(cell.defense))
        found[cell.key] += protecting * speed * loads[cell.key].tokens / REFERENCE_TOKENS
    for cell in {(c.attack, c.defense): c for c in reversed(cells) if c.defense != "none"}.values():
        spec = attacks[cell.attack]
        found[cell.key] += spec.once * spec.work[level] * speed
    return found


def image_seconds(cell: Cell, level: str, attacks: Mapping[str, AttackSpec]) -> float:
    """Rough CPU seconds of a cell on images."""
    spec: Any = attacks[cell.attack]
    return float(spec.seconds * spec.work[level] * cell.batch_size)

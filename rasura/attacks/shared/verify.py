"""Verification of guesses. Only this module assigns ``verified`` and ``span``.

A guess is proven if the update that it would have caused equals the observed one, and the update of every decoy clearly does
not. The visible entries must distinguish the guess from texts that hardly differ, and be too many for a chance fit. Each
kind of proof is defined in ``docs/attacks.md``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain

import torch
from torch import Tensor

from rasura.attacks.shared.comparing import apart, relative_error, scale, told
from rasura.attacks.shared.copies import known, labels_once, named_once, one_fewer, read_once, without_stated_labels
from rasura.attacks.shared.decoys import decoys, free_places, of_other_lengths, weakest
from rasura.attacks.shared.dummies import ordinary_ids
from rasura.attacks.shared.labelings import labelings, may_be_turned, pad, targets, turned
from rasura.attacks.shared.twins import Texts, twins
from rasura.core.interfaces import AttackFailed
from rasura.core.mechanisms import typed
from rasura.core.rng import generator
from rasura.core.updates import announced_update, changed
from rasura.core.values import UNKNOWN, Confidence, Grant, Observation, Parameter, Proof, Reconstruction, Vocabulary
from rasura.victims.positions import positions

VERIFIED = 1e-3
"""Largest relative error of a verified guess. Exact guesses in float32 stay below 2e-4, whatever the number of threads; the
largest are those of Gemma 3, whose gradient is added up over 262,144 words. They stay there where the update was rounded to
16 bits (errors of 5e-4 to 4e-3 an entry average out only with an exact guess at bf16: those stay ``span``). One wrong token
in a text was never seen below 1e-2 on trained models, 5e-3 on tiny random ones."""

ROWS_VERIFIED = 1e-4
"""Largest relative error with which place rows add up to a word's row: float32 leaves 1e-7 to 1e-6."""

SMOOTHED = 0.25
"""A text of two classes whose label has a lower probability may have the other one under label smoothing of up to a half."""

LARGE, HELD = 2**20, 0.1
"""Updates of more entries are told from a decoy's by their last tensors where these suffice: those that hold this fraction
of the squared norm. Their gradients take a short way back."""


def _inputs(
    seen: Observation, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None
) -> tuple[dict[str, Tensor], Tensor | None]:
    """``tokens`` as keyword arguments of the model, without labels; and the segments, None where all are the first."""
    ids, mask = pad(tokens, seen.vocabulary.pad_id or 0)
    # GPT-2 adds a word embedding for segment 0 when it is told of segments, so say nothing where there are none.
    type_ids = pad(types, 0)[0] if types is not None and any(any(t) for t in types) else None
    return {"input_ids": ids, "attention_mask": mask} | ({} if type_ids is None else {"token_type_ids": type_ids}), type_ids


def _fitted(
    seen: Observation, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None
) -> tuple[float, Tensor | None]:
    """The least relative error of ``tokens`` over the labels that can be tried, and the labels that reach it; infinite if
    the training cannot be repeated, since the order of its mini-batches is hidden, or if the model takes no such texts."""
    most = positions(seen.model)
    if most is not None and any(len(t) > most for t in tokens):
        return math.inf, None
    if not tokens or any(not t or min(t) < 0 for t in tokens) or not announced_update(seen).repeatable(len(tokens)):
        return math.inf, None
    inputs, type_ids = _inputs(seen, tokens, types)
    best: tuple[float, Tensor | None] = (math.inf, None)
    with suppress(ValueError):  # of T5's and BART's classifiers, which take no text without the token for its end
        for labels in labelings(seen, inputs["input_ids"], inputs["attention_mask"], type_ids):
            error = _error(seen, inputs | {"labels": labels})
            if error < best[0]:
                best = error, labels
    return best


def _error(seen: Observation, inputs: Mapping[str, Tensor]) -> float:
    guess, _ = changed(seen.model, inputs, list(seen.gradients), announced_update(seen))
    return relative_error(guess, seen.gradients, seen.visible, turned=_either(seen))


def _either(seen: Observation) -> bool:
    """Whether the update may have the opposite sign and nothing else tells: a classifier's labels turn around with it."""
    return seen.task == "causal" and seen.message.sign == "unknown"


class _Decoys:
    """How far the updates of decoys are from the observed one, at least.

    Of a large gradient the last tensors are tried alone: what they miss, the whole misses too.
    """

    def __init__(self, seen: Observation, shown: int) -> None:
        """``shown``: the ``entries`` of ``seen``."""
        self.seen, self.last, self.held = seen, [], 0.0
        if shown <= LARGE or announced_update(seen).kind != "fedsgd":
            return
        squares = {
            n: float((g if n not in seen.visible else g[seen.visible[n]]).norm()) ** 2 for n, g in seen.gradients.items()
        }
        total = sum(squares.values())
        for name in reversed(squares):
            self.last.append(name)
            self.held += squares[name] / total
            if self.held >= HELD:
                return

    def missed(self, inputs: Mapping[str, Tensor], error: float) -> float:
        """The error of a decoy ``inputs``; a lower bound of it where that is apart from the guess's ``error``."""
        if self.last:
            guess, _ = changed(self.seen.model, inputs, self.last)
            observed = {n: self.seen.gradients[n] for n in self.last}
            # At the best scale nothing is missed by more than all of it.
            missed = relative_error(guess, observed, self.seen.visible, turned=_either(self.seen))
            bound = min(missed, 1.0) * math.sqrt(self.held)
            if apart(error, bound):
                return bound
        return _error(self.seen, inputs)


def _flat(seen: Observation, labels: Tensor | None) -> tuple[int, ...] | None:
    return None if labels is None or seen.task == "causal" else tuple(int(y) for y in labels)


def check(
    seen: Observation, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
) -> tuple[float, tuple[int, ...] | None]:
    """The smallest relative error with which ``tokens`` reproduce the observed gradient, and the labels that give it.

    ``(inf, None)`` if the guess has holes, or no labels can be tried. Meaningless under active dropout. A small error alone
    proves nothing: see ``prove``.
    """
    error, labels = _fitted(seen, tokens, types)
    return error, _flat(seen, labels)


def entries(seen: Observation) -> int:
    """Visible entries of the update that are not zero."""
    shown = 0
    for name, gradient in seen.gradients.items():
        mask = seen.visible.get(name)
        shown += int((gradient if mask is None else gradient[mask]).count_nonzero())
    return shown


def prove(seen: Observation, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Proof | None:
    """The proof ``gradient`` of ``tokens``; None where the update does not prove them.

    Their recomputed update must be within ``VERIFIED`` of the observed one, that of every decoy must miss it by ``MARGIN``
    times as much (the last tensors of a large one may show that), and the visible entries must be too many for a chance fit.
    None under active dropout, since nothing can be recomputed there, and for a text of special tokens alone, which has no
    decoys. Copies of a text are proven only where the batch size is known and the update tells how many there are: weights
    of clients, and of parts of a batch, look the same. Else the proof names it once, or is none. It holds no labels where
    the update does not tell them, since its sign is not known, or only stated while its size differs (``Message.sign``).
    """
    guess: Texts = tuple(tuple(int(t) for t in text) for text in tokens)
    fewer, bare = one_fewer(guess, types), without_stated_labels(seen)
    if fewer and (proof := prove(bare, *named_once(guess, types))) is not None:
        return proof
    error, labels = _fitted(seen, guess, types)
    if not error < VERIFIED or labels is None or not all(apart(error, _fitted(bare, *one)[0]) for one in fewer):
        return None
    free = free_places(guess, seen.vocabulary)
    if not all(free):
        return None
    inputs = _inputs(seen, guess, types)[0]
    with torch.no_grad():
        logits = seen.model(**inputs).logits
    weak = weakest(logits, labels, inputs["attention_mask"])
    shown = entries(seen)
    min_decoy, far = math.inf, _Decoys(seen, shown)
    alike = decoys(seen, guess, inputs=inputs | {"labels": labels}, weakest=weak, rng=generator(0, "decoys"))
    for decoy, own in chain(of_other_lengths(seen, guess, types, logits), ((decoy, types) for decoy in alike)):
        other = _inputs(seen, decoy, own if seen.task != "causal" else None)[0]
        other["labels"] = labels if seen.task != "causal" else targets(other["input_ids"], other["attention_mask"])
        missed = far.missed(other, error)
        if not apart(error, missed):  # nor is one whose update is no number
            return None
        min_decoy = min(min_decoy, missed)
    if not told(shown, error, min_decoy, sum(map(len, free)), len(ordinary_ids(seen.vocabulary))):
        return None
    named = _flat(seen, labels if _signed(seen, inputs, logits, labels, error) else None)
    if fewer and not known(seen, Grant.BATCH_SIZE):
        guess, named = named_once(guess, types)[0], labels_once(guess, types, named)
    return _worded(Proof("gradient", guess, error, min_decoy, named), seen.vocabulary)


def _signed(seen: Observation, inputs: Mapping[str, Tensor], logits: Tensor, labels: Tensor, error: float) -> bool:
    """Whether the update tells ``labels``: its sign is known, or they are, or no other labels fit it turned around.

    A sign that is only stated is believed where the update has the size that ``labels`` give, which no label smoothing
    leaves, or was clipped. With two classes, the size alone tells the labels of one text, of which there may be copies:
    each scales its gradient. It alone tells labels that the model finds unlikely, too (``SMOOTHED``).
    """
    sign = seen.message.sign
    if sign == "known" or known(seen, Grant.LABELS) or seen.task == "causal":
        return True
    update = announced_update(seen)
    if sign == "stated":
        guess, _ = changed(seen.model, {**inputs, "labels": labels}, list(seen.gradients), update)
        clipped = Grant.MECHANISM in seen and any(math.isfinite(typed(m).largest_norm) for m in seen.mechanism)
        ids, probabilities = inputs["input_ids"], logits.softmax(-1).gather(-1, labels[:, None])
        single = known(seen, Grant.BATCH_SIZE) and seen.batch_size == 1
        copies, unlikely = not single and bool((ids == ids[0]).all()), bool((probabilities < SMOOTHED).any())
        by_size_alone = logits.shape[-1] == 2 and (copies or unlikely)
        if (clipped and not by_size_alone) or abs(scale(guess, seen.gradients, seen.visible) - 1) < VERIFIED:
            return True
    if may_be_turned(logits, labels):
        return False
    guess, _ = changed(seen.model, {**inputs, "labels": turned(logits, labels)}, list(seen.gradients), update)
    return apart(error, relative_error({n: -g for n, g in guess.items()}, seen.gradients, seen.visible))


def prove_rows(
    tokens: Sequence[int], error: float, min_decoy: float, shown: int, distinct: int, vocabulary: Vocabulary
) -> Proof | None:
    """The proof ``embedding-rows`` of one text: its place rows add up to its word rows, and in no other arrangement.

    ``error``: the largest relative error of a word's row; ``min_decoy``: the smallest after moving or exchanging places;
    ``shown``: the fewest numbers that a place is told by; ``distinct``: how many words the places were dealt to.
    """
    if UNKNOWN in tokens or not error < ROWS_VERIFIED or not apart(error, min_decoy):
        return None
    if not told(shown, error, min_decoy, len(tokens), distinct):
        return None
    return _worded(Proof("embedding-rows", (tuple(tokens),), error, min_decoy), vocabulary)


def _worded(proof: Proof, vocabulary: Vocabulary) -> Proof | None:
    """``proof``; None where a text of it holds special tokens alone, since nothing of what that text says is known."""
    return proof if all(free_places(proof.tokens, vocabulary)) else None


def verified(proof: Proof, details: Mapping[str, Parameter]) -> Reconstruction:
    """The reconstruction that ``proof`` proves."""
    details = {**details, "proof": proof.name}
    return Reconstruction(
        proof.tokens, "verified", labels=proof.labels, residual=proof.error, details=details, proof=proof
    )  # fmt: skip


def in_span(
    tokens: Texts,
    seen: Observation,
    *,
    believed: bool,
    residual: float | None = None,
    ordered: bool = True,
    details: Mapping[str, Parameter] | None = None,
) -> Reconstruction:
    """``span`` for ``tokens`` that were ``believed`` by the attack's null (``span.null``), else ``matched``.

    A text in order is named once: nothing tells how many copies of it there are. ``span`` leaves the places open of words
    that have twins (``attacks.shared.twins``); ``details`` says how many, as ``twins``, and as ``beginnings`` that the texts
    are ``open_ended``. Raises ``AttackFailed`` where no text holds a word: special tokens are in every update.
    """
    tokens = read_once(tokens, seen.vocabulary.special_ids) if ordered else tokens
    if not _worded_at_all(tokens, seen):
        raise AttackFailed("only special tokens were found, which every text contains")
    details = dict(details or {})
    if believed and (alike := twins(seen, tokens)):
        left = tuple(tuple(UNKNOWN if (k, n) in alike else t for n, t in enumerate(text)) for k, text in enumerate(tokens))
        believed = _worded_at_all(left, seen)
        if believed:
            tokens, details["twins"] = left, len(alike)
    if believed and ordered and open_ended(tokens, seen):
        details["beginnings"] = True
    confidence: Confidence = "span" if believed else "matched"
    return Reconstruction(tokens, confidence, ordered=ordered, residual=residual, details=details)


def open_ended(tokens: Texts, seen: Observation) -> bool:
    """Whether beginnings of ``tokens`` may be texts of their own, whose words stand at the same places: how many texts there
    are is not known, or only stated, and one does not end as the tokenizer ends texts, and only there."""
    end = seen.vocabulary.suffix[-1:]
    alone = known(seen, Grant.BATCH_SIZE)
    return not alone and any([n for n, t in enumerate(text, 1) if t in end] != [len(text)] for text in tokens)


def _worded_at_all(tokens: Texts, seen: Observation) -> bool:
    return any(token != UNKNOWN and token not in seen.vocabulary.special_ids for text in tokens for token in text)

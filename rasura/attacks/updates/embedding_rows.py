"""Embedding rows: the gradient of a trainable word embedding has a row for every word of the batch, and zeros elsewhere.

Melis et al. (2019) read the bag of words from it; the position embedding's gradient gives lengths and, for a single text,
the order (APRIL, Lu et al. 2022). Milliseconds, whatever the model's depth, and active dropout does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from rasura.attacks.shared.verify import ROWS_VERIFIED, in_span, open_ended, prove, prove_rows, verified
from rasura.attacks.updates.pursuit.fits import are_signs
from rasura.attacks.updates.row_evidence import FLOOR, is_noisy, max_tokens, rows_of_words
from rasura.attacks.updates.tied_rows import without_output_part
from rasura.attacks.updates.trained_rows import opposed, own_output, weights_of, without_decay
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.so_far import tell
from rasura.core.specs import AttackSpec, Home
from rasura.core.values import UNKNOWN, Grant, Observation, Parameter, Reconstruction
from rasura.victims.models import Parts, parts
from rasura.victims.positions import first_position

OUTLIER = 6.0
"""Under noise, a row is there when its norm lies this many robust deviations above the median: no false row in 1e8."""

SAME = ROWS_VERIFIED
"""Relative error within which two rows are equal, and coefficients solve for a row."""


@dataclass(frozen=True)
class Rows:
    """The rows of an embedding's gradient that are there: ``index`` ``(rows,)``, ``values`` and ``mask`` ``(rows, width)``.

    ``noisy``: every row of the gradient was filled, and these stand out of it.
    """

    index: Tensor
    values: Tensor
    mask: Tensor
    noisy: bool

    def __len__(self) -> int:
        return len(self.index)


def present(gradient: Tensor, mask: Tensor | None, noisy: bool) -> Rows:
    """The rows of ``gradient`` ``(rows, width)`` that hold something visible; under noise, those that stand out."""
    norms = gradient.double().norm(dim=1)
    there = norms > FLOOR * norms.max()
    if noisy and bool(there.any()):
        filled = norms[there]
        middle = filled.median()
        spread = 1.4826 * (filled - middle).abs().median()
        there = norms > middle + OUTLIER * spread
    index = there.nonzero().flatten()
    shown = torch.ones_like(gradient[index], dtype=torch.bool) if mask is None else mask[index]
    return Rows(index, gradient[index].double(), shown, noisy)


def order(words: Rows, places: Rows) -> tuple[list[int], bool]:
    """Which word row stands at each place, -1 where that stays open, and whether all of it is solved exactly.

    A word that noise or hidden entries leave without a place is put where it fits best.

    For one text the gradient at place i is the place's row, and a word's row is the sum over its places, so that
    ``words = A @ places`` with one 1 in each column of A. A word that occurs once equals its place's row; the repeated ones
    are solved for with what is left.
    """
    taken = [-1] * len(places)
    if not words.noisy and not places.noisy:
        for place in range(len(places)):
            both = words.mask & places.mask[place]
            gap = ((words.values - places.values[place]) * both).norm(dim=1)
            size = torch.maximum((words.values * both).norm(dim=1), (places.values[place] * both).norm())
            same = ((gap < SAME * size) & (both.sum(1) >= 2)).nonzero().flatten()
            if len(same) == 1 and int(same[0]) not in taken:
                taken[place] = int(same[0])
    open_places = [i for i, t in enumerate(taken) if t < 0]
    open_words = [w for w in range(len(words)) if w not in taken]
    exact = not words.noisy and not places.noisy
    claims: dict[int, list[tuple[float, int]]] = {i: [] for i in open_places}
    if open_places:
        for word in open_words:
            coefficients, error = _solve(words, word, places, open_places)
            if not words.noisy and error > SAME:
                exact = False
                continue
            for place, c in zip(open_places, coefficients):
                if c > 0.5:
                    claims[place].append((c, word))
    else:
        exact = exact and not open_words
    for place, claimed in claims.items():
        exact = exact and len(claimed) == 1
        if len(claimed) == 1 or (claimed and words.noisy):
            taken[place] = max(claimed)[1]
    return _placed(words, places, taken), exact


def _placed(words: Rows, places: Rows, taken: list[int]) -> list[int]:
    """Put every word that has no place at the open place whose row is most like its own, best fits first."""
    open_places = [i for i, t in enumerate(taken) if t < 0]
    left = [w for w in range(len(words)) if w not in taken]
    fits = []
    for word in left:
        both = words.mask[word] & places.mask[open_places]
        a, b = words.values[word] * both, places.values[open_places] * both
        cosine = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)).clamp_min(1e-300)
        fits += [(float(c), word, place) for c, place in zip(cosine, open_places)]
    for _, word, place in sorted(fits, key=lambda fit: -fit[0]):
        if taken[place] < 0 and word not in taken:
            taken[place] = word
    return taken


def _solve(words: Rows, word: int, places: Rows, chosen: list[int]) -> tuple[list[float], float]:
    """Coefficients of ``chosen`` places that make up a word's row, and the relative error once rounded to 0 or 1."""
    columns = words.mask[word] & places.mask[chosen].all(0)
    target, basis = words.values[word][columns], places.values[chosen][:, columns]
    scale = basis.norm(dim=1)
    if len(target) < len(chosen) + 2 or not bool((scale > 0).all()):
        return [0.0] * len(chosen), float("inf")
    solved = torch.linalg.lstsq((basis / scale[:, None]).T, target[:, None], driver="gelsd").solution.flatten() / scale
    rounded = (solved > 0.5).double()
    error = (target - rounded @ basis).norm() / target.norm().clamp_min(1e-300)
    return solved.tolist(), float(error)


def told_apart(words: Rows, places: Rows, taken: list[int]) -> tuple[float, float, int]:
    """How well the places ``taken`` by words add up to them, how badly any other arrangement would, and by how many numbers.

    The largest relative error of a word's row; the least one that is left where two places of different words are
    exchanged, or one place is moved to another word; the fewest entries that are visible in a place and in its word.
    """
    error, min_decoy, shown = 0.0, float("inf"), words.values.shape[1]
    sizes = (words.values * words.mask).norm(dim=1)
    owner = torch.tensor(taken)
    for word in range(len(words)):
        own = (owner == word).nonzero().flatten()
        both = words.mask[word] & places.mask[own].all(0)
        missed = (words.values[word] - places.values[own].sum(0)) * both
        error = max(error, float(missed.norm() / (words.values[word] * both).norm().clamp_min(1e-300)))
        shown = min(shown, int(both.sum()))
    for place, word in enumerate(taken):
        both = places.mask & places.mask[place] & words.mask[word]
        apart = ((places.values - places.values[place]) * both).norm(dim=1)[owner != word]
        if len(apart):
            # What an exchange takes from one word it adds to the other: the larger of both relative errors shows it.
            min_decoy = min(min_decoy, float((apart / torch.minimum(sizes[word], sizes[owner[owner != word]])).min()))
        own_size = (places.values[place] * places.mask[place] * words.mask[word]).norm()
        min_decoy = min(min_decoy, float(own_size / sizes[word]))
    return error, min_decoy, shown


class EmbeddingRows:
    """Reads the words from the word embedding's gradient, and their order where a position embedding is trained too.

    One text with positions: its tokens in place, repeats included; ``verified`` (proof ``embedding-rows``) when the place
    rows reproduce every word row exactly, and no other arrangement of them does. Texts that are beginnings of this one leave
    the same rows, unless it ends in the tokenizer's only end token; where the batch size is not known, it is then ``span``
    (``beginnings`` in the details) or proven by the gradient. More texts, or no position embedding (Llama): the bag of
    distinct tokens (``ordered=False``), once for every text because it cannot be told apart; ``span`` where its rows look
    like those of words (``row_evidence``), else ``matched``. Under noise the rows that stand out are kept. Of what a
    training changed, the rows that decay does not explain.

    A causal model that ties its output layer to the embedding fills every row; the input rows are separated by the low rank
    of the output part. Its last token enters no loss. It stays ``UNKNOWN`` unless it is the tokenizer's end, and the
    gradient proves that. Of AdamW's changes of such a model, and where the batch has as many tokens as the model has
    dimensions, only the rows that stand out (``matched``).

    Where the word embedding is frozen or sealed, an output layer of its own names words in the same way. Raises
    ``NotApplicable`` where there is none either, ``AttackFailed`` where noise covers every row.
    """

    name = "embedding-rows"
    needs = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses = frozenset({Grant.BATCH_SIZE})

    def __call__(self, seen: Observation, *, rng: Generator, budget: Budget) -> Reconstruction:
        found = parts(seen.model)
        gradient, mask = seen.gradients.get(found.word_embedding), seen.visible.get(found.word_embedding)
        size = seen.batch_size if Grant.BATCH_SIZE in seen else None
        if gradient is None or (mask is not None and not bool(mask.any())):
            if output := own_output(seen, found):
                return opposed(seen, output, seen.gradients[output].cpu(), size or 1)
            raise NotApplicable("the word embedding's gradient is not in the update: it is frozen, sealed or not sent")
        if not bool(torch.isfinite(gradient).all()):
            raise AttackFailed("the word embedding's gradient holds NaN or infinity")
        gradient, mask = gradient.cpu(), None if mask is None else mask.cpu()
        tied = found.tied and seen.task == "causal"
        if tied and are_signs(seen, gradient):  # AdamW's steps, too
            return opposed(seen, found.word_embedding, gradient, size or 1)
        if not tied:
            gradient = without_decay(gradient, weights_of(seen, found.word_embedding), mask)
        # Tied, every row is filled without noise; where there is noise too, the output part cannot be told apart at all.
        noisy = not tied and is_noisy(gradient, max_tokens(seen))
        places = self._places(seen, found, noisy)
        if tied:
            try:
                basis, there = without_output_part(gradient, mask, rng)
            except AttackFailed:  # as many tokens as dimensions: what follows in the texts may stand out nevertheless
                with suppress(AttackFailed):
                    return opposed(seen, found.word_embedding, gradient, size or 1)
                raise
            values = gradient[there].double()
            values = values - (values @ basis) @ basis.T
            words = Rows(there, values, torch.ones_like(values, dtype=torch.bool), False)
            if places is not None:
                clear = places.values - (places.values @ basis) @ basis.T
                places = Rows(places.index, clear, places.mask, places.noisy)
        else:
            words = present(gradient, mask, noisy)
        if not len(words):
            why = "noise covers every row" if words.noisy else "it is zero"
            raise AttackFailed(f"no word stands out in the word embedding's gradient: {why}")
        tell(lambda: [words.index.tolist()] * (size or 1), ordered=False)
        details = {"distinct_tokens": len(words), "noisy": words.noisy, "tied": tied}
        if places is not None and len(places):
            first = min(first_position(seen.model) or 0, int(places.index[0]))
            details["longest"] = int(places.index[-1]) - first + 1 + (seen.task == "causal")
            # Of an unknown number of texts only an exact solution says that it was one.
            if size in (None, 1):
                taken, exact = order(words, places)
                if (exact or size == 1) and set(range(len(words))) <= set(taken):
                    tokens = self._tokens(seen, words, places, taken, first)
                    tell(lambda: [tokens])
                    return self._judged(seen, tokens, words, places, taken, exact, details)
        bag = tuple(sorted(int(i) for i in words.index))
        bags = (bag,) * (size or 1)
        believed = not words.noisy and rows_of_words(seen, words.index, gradient, mask)
        return in_span(bags, seen, believed=believed, ordered=False, details=details)

    @staticmethod
    def _judged(
        seen: Observation, tokens: tuple[int, ...], words: Rows, places: Rows, taken: list[int], exact: bool,
        details: Mapping[str, Parameter],
    ) -> Reconstruction:  # fmt: skip
        if not exact:
            return in_span((tokens,), seen, believed=False, details=details)
        if seen.task == "causal":  # the last token has no row: the tokenizer's end is a guess, which the gradient may prove
            if (proof := prove(seen, [tokens])) is not None:
                return verified(proof, details)
            return in_span(((*tokens[:-1], UNKNOWN),), seen, believed=True, details=details)
        proof = prove_rows(tokens, *told_apart(words, places, taken), len(words), seen.vocabulary)
        if proof is None:
            return in_span((tokens,), seen, believed=False, details=details)
        if open_ended((tokens,), seen) and (proof := prove(seen, [tokens])) is None:
            return in_span((tokens,), seen, believed=True, details=details)
        return verified(proof, details)

    @staticmethod
    def _places(seen: Observation, found: Parts, noisy: bool) -> Rows | None:
        name = found.position_embedding
        gradient = None if name is None else seen.gradients.get(name)
        if name is None or gradient is None or not bool(torch.isfinite(gradient).all()):
            return None
        if gradient.shape[1] != seen.gradients[found.word_embedding].shape[1]:
            return None  # OPT with a projection: words and places have rows of different widths, which say nothing together
        mask = seen.visible.get(name)
        gradient = without_decay(gradient.cpu(), weights_of(seen, name), None if mask is None else mask.cpu())
        # A text as long as the model allows fills every row without any noise: what the word embedding shows decides.
        return present(gradient, None if mask is None else mask.cpu(), noisy)

    @staticmethod
    def _tokens(seen: Observation, words: Rows, places: Rows, taken: list[int], first: int) -> tuple[int, ...]:
        tokens = [UNKNOWN] * (int(places.index[-1]) - first + 1)
        for place, word in zip(places.index.tolist(), taken):
            if word >= 0:
                tokens[place - first] = int(words.index[word])
        if seen.task == "causal":
            # The last token predicts nothing, so it has no gradient. The end that the tokenizer puts is a guess.
            tokens.append(seen.vocabulary.suffix[-1] if seen.vocabulary.suffix else UNKNOWN)
        return tuple(tokens)


SPEC = AttackSpec(
    name="embedding-rows",
    about="finds the words in the gradient of the word embedding",
    source="Melis et al. 2019, sec. 4; Lu et al. 2022 (APRIL), sec. 3",
    make=EmbeddingRows,
    seconds=0.4,
    work={"quick": 1.0, "default": 1.0, "paper": 1.0},
    embedding=True,
    home=Home(reads=True),
)

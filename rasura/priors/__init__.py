"""An adversary's knowledge of the language."""

from __future__ import annotations

from functools import lru_cache

from rasura.core.interfaces import Prior
from rasura.core.values import Grant, Observation, Vocabulary
from rasura.priors.causal import CausalPrior
from rasura.priors.ngram import Unigram
from rasura.priors.trigram import Trigram


def language(seen: Observation) -> Prior:
    """A language model if one is granted, otherwise trigrams of the reference text if that is granted, otherwise single
    English words.

    Raises ``InputError`` where neither has a token in the model's vocabulary.
    """
    if Grant.LANGUAGE_MODEL in seen:
        return CausalPrior(*seen.language_model, seen.vocabulary)
    if Grant.REFERENCE_TEXT in seen and seen.reference_text:
        return trigrams(seen.vocabulary, seen.reference_text)
    return _words(seen.vocabulary, ())


def words(seen: Observation) -> Unigram:
    """Single words of the reference text if that is granted, otherwise English words. Raises ``InputError`` as
    ``language``."""
    return _words(seen.vocabulary, seen.reference_text if Grant.REFERENCE_TEXT in seen else ())


# Kept, since every cell of an audit asks for the same: 67,000 texts take five seconds to tokenize.
@lru_cache(maxsize=2)
def trigrams(vocabulary: Vocabulary, texts: tuple[str, ...]) -> Trigram:
    """Trigrams of ``texts``. Raises ``InputError`` where they hold no token of the vocabulary."""
    return Trigram(vocabulary, texts)


@lru_cache(maxsize=2)
def _words(vocabulary: Vocabulary, texts: tuple[str, ...]) -> Unigram:
    return Unigram.of(vocabulary, texts) if texts else Unigram.english(vocabulary)

"""What ``rasura read`` says beside the texts that it read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rasura.core.values import UNKNOWN, Reconstruction, Vocabulary
from rasura.runs.read_request import ReadRequest
from rasura.victims.loading import Victim

OUTSIDE = (
    "the inputs of most of these words lie near the row space of the update, not in it; one possible cause is that the "
    "client had other weights or another dropout"
)


def notes(guess: Reconstruction, victim: Victim, request: ReadRequest) -> tuple[str, ...]:
    """What the texts of ``guess`` do not show, one line each, and what it has otherwise than the ``request`` states."""
    words, texts, batch_size = victim.vocabulary, len(guess.tokens), request.size
    together = not guess.ordered and len(set(guess.tokens)) == 1
    guess, out = _once(guess, request.size)
    out += [OUTSIDE] if guess.details.get("outside") else []
    tokens = [t for text in guess.tokens for t in text if t != UNKNOWN and t not in words.special_ids - words.unknown_ids]
    unknown, twins = sum(t in words.unknown_ids for t in tokens), guess.details.get("twins")
    out += [f"{unknown} of {len(tokens)} tokens are words that the tokenizer does not know"] if unknown else []
    if twins:
        of = len(tokens) + int(twins)
        out.append(f"{twins} of {of} tokens stay open, since the embeddings of other words are equal or nearly so")
    if guess.details.get("beginnings"):
        out.append(f"texts that are a beginning of {'this one' if texts == 1 else 'these'} may be in the update as well")
    if others := guess.details.get("other_words"):
        out.append(f"other words that stand out in the update, which the texts do not show: {others}")
    out += _open_ends(guess, victim)
    out += _left_out(guess, words)
    if batch_size is not None and 0 < texts < batch_size and not together:
        # Even a proof says nothing of these: the update is the same without them.
        silent = "a text of one token" if victim.task == "causal" else "a text of which the model is certain"
        missing = f"{silent} may leave nothing in the update" if guess.confidence == "verified" else "others may be missing"
        out.append(f"{texts} of {batch_size} texts; equal texts are named once, and {missing}")
    if without := guess.details.get("without"):
        out.append(f"read without what was stated ({without}), with which nothing was proven")
    out += _against(guess, request)
    if stopped := guess.details.get("stopped"):
        out.append(f"stopped during {stopped}; attacks that did not end may read more")
    by_gradient = guess.details.get("proof") == "gradient"  # that of embedding rows tells no labels, whatever the sign
    if by_gradient and guess.labels is None and victim.task != "causal":
        which = "; --update fedsgd says that it holds a gradient"
        if request.update is not None:
            which = f", and its size is not that of the update {request.update}"
        out.append(f"the labels depend on the sign of the file{which}")
    return tuple(out)


def _open_ends(guess: Reconstruction, victim: Victim) -> list[str]:
    """Where the texts of ``guess`` may begin earlier or go on, one line each."""
    names = {"begins_earlier": "begin earlier", "ends_later": "end later"}
    sides = " or ".join(said for name, said in names.items() if guess.details.get(name))
    which = "the text" if len(guess.tokens) == 1 else "the longest text"
    out = [f"{which} may {sides}: one more word there leaves nothing in the update"] if sides else []
    if guess.details.get("ends_in_padding"):
        end = victim.tokenizer.eos_token
        out.append(f"whether a text ends in {end} stays open: the model takes it for padding there")
    return out


def _against(guess: Reconstruction, request: ReadRequest) -> list[str]:
    """What the ``request`` states and the proof of ``guess`` excludes, one line each."""
    if guess.confidence != "verified":
        return []
    texts, lengths = len(guess.tokens), [*map(len, guess.tokens)]
    out = [f"the stated batch size is {request.size}; the update proves {texts} texts"] * (texts > (request.size or texts))
    for name, stated, proven in (("lengths", request.lengths, lengths), ("labels", request.labels, guess.labels)):
        if stated is not None and proven is not None and texts >= len(stated) and sorted(stated) != sorted(proven):
            out.append(f"the stated {name} are {_listed(stated)}; the update proves {_listed(proven)}")
    return out


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(", ".join(map(str, sorted(numbers))).rsplit(", ", 1))


def _once(guess: Reconstruction, size: int | None) -> tuple[Reconstruction, list[str]]:
    """``guess`` with one copy of a bag of the words of all texts, and the line that says so. Nothing proves that there are
    as many as the stated ``size``."""
    copies = len(guess.tokens)
    if guess.ordered or copies == 0:
        return guess, []
    if len(set(guess.tokens)) > 1:
        return guess, ["the words of each text are in no known order, and a repeated word may stand once"]
    if size is None or "batch size" in str(guess.details.get("without")):
        line = "the number of texts is not known; each line holds the words of all of them together, in no known order"
    elif size == 1:
        line = "the words of the one stated text are in no known order"
    else:
        line = f"each line holds the words of all {size} stated texts together, in no known order"
    twins = int(guess.details.get("twins") or 0) // copies
    guess = replace(guess, tokens=guess.tokens[:1], details={**guess.details, "twins": twins})
    return guess, [f"{line}; a repeated word may stand once"]


def _left_out(guess: Reconstruction, words: Vocabulary) -> list[str]:
    """What the tokens hold and the texts do not show: open places, and special tokens that do not frame a text."""
    places = sum(t == UNKNOWN for text in guess.tokens for t in text) - int(guess.details.get("twins") or 0)
    out = [f"places that stay open, which the texts do not show: {places}"] if places > 0 else []
    inner = [t for text in guess.tokens for t in _unframed(text, words) if t in words.special_ids - words.unknown_ids]
    if inner and guess.ordered:
        named = ", ".join(words.decode([t]).strip() for t in sorted(set(inner)))
        out.append(f"special tokens inside the texts, which do not show them: {len(inner)} ({named})")
    return out


def _unframed(text: Sequence[int], words: Vocabulary) -> Sequence[int]:
    """``text`` without what the tokenizer puts around it."""
    start = len(words.prefix) if tuple(text[: len(words.prefix)]) == words.prefix else 0
    end = len(text) - len(words.suffix) if words.suffix and tuple(text[-len(words.suffix) :]) == words.suffix else len(text)
    return text[start:end]

"""GHOST's costs as ratios within one run, and what adversaries who know it read, on MiniLM.

python benchmarks/ghost.py search
python benchmarks/ghost.py plan --tokens 128256 --width 4096
python benchmarks/ghost.py selection DATA.parquet --texts 12
python benchmarks/ghost.py inversion DATA.parquet --reference TRAIN.parquet --texts 64 --defense ghost:group=8
python benchmarks/ghost.py rerun DATA.parquet --reference TRAIN.parquet --texts 64 --skip 32 --model FOLDER
python benchmarks/ghost.py grants SST2.parquet --reference AG_NEWS.parquet SST2_TRAIN.parquet --texts 64 --seeds 3
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from rasura.attacks.ghost.generation import restored, trained
from rasura.attacks.ghost.inversion import Strategy, inverted, possible, preimages_of
from rasura.attacks.ghost.lattice import likeliest
from rasura.attacks.ghost.rerun import Rerun, asked_again
from rasura.core.interfaces import Prior
from rasura.core.rng import derive, generator
from rasura.data.overlap import wording
from rasura.data.text import load_examples
from rasura.ghost.models import made_for
from rasura.ghost.neighbours import common, neighbours, unit_rows
from rasura.ghost.selection import Selector
from rasura.ghost.selection_settings import Selection
from rasura.ghost.table import PAPER, ShadowSettings, ShadowTable, search, token_embedding, usable_tokens
from rasura.ghost.words import lemmas
from rasura.metrics.intervals import mean_interval
from rasura.metrics.text import meteor, rouge, wordnet
from rasura.priors.ngram import Unigram
from rasura.priors.trigram import Trigram
from rasura.registry import parse_defense
from rasura.victims.loading import Victim, load


def timed(what: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a call, and what it returns."""
    start = time.process_time()
    found = what()
    return time.process_time() - start, found


def searching() -> None:
    """The neighbours against a bare product of the embedding with itself; the filter against sets in a loop."""
    victim = load("minilm", "classification")
    table = token_embedding(victim.model)
    usable = usable_tokens(victim.vocabulary)
    names = lemmas(victim.vocabulary, "en")
    rows = unit_rows(table)

    def bare() -> None:
        for some in rows.split(512):
            some @ rows.T

    product, _ = timed(bare)
    nearest, near = timed(lambda: neighbours(table, PAPER.max_k, usable))
    whole, _ = timed(lambda: search(table, names, usable, PAPER))
    near = near[:, : PAPER.k].contiguous()
    tokens = usable.nonzero().flatten()
    asked = torch.ones(len(tokens), PAPER.k, dtype=torch.bool)
    fast, (shared, back) = timed(lambda: common(near, tokens, asked))
    part = tokens[:: len(tokens) // 2000]
    lists = near.tolist()

    def plain() -> list[list[tuple[int, bool]]]:
        return [[(len(set(lists[t]) & set(lists[o])), t in lists[o]) for o in lists[t]] for t in part.tolist()]

    slow, found = timed(plain)
    place = {t: k for k, t in enumerate(tokens.tolist())}
    same = all(
        (shared[place[t]].tolist(), back[place[t]].tolist()) == tuple(map(list, zip(*row)))
        for t, row in zip(part.tolist(), found)
    )
    slow *= len(tokens) / len(part)
    print(f"bare product {product:.1f} s CPU, neighbours {nearest:.1f} ({nearest / product:.2f} x)")
    print(f"whole search {whole:.1f} s CPU, {whole / product:.2f} x the bare product")
    print(
        f"counts of common neighbours {fast:.1f} s, plain sets {slow:.1f} s extrapolated: {slow / fast:.1f} x, same {same}"
    )
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


def planning(tokens: int, width: int) -> None:
    """What a large vocabulary would cost, from a few blocks of a random table of its size."""
    table = torch.randn(tokens, width, generator=generator(0))
    usable = torch.ones(tokens, dtype=torch.bool)
    part = 512
    warm, _ = timed(lambda: neighbours(table, PAPER.max_k, usable, upto=8))
    seconds, _ = timed(lambda: neighbours(table, PAPER.max_k, usable, upto=part))
    near = torch.randint(tokens, (tokens, PAPER.k), dtype=torch.int32, generator=generator(1))
    some = torch.arange(2000)
    counting, _ = timed(lambda: common(near, some, torch.ones(len(some), PAPER.k, dtype=torch.bool)))
    each, every = (seconds - warm) / (part - 8), counting / len(some)
    print(f"{tokens} x {width}: {part} rows {seconds - warm:.1f} s CPU, all {each * tokens / 60:.0f} minutes")
    print(f"common neighbours of all {every * tokens / 60:.1f} minutes, unsorted as random rows are")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


def plain_selection(selector: Selector, text: Sequence[int], rng: torch.Generator) -> float:
    """Algorithm 2 as it is printed: every candidate run through the model alone."""
    goal = selector.states(selector.embedded(torch.tensor([text])))
    ids = list(text)
    for place, token in enumerate(text):
        options = selector.options(token)
        if len(options):
            ids[place] = int(options[torch.randint(len(options), (1,), generator=rng)])

    def error(some: Sequence[int]) -> float:
        return float((selector.states(selector.embedded(torch.tensor([some]))) - goal).square().mean())

    best = error(ids)
    for _ in range(selector.settings.sweeps):
        before = best
        for place, token in enumerate(text):
            for candidate in selector.options(token).tolist():
                other = [*ids[:place], candidate, *ids[place + 1 :]]
                if (found := error(other)) < best:
                    best, ids = found, other
        if best >= (1 - selector.settings.enough) * before:
            break
    return best


def selecting(path: str, count: int) -> None:
    """Our selection against the printed one: CPU and the mean squared difference of the hidden states."""
    victim = load("minilm", "classification")
    texts = [victim.tokenizer(e.text).input_ids for e in chosen(path, victim)[:count]]
    table = made_for(victim.model, victim.vocabulary, PAPER)
    fixed = victim.vocabulary.special_ids
    for settings in (Selection(), Selection(tried=0), Selection(tried=4)):
        selector = Selector(victim.model, table, fixed, settings)
        seconds, done = timed(lambda selector=selector: selector(texts, generator(0)))  # type: ignore[misc]
        print(f"tried {settings.tried}: {seconds:.1f} s CPU, error {mean(one.error for one in done):.5f}", flush=True)
    selector = Selector(victim.model, table, fixed)
    with torch.no_grad():
        seconds, errors = timed(lambda: [plain_selection(selector, text, generator(0)) for text in texts])
    print(f"one candidate at a time: {seconds:.1f} s CPU, error {mean(errors):.5f}")


def chosen(path: str, victim: Any) -> list[Any]:
    """The examples of 8 to 32 tokens, in an order that only their text decides."""
    every = [e for e in load_examples(path) if 8 <= len(victim.tokenizer(e.text).input_ids) <= 32]
    return sorted(every, key=lambda e: derive(0, e.text))


@dataclass(frozen=True)
class Hidden:
    """Private ``texts`` (ids) and the substitutes of each, with all that an adversary knows of the mechanism."""

    victim: Victim
    settings: ShadowSettings
    table: ShadowTable
    texts: Sequence[tuple[int, ...]]
    substitutes: Sequence[tuple[int, ...]]
    words: frozenset[str]

    @property
    def fixed(self) -> frozenset[int]:
        """Tokens that have no substitute."""
        return self.victim.vocabulary.special_ids

    def by(self, strategy: Strategy, prior: Prior | None = None, seed: int = 0) -> list[tuple[int, ...]]:
        """What a strategy names."""
        preimages, embedding = preimages_of(self.table, self.victim.model), token_embedding(self.victim.model)
        rng = generator(seed, "attack")
        return [
            inverted(h, preimages, strategy, embedding=embedding, fixed=self.fixed, prior=prior, rng=rng, beam=16, tried=32)
            for h in self.substitutes
        ]  # fmt: skip

    def again(self, found: Sequence[tuple[int, ...]], prior: Prior | None) -> list[tuple[int, ...]]:
        """What ``ghost-lattice`` makes of what it ``found``, by the selection run again in one sweep."""
        selector = Selector(self.victim.model.eval(), self.table, self.fixed)
        preimages = preimages_of(self.table, self.victim.model)
        return [
            asked_again(f, possible(h, preimages, self.fixed), Rerun(selector, h), prior, self.fixed, beam=16, sweeps=1)
            for h, f in zip(self.substitutes, found)
        ]

    def hits(self, read: Sequence[tuple[int, ...]]) -> list[float]:
        """Of each text the fraction of tokens that ``read`` names at their place."""
        return [mean(float(a == b) for a, b in zip(t, r) if a not in self.fixed) for t, r in zip(self.texts, read)]

    def by_model(self, known: Sequence[str], seed: int = 0) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """What a model names that learned from ``known``, among the preimages and free of them."""
        victim = self.victim
        restorer = trained(victim.model, self.table, victim.vocabulary, known, epochs=6, seed=seed)
        preimages = preimages_of(self.table, victim.model)
        return tuple(  # type: ignore[return-value]
            [restored(h, restorer, preimages, self.fixed, free=free) for h in self.substitutes] for free in (False, True)
        )

    def shown(self, name: str, reads: Sequence[Sequence[tuple[int, ...]]]) -> None:
        """Print a row: tokens at their place, ROUGE-1 and METEOR, of each text the mean over ``reads`` (seeds)."""
        vocabulary, score = self.victim.vocabulary, rouge("rouge1").score
        figures: list[list[float]] = [[], [], []]
        for k, t in enumerate(self.texts):
            places = [p for p, i in enumerate(t) if i not in self.fixed]
            mine = [read[k] for read in reads]
            figures[0].append(mean(mean(float(p < len(r) and r[p] == t[p]) for p in places) for r in mine))
            said = [(vocabulary.text(t), vocabulary.text(r)) for r in mine]
            figures[1].append(mean(score(a, b) for a, b in said))
            if wordnet():
                figures[2].append(mean(meteor(a, b) for a, b in said))
        found = [mean_interval(values) for values in figures if values]
        cells = [f"{100 * m:.1f} [{100 * low:.0f}, {100 * high:.0f}]" for m, low, high in found]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def hidden_texts(path: str, count: int, defense: str, skip: int = 0, model: str = "minilm") -> Hidden:
    """The texts of ``path`` behind ``defense``. ``span`` reads the substitutes exactly, so they are taken as known."""
    victim = load(model, "classification")
    told = dict(parse_defense(defense)[0].mechanism.parameters)
    settings = ShadowSettings(**{n: told[n] for n in ShadowSettings.__dataclass_fields__})  # type: ignore[arg-type]
    table = made_for(victim.model, victim.vocabulary, settings)
    texts = [tuple(victim.tokenizer(e.text).input_ids) for e in chosen(path, victim)[skip:count]]
    made = Selector(victim.model, table, victim.vocabulary.special_ids)(texts, generator(0))
    words = frozenset(wording(e.text) for e in load_examples(path))
    return Hidden(victim, settings, table, texts, [tuple(h.ids) for h in made], words)


def reference_texts(hidden: Hidden, path: str) -> list[str]:
    """Up to 20,000 texts of ``path`` that are none of the private ones, case, spaces and punctuation aside."""
    return [e.text for e in load_examples(path, limit=20_000) if wording(e.text) not in hidden.words]


def inverting(path: str, reference: str, count: int, defense: str, learned: int) -> None:
    """Every strategy on substitutes that are known exactly."""
    hidden = hidden_texts(path, count, defense)
    known, vocabulary, fixed = reference_texts(hidden, reference), hidden.victim.vocabulary, hidden.fixed
    usual = Unigram.english(vocabulary).top(12)
    rows: dict[str, list[tuple[int, ...]]] = {
        "blind": [(t[0], *usual, t[-1]) for t in hidden.texts],
        "substitutes": list(hidden.substitutes),
    }
    for name in ("sampling", "maximum", "median", "mean"):
        rows[name] = hidden.by(name)  # type: ignore[arg-type]
    rows["generation"], rows["generation, free"] = hidden.by_model(known[:learned])
    rows["lattice"] = hidden.by("lattice")
    rows["lattice, English words"] = hidden.by("lattice", Unigram.english(vocabulary))
    rows["lattice, words of the reference"] = hidden.by("lattice", Unigram.of(vocabulary, known))
    trigram, table = Trigram(vocabulary, known), hidden.table
    rows["lattice, trigrams of the reference"] = hidden.by("lattice", trigram)
    if hidden.settings.group > 1:
        # What the prior leaves to gain: who is told the groups needs no substitutes.
        members = [(table.groups == g).nonzero().flatten() for g in range(len(table))]
        alike = [(m, torch.ones(len(m), dtype=torch.double)) for m in members]
        alone = [(torch.tensor([i]), torch.ones(1, dtype=torch.double)) for i in range(len(table))]
        rows["told the groups, trigrams"] = [
            likeliest(
                [alone[i] if i in fixed or not len(table.of(i)) else alike[int(table.groups[i])] for i in t],
                trigram, fixed, 16, 32,
            )
            for t in hidden.texts
        ]  # fmt: skip
    for name, read in rows.items():
        hidden.shown(name, [read])


def rerunning(path: str, reference: str, count: int, skip: int, defense: str, model: str) -> None:
    """``ghost-lattice`` with and without the selection run again, text by text."""
    hidden = hidden_texts(path, count, defense, skip, model)
    vocabulary = hidden.victim.vocabulary
    known = reference_texts(hidden, reference)
    priors: dict[str, Prior] = {"trigrams": Trigram(vocabulary, known), "words": Unigram.english(vocabulary)}
    for name, prior in priors.items():
        before = hidden.by("lattice", prior)
        seconds, after = timed(lambda before=before, prior=prior: hidden.again(before, prior))  # type: ignore[misc]
        hidden.shown(f"{name}: lattice", [before])
        hidden.shown(f"{name}: and the selection again, {seconds / len(after):.1f} s CPU a text", [after])
        gains = [b - a for a, b in zip(hidden.hits(before), hidden.hits(after))]
        gain, low, high = (100 * figure for figure in mean_interval(gains, low=-1))
        print(
            f"gain {gain:.1f} [{low:.1f}, {high:.1f}], {sum(g > 0 for g in gains)} better, {sum(g < 0 for g in gains)} worse"
        )


def granted(path: str, references: Sequence[str], count: int, defense: str, learned: int, seeds: int) -> None:
    """What is read by what the adversary is granted: no text, or the texts of each of ``references``.

    A seed draws the texts that a model learns from, its training, and the samples of ``sampling``. All else draws nothing.
    """
    hidden = hidden_texts(path, count, defense)
    vocabulary = hidden.victim.vocabulary
    usual = Unigram.english(vocabulary).top(12)
    hidden.shown("none: blind", [[(t[0], *usual, t[-1]) for t in hidden.texts]])
    hidden.shown("none: substitutes", [list(hidden.substitutes)])
    hidden.shown("none: sampling", [hidden.by("sampling", seed=s) for s in range(seeds)])
    for name in ("maximum", "median", "mean"):
        hidden.shown(f"none: {name}", [hidden.by(name)])  # type: ignore[arg-type]
    hidden.shown("none: lattice, English words", [hidden.by("lattice", Unigram.english(vocabulary))])
    for reference in references:
        known, name = reference_texts(hidden, reference), Path(reference).stem
        hidden.shown(f"{name}: lattice, trigrams", [hidden.by("lattice", Trigram(vocabulary, known))])
        short = [t for t in known if 3 < len(t.split()) <= 20]
        read = [
            hidden.by_model(sorted(short, key=lambda t, s=s: derive(s, t))[:learned], s)  # type: ignore[misc]
            for s in range(seeds)
        ]
        hidden.shown(f"{name}: generation, constrained", [constrained for constrained, _ in read])
        hidden.shown(f"{name}: generation, free", [free for _, free in read])


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("search", "plan", "selection", "inversion", "rerun", "grants"))
    parser.add_argument("data", nargs="?")
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128_256)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--reference", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--defense", default="ghost")
    parser.add_argument("--skip", type=int, default=0, help="texts left out, of the first")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--learned", type=int, default=512, help="reference texts that the generation learns from")
    options = parser.parse_args()
    if options.what == "search":
        searching()
    elif options.what == "plan":
        planning(options.tokens, options.width)
    elif options.what == "selection":
        selecting(options.data, options.texts)
    elif options.what == "inversion":
        inverting(options.data, options.reference[0], options.texts, options.defense, options.learned)
    elif options.what == "rerun":
        rerunning(options.data, options.reference[0], options.texts, options.skip, options.defense, options.model)
    else:
        granted(options.data, options.reference, options.texts, options.defense, options.learned, options.seeds)


if __name__ == "__main__":
    main()

"""ObfusLM with a model that generates: what fine-tuning it is worth to the client, and what the server's operator reads.

python benchmarks/obfuslm_generation.py MODEL DATA/tinystories.train.parquet DATA/tinystories.validation.parquet

The plain model and the obfuscated ones are fine-tuned by one recipe on the same texts, then continue the first half of
other texts; the client's tokenizer encodes and decodes. Tables 3, 6 and 10 of the paper, with a model that a laptop trains.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rasura import recipes
from rasura.answers import ServiceTranscript, TokenReading
from rasura.data.text import Example, load_examples
from rasura.interfaces import Budget
from rasura.metrics.intervals import bootstrap
from rasura.metrics.service import RougeL, TopTokens
from rasura.metrics.text import rouge
from rasura.metrics.utility import causal
from rasura.obfuscation.folder import obfuscate_model
from rasura.obfuscation.key import Key
from rasura.obfuscation.settings import ObfuscationSettings
from rasura.obfuscation.tokenizer import ObfuscatedTokenizer
from rasura.rng import generator
from rasura.service.models import opened
from rasura.threat import observe_service
from rasura.training import encoded
from rasura.values import Batch, Mechanism, Stage, Vocabulary
from rasura.victims.loading import Victim, load
from rasura.victims.train import FineTuning, Recipe, nats

PLAIN = ("blind", "knn", "row-mixture", "decipherment")
PLUS = ("blind", "knn", "realigned-knn", "realigned-row-mixture", "realigned-decipherment")


@dataclass(frozen=True)
class Side:
    """A model on the server as it came and as it was trained, the client's ``tokenizer``, and the secret ``tokens``."""

    uploaded: nn.Module
    trained: nn.Module
    tokenizer: Any
    tokens: torch.Tensor


def of_server(victim: Victim, source: str, settings: ObfuscationSettings | None, place: Path, seed: int) -> Side:
    """The model of ``source`` behind ``settings``, or as it is; the two models are equal until one is trained."""
    if settings is None:
        first, second = (load(source, "causal").model for _ in range(2))
        return Side(first, second, victim.tokenizer, torch.arange(victim.vocabulary.size))
    key = place / "key"
    obfuscate_model(source, place / "served", key, settings, task="causal", rng=generator(seed, "key"))
    first, second = (opened(place / "served", "causal", "cpu") for _ in range(2))
    return Side(first, second, ObfuscatedTokenizer(key, model=place / "served"), Key.load(key).tokens)


def halves(rows: Sequence[Batch]) -> tuple[list[list[int]], list[list[int]]]:
    """The first half of every text, and what follows."""
    ids = [row.input_ids[0].tolist() for row in rows]
    return [t[: len(t) // 2] for t in ids], [t[len(t) // 2 :] for t in ids]


def continued(model: Any, prompts: Sequence[Sequence[int]], more: int, end: int | None, pad: int) -> list[list[int]]:
    """What ``model`` takes for the likeliest continuation of each prompt (all of one length), token by token."""
    ids = torch.tensor(prompts)
    with torch.no_grad():
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=more, do_sample=False, eos_token_id=end,
            pad_token_id=pad,
        )  # fmt: skip
    answers = whole[:, ids.shape[1] :].tolist()
    return [a[: a.index(end)] if end in a else a for a in answers]


def figure(values: Sequence[float]) -> str:
    """A mean in percent with its 95 % interval over texts."""
    mean, low, high = bootstrap(values)
    return f"{100 * mean:.1f} [{100 * low:.0f}, {100 * high:.0f}]"


def overlap(kind: Any, texts: Sequence[str], other: Sequence[str]) -> str:
    """Mean ROUGE of ``other`` with ``texts``."""
    score = rouge(kind).score
    return figure([score(a, b) for a, b in zip(texts, other, strict=True)])


def run(options: argparse.Namespace) -> None:
    """All attacks, model by model as they are done, then what the models are worth, as two Markdown tables."""
    torch.manual_seed(options.seed)
    victim = load(options.model, "causal")
    examples = load_examples(options.train)
    order = torch.randperm(len(examples), generator=generator(options.seed, "texts")).tolist()
    own = [examples[n] for n in order[: options.texts]]
    reference = tuple(examples[n].text for n in order[options.texts :])
    held, own = own[: len(own) // 10], own[len(own) // 10 :]
    long = [e for e in load_examples(options.test) if len(victim.tokenizer(e.text)["input_ids"]) >= options.length]
    tested = long[: options.prompts]
    print(f"{len(own)} texts, {len(held)} held out, {len(reference)} of the adversary's, {len(tested)} prompts")
    cases: list[tuple[str, ObfuscationSettings | None]] = [("plain", None)]
    for plus, chosen in ((False, options.epsilon), (True, options.plus_epsilon)):
        for epsilon in chosen:
            name = f"ObfusLM{'+' * plus}, epsilon {epsilon:g}"
            cases.append((name, ObfuscationSettings(options.k, epsilon, plus=plus, hidden_k=options.hidden_k)))
    rows = []
    print("| model | attack | weights | prompt top-1 | top-3 | ROUGE-L | answer top-1 | top-3 | ROUGE-L", end="")
    print(" | continuation ROUGE-1 | ROUGE-L |\n" + "|---" * 11 + "|", flush=True)
    for name, settings in cases:
        with tempfile.TemporaryDirectory() as place:
            row, lines = one(options, victim, settings, (own, held, tested), reference, Path(place))
        rows.append(f"| {name} | {row} |")
        print("".join(f"| {name} | {line} |\n" for line in lines), end="", flush=True)
    print("\n| model | loss before | loss | perplexity | best epoch | ROUGE-1 | ROUGE-L | s CPU |\n" + "|---" * 8 + "|")
    print("\n".join(rows))


def one(
    options: argparse.Namespace,
    victim: Victim,
    settings: ObfuscationSettings | None,
    texts: tuple[list[Example], list[Example], list[Example]],
    reference: tuple[str, ...],
    place: Path,
) -> tuple[str, list[str]]:
    """One model: a row of the first table, and the rows of the second."""
    start, words = time.process_time(), victim.vocabulary
    side = of_server(victim, options.model, settings, place, options.seed)
    client = replace(victim, tokenizer=side.tokenizer)
    own, held, tested = (encoded(client, some, max_length=options.length, truncate=True) for some in texts)
    pad = words.pad_id or 0
    server = Vocabulary(words.size, words.decode, words.encode, pad_id=pad)

    def figures(model: nn.Module, rows: Sequence[Batch]) -> dict[str, float]:
        return causal(*nats(model, rows, pad))

    before = figures(side.trained, tested)["loss"]
    recipe = Recipe(options.epochs, options.batch_size, options.learning_rate, patience=3, seed=options.seed)
    history = FineTuning(
        side.trained, own, (), recipe, place / "training", task="causal", vocabulary=server,
        evaluate=lambda m: figures(m, held), watched="loss", higher=False,
    ).run()  # fmt: skip
    side.trained.eval()
    after = figures(side.trained, tested)
    prompts, true = halves(tested)
    said = continued(side.trained, prompts, options.length // 2, victim.tokenizer.eos_token_id, pad)
    wanted, answers = ([side.tokenizer.decode(t, skip_special_tokens=True) for t in some] for some in (true, said))
    row = [
        f"{before:.3f}", f"{after['loss']:.3f}", f"{after['perplexity']:.2f}", str(history.best_epoch),
        overlap("rouge1", wanted, answers), overlap("rougeL", wanted, answers), f"{time.process_time() - start:.0f}",
    ]  # fmt: skip
    if settings is None:
        return " | ".join(row), []
    back = side.tokens.argsort()
    ids = tuple(tuple(back[p + s].tolist()) for p, s in zip(prompts, said))
    told = Mechanism("obfuslm", Stage.MODEL, settings.told())
    era = "realigned-era" if settings.plus else "era"
    tried = [(name, weights) for name in (PLUS if settings.plus else PLAIN) for weights in ("uploaded", "trained")]
    lines = []
    for name, weights in [*tried, (era, "trained")]:
        truth = ServiceTranscript(victim.model, getattr(side, weights), side.tokens, ids, words, told)
        seen = observe_service(truth, reference_text=reference)
        guess = recipes.SERVICE_ATTACKS[name]()(seen, rng=generator(options.seed, name), budget=Budget(options.budget))
        lines.append(" | ".join([name, weights, *judged(guess, truth, [len(p) for p in prompts], wanted)]))
    return " | ".join(row), lines


def judged(guess: TokenReading, truth: ServiceTranscript, cuts: Sequence[int], wanted: Sequence[str]) -> list[str]:
    """What was read of the prompts, of the answers, and how near the answers that were read are to the ``wanted`` ones."""
    out = []
    for part in (lambda t, n: t[:n], lambda t, n: t[n:]):
        some = replace(truth, ids=tuple(part(t, n) for t, n in zip(truth.ids, cuts)))
        read = TokenReading(tuple(part(r, n) for r, n in zip(guess.ranked, cuts)))
        out += [figure(metric(read, some) or [0.0]) for metric in (TopTokens(1), TopTokens(3), RougeL())]
    answers = [truth.vocabulary.text(r[n:, 0].tolist()) for r, n in zip(guess.ranked, cuts)]
    return [*out, overlap("rouge1", wanted, answers), overlap("rougeL", wanted, answers)]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", help="a causal model")
    parser.add_argument("train", help="texts: to fine-tune on, the rest is the adversary's")
    parser.add_argument("test", help="texts that are continued")
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--epsilon", type=float, nargs="*", default=[0.1, 1.0, 3.0])
    parser.add_argument("--plus-epsilon", type=float, nargs="*", default=[1.0], help="the same of ObfusLM+")
    parser.add_argument("--hidden-k", type=int, default=10)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--length", type=int, default=128, help="tokens that a text is cut to; half of them are the prompt")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--budget", default="default")
    parser.add_argument("--seed", type=int, default=0)
    run(parser.parse_args())


if __name__ == "__main__":
    main()

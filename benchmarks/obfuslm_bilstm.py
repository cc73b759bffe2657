"""ObfusLM on a network that is no transformer: a BiLSTM on word vectors, as in table 12 of the paper.

python benchmarks/obfuslm_bilstm.py DATA/sst2.train.parquet DATA/sst2.validation.parquet
python benchmarks/obfuslm_bilstm.py TRAIN.parquet TEST.parquet --vectors glove.6B.100d.txt

Without a file of vectors (lines of a word and its figures, as GloVe's) a word's vector is the mean of its pieces' rows in
MiniLM's word embedding, projected on their first principal directions.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rasura import recipes
from rasura.answers import ServiceTranscript
from rasura.data.text import Example, load_examples
from rasura.interfaces import Budget
from rasura.metrics.intervals import bootstrap
from rasura.metrics.service import RougeL, TopTokens
from rasura.metrics.utility import classification
from rasura.obfuscation.model import obfuscate_embedding
from rasura.obfuscation.settings import ObfuscationSettings
from rasura.rng import generator
from rasura.threat import observe_service
from rasura.values import Batch, Mechanism, Stage, Vocabulary
from rasura.victims.loading import load
from rasura.victims.train import FineTuning, Recipe, predictions

PAD, UNKNOWN = 0, 1
ATTACKS = ("blind", "knn", "ednn", "row-mixture", "decipherment")


class BiLstm(nn.Module):
    """Two layers of LSTM in both directions over ``vectors``, and a linear layer on their mean state."""

    def __init__(self, vectors: nn.Embedding, hidden: int, labels: int) -> None:
        super().__init__()
        self.vectors = vectors
        self.lstm = nn.LSTM(vectors.embedding_dim, hidden, 2, batch_first=True, bidirectional=True)
        self.score = nn.Linear(2 * hidden, labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        """Logits, and the loss where ``labels`` are given."""
        states, _ = self.lstm(self.vectors(input_ids))
        mask = attention_mask[:, :, None].to(states.dtype)
        logits = self.score((states * mask).sum(1) / mask.sum(1))
        return SimpleNamespace(logits=logits, loss=None if labels is None else nn.functional.cross_entropy(logits, labels))


def vectors_of(words: Sequence[str], file: str | None, width: int) -> Tensor:
    """A vector for each of ``words`` ``(words, width)``, zeros for one that ``file`` does not hold."""
    if file is not None:
        places = {word: n for n, word in enumerate(words)}
        found: dict[int, list[float]] = {}
        with Path(file).open(encoding="utf-8") as lines:
            for line in lines:
                word, *figures = line.rstrip().split(" ")
                if word in places:
                    found[places[word]] = [float(x) for x in figures]
        out = torch.zeros(len(words), len(next(iter(found.values()))))
        out[list(found)] = torch.tensor(list(found.values()))
        return out
    victim = load("minilm", "classification")
    table: Tensor = victim.model.get_input_embeddings().weight.detach()  # type: ignore[operator]  # a Hugging Face model
    pieces = [victim.vocabulary.encode(word) for word in words]
    whole = torch.stack([table[p].mean(0) if p else torch.zeros(table.shape[1]) for p in pieces])
    directions = torch.linalg.svd(whole, full_matrices=False).Vh[:width]
    return whole @ directions.T


def of_words(words: Sequence[str]) -> Vocabulary:
    """The vocabulary of texts that are split at spaces."""
    places = {word: n for n, word in enumerate(words)}
    special = frozenset({PAD, UNKNOWN})
    return Vocabulary(
        len(words), lambda ids: " ".join(words[i] for i in ids), lambda text: [places.get(w, UNKNOWN) for w in text.split()],
        pad_id=PAD, special_ids=special,
    )  # fmt: skip


def rows_of(examples: Sequence[Example], vocabulary: Vocabulary, tokens: Tensor) -> list[Batch]:
    """``examples`` in the ids ``tokens``, one text each."""
    out = []
    for example in examples:
        ids = tokens[vocabulary.encode(example.text)][None]
        out.append(Batch(ids, torch.ones_like(ids), torch.tensor([example.label or 0]), (example.text,), (example.text,)))
    return out


def run(options: argparse.Namespace) -> None:
    """The plain network and the obfuscated ones, then what is read of the ids, as two Markdown tables."""
    everything, tested = load_examples(options.train), load_examples(options.test)
    order = torch.randperm(len(everything), generator=generator(options.seed, "texts")).tolist()
    chosen = [everything[n] for n in order[: options.texts]]
    reference = tuple(everything[n].text for n in order[options.texts :][: options.references])
    counts = Counter(word for e in everything for word in e.text.split())
    words = ["[PAD]", "[UNK]", *(word for word, _ in counts.most_common())]
    vocabulary = of_words(words)
    vectors = vectors_of(words[2:], options.vectors, options.width)
    table = torch.cat([torch.zeros(2, vectors.shape[1]), vectors])
    public = nn.Embedding.from_pretrained(table, freeze=False, padding_idx=PAD)
    print(f"{len(words)} words, vectors of {table.shape[1]}, {len(chosen)} texts, {len(tested)} tested")
    long = [e for e in tested if len(e.text.split()) > 3]
    read = [long[n] for n in torch.randperm(len(long), generator=generator(options.seed, "read")).tolist()]
    ids = tuple(tuple(vocabulary.encode(e.text)) for e in read[: options.sentences])
    lines = []
    print("| model | accuracy | best epoch | s CPU |\n|---|---|---|---|")
    for epsilon in (None, *options.epsilon):
        settings = ObfuscationSettings(options.k, epsilon or 1.0)
        tokens, served = torch.arange(len(words)), public
        if epsilon is not None:
            made = obfuscate_embedding(public, settings, {PAD, UNKNOWN}, generator(options.seed, "key", str(epsilon)))
            tokens, served = made.tokens, made.model  # type: ignore[assignment]  # an nn.Embedding
        name = "plain" if epsilon is None else f"ObfusLM, k {options.k}, epsilon {epsilon:g}"
        print(f"| {name} | {trained(options, served, tokens, vocabulary, chosen, tested)} |", flush=True)
        if epsilon is not None:
            told = Mechanism("obfuslm", Stage.MODEL, settings.told())
            truth = ServiceTranscript(public, served, tokens, ids, vocabulary, told)
            lines += [f"| {name} | {line} |" for line in attacked(options, truth, reference)]
    print("\n| model | attack | top-1 | top-3 | ROUGE-L |\n|---|---|---|---|---|")
    print("\n".join(lines))


def trained(
    options: argparse.Namespace, table: nn.Embedding, tokens: Tensor, vocabulary: Vocabulary, chosen: Sequence[Example],
    tested: Sequence[Example],
) -> str:  # fmt: skip
    """Train a network on a copy of ``table`` and judge it."""
    start = time.process_time()
    rows, test = (rows_of(some, vocabulary, tokens) for some in (chosen, tested))
    held, rows = rows[: len(rows) // 10], rows[len(rows) // 10 :]
    torch.manual_seed(options.seed)
    copied = nn.Embedding.from_pretrained(table.weight.detach().clone(), freeze=False, padding_idx=PAD)
    model = BiLstm(copied, options.hidden, 2)

    def figures(m: nn.Module, some: Sequence[Batch] = held) -> dict[str, float]:
        return classification(predictions(m, some, PAD), [int(r.labels[0]) for r in some])

    recipe = Recipe(options.epochs, options.batch_size, 1e-3, patience=3, seed=options.seed)
    with tempfile.TemporaryDirectory() as place:
        history = FineTuning(
            model, rows, (), recipe, Path(place), task="classification", vocabulary=vocabulary, evaluate=figures,
            watched="accuracy", higher=True,
        ).run()  # fmt: skip
    right = (predictions(model, test, PAD).argmax(1) == torch.tensor([int(r.labels[0]) for r in test])).tolist()
    return f"{figure([float(r) for r in right])} | {history.best_epoch} | {time.process_time() - start:.0f}"


def attacked(options: argparse.Namespace, truth: ServiceTranscript, reference: tuple[str, ...]) -> list[str]:
    """A row for each attack on the table as it was uploaded."""
    seen, out = observe_service(truth, reference_text=reference), []
    for name in ATTACKS:
        guess = recipes.SERVICE_ATTACKS[name]()(seen, rng=generator(options.seed, name), budget=Budget(options.budget))
        out.append(" | ".join([name, *(figure(m(guess, truth) or [0.0]) for m in (TopTokens(1), TopTokens(3), RougeL()))]))
    return out


def figure(values: Sequence[float]) -> str:
    """A mean in percent with its 95 % interval over texts."""
    mean, low, high = bootstrap(values)
    return f"{100 * mean:.1f} [{100 * low:.0f}, {100 * high:.0f}]"


def main() -> None:
    """Run what the command line asks for."""
    parser: Any = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("train")
    parser.add_argument("test")
    parser.add_argument("--vectors", help="a file of word vectors")
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument("--texts", type=int, default=20000)
    parser.add_argument("--references", type=int, default=5000)
    parser.add_argument("--sentences", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--budget", default="default")
    parser.add_argument("--seed", type=int, default=0)
    run(parser.parse_args())


if __name__ == "__main__":
    main()

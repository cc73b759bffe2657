"""What span reads back from each family of models, and why not where it does not.

python benchmarks/families.py TEXTS.parquet                        # all families, classifiers and causal models
python benchmarks/families.py TEXTS.parquet --family t5,modernbert --sizes 1

Each model has two blocks and is trained for a few hundred steps on TEXTS first: random weights hide what trained ones show.
Figures are texts that came back exactly, of all texts of the batches; a star marks cells in which every one was proven.
Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from rasura.attacks.updates.span import Span
from rasura.core.batches import Batch
from rasura.core.interfaces import AttackFailed, Budget, InputError, NotApplicable
from rasura.core.rng import derive, generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Task, Vocabulary
from rasura.data.text import Example, load_examples
from rasura.registry import parse_defense
from rasura.testing.tiny import ALL, CLS, DECODERS, PAD, SEP, batch_of, tiny
from rasura.victims.step import step
from rasura.victims.structure import verify_parts

PROTECTIONS = ("none", "frozen-embeddings")
HIDDEN = 128
MAX_WORDS = 10
NAMES = {
    "bert": "BERT", "roberta": "RoBERTa", "distilbert": "DistilBERT", "albert": "ALBERT", "electra": "ELECTRA",
    "deberta-v2": "DeBERTa-v2", "mpnet": "MPNet", "modernbert": "ModernBERT", "roformer": "RoFormer", "xlnet": "XLNet",
    "t5": "T5 (encoder)", "gpt2": "GPT-2", "opt": "OPT", "gpt-neox": "GPT-NeoX", "bloom": "Bloom",
    "falcon": "Falcon (rotary)", "mpt": "MPT", "deberta-v3": "DeBERTa-v2, v3 (shared keys)", "llama": "Llama, SmolLM2",
    "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma", "gemma2": "Gemma 2", "gemma3": "Gemma 3",
    "phi": "Phi", "phi3": "Phi-3", "mixtral": "Mixtral", "smollm3": "SmolLM3",
}  # fmt: skip


class Words:
    """The commonest words of the texts as ids behind the special ones."""

    def __init__(self, texts: Sequence[str], first: int, size: int) -> None:
        counted = Counter(word for text in texts for word in text.lower().split())
        self.ids = {word: first + n for n, (word, _) in enumerate(counted.most_common(size))}

    def whole(self, text: str) -> bool:
        """Whether every word of ``text`` has an id."""
        return all(word in self.ids for word in text.lower().split())

    def row(self, text: str, start: int, end: int | None) -> list[int]:
        """``text`` in its frame."""
        return [start, *(self.ids[word] for word in text.lower().split()), *([] if end is None else [end])]


def trained(
    model: nn.Module, rows: Sequence[list[int]], labels: Sequence[int], task: Task, pad: int, steps: int
) -> nn.Module:
    """``model`` after some steps of AdamW on batches of eight."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = generator(0, "training")
    for _ in range(steps):
        chosen = torch.randint(len(rows), (8,), generator=draw).tolist()
        inputs = padded([rows[k] for k in chosen], [labels[k] for k in chosen], task, pad).inputs()
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()
    return model.eval()


def padded(rows: list[list[int]], labels: list[int], task: Task, pad: int) -> Batch:
    """A batch; MPNet pads with id 1."""
    batch = batch_of(rows, task, labels)
    return replace(batch, input_ids=batch.input_ids.masked_fill(batch.attention_mask == 0, pad))


def cell(
    model: nn.Module, words: Vocabulary, rows: Sequence[list[int]], task: Task, size: int, defense: str, draws: int
) -> str:
    """What came back of ``draws`` batches of ``size`` texts."""
    exact, proven, reason = 0, True, ""
    for draw in range(draws):
        some = [list(r) for r in rows[draw * size : (draw + 1) * size]]
        batch = padded(some, [k % 2 for k in range(size)], task, words.pad_id or 0)
        sent = step(model, batch, parse_defense(defense), task=task, vocabulary=words, rng=generator(0, "step"))
        try:
            guess = Span()(observe(sent, HONEST_SERVER), rng=generator(0, "attack"), budget=Budget())
        except (AttackFailed, NotApplicable) as error:
            proven, reason = False, str(error)
            continue
        left = Counter(guess.tokens)
        for row in some:
            exact += left[tuple(row)] > 0
            left[tuple(row)] -= 1
        proven &= guess.confidence == "verified"
        reason = reason or ("" if guess.ordered else "words without their order")
    return f"{exact}/{size * draws}" + ("\\*" if proven else "") + (f" ({reason})" if exact == 0 and reason else "")


def line(family: str, task: Task, examples: Sequence[Example], sizes: Sequence[int], draws: int, steps: int) -> str:
    """The row of one family."""
    pad = 1 if family == "mpnet" else PAD
    start = PAD if family == "mpnet" else CLS
    texts = [e.text for e in examples]
    known = Words(texts, 3, 800)
    examples = [e for e in examples if known.whole(e.text) and len(e.text.split()) <= MAX_WORDS]
    end = SEP if task == "classification" else None
    rows = [known.row(e.text, start, end) for e in examples]
    words = Vocabulary(
        803, lambda ids: "", lambda text: [], (start,), () if end is None else (end,), pad, frozenset({PAD, CLS, SEP})
    )
    head = f"| {NAMES[family]} | {task} |"
    try:
        model = tiny(family, task, num_labels=2, hidden=HIDDEN, words=803)
        verify_parts(trained(model, rows, [int(e.label or 0) for e in examples], task, pad, steps), words)
    except InputError as error:
        return f"{head} refused: {str(error).split('; register')[0]} |" + " |" * (2 * len(sizes) - 1)
    shown = sorted({tuple(r) for r in rows}, key=lambda row: derive(0, str(row)))
    return head + "".join(
        f" {cell(model, words, [list(r) for r in shown], task, size, defense, draws)} |"
        for defense in PROTECTIONS for size in sizes
    )  # fmt: skip


def main() -> None:
    """Print the table, a row as it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts")
    parser.add_argument("--family", default=",".join(ALL))
    parser.add_argument("--sizes", default="1,4,8")
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    sizes = [int(n) for n in options.sizes.split(",")]
    examples = load_examples(options.texts)
    print("| family | task |" + "".join(f" {d}, {n} |" for d in PROTECTIONS for n in sizes))
    print("|---" * (2 + 2 * len(sizes)) + "|")
    for family in options.family.split(","):
        for task in ("classification", "causal") if family in DECODERS else ("classification",):
            print(line(family, task, examples, sizes, options.draws, options.steps), flush=True)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

"""What span reads back from causal models: whole batches, and a single text of which only the last block is visible.

python benchmarks/decoders.py MODEL_FOLDER TEXTS.parquet

MODEL_FOLDER: a small trained causal model. Texts are cut so that a batch holds fewer tokens than the model is wide. A random
GPT-2-like model of width 256 with random ids follows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, logging

from rasura.attacks.shared.labelings import pad
from rasura.attacks.updates.span import Span
from rasura.core.interfaces import AttackFailed, Budget
from rasura.core.rng import derive, generator
from rasura.core.values import Grant, Message, Observation, Reconstruction, Vocabulary
from rasura.data.text import load_examples
from rasura.victims.loading import load
from rasura.victims.models import parts
from rasura.victims.step import gradients


def read(
    model: nn.Module, vocabulary: Vocabulary, ids: Tensor, mask: Tensor, keep: Callable[[str], bool] = lambda name: True
) -> None:
    """Attack one batch and print what came back."""
    labels = ids.masked_fill(mask == 0, -100)
    found, _ = gradients(model, {"input_ids": ids, "attention_mask": mask, "labels": labels})
    shown = Message({n: g for n, g in found.items() if keep(n)})
    granted = {Grant.MODEL: model, Grant.BASE_MODEL: vocabulary, Grant.BATCH_SIZE: len(ids)}
    start = time.perf_counter()
    try:
        guess = Span()(Observation(shown, "causal", granted), rng=generator(0), budget=Budget())
    except AttackFailed as error:
        print(f"batch {len(ids)}: failed, {error}")
        guess = Reconstruction(())
    wall = time.perf_counter() - start
    true = [tuple(row[m.bool()].tolist()) for row, m in zip(ids, mask)]
    exact = sum(t in guess.tokens for t in true)
    but_last = sum(t[:-1] in [g[: len(t) - 1] for g in guess.tokens] for t in true)
    figures = f"exact {exact}, exact but for the last token {but_last} of {len(ids)}"
    print(f"batch {len(ids)}, {int(mask.sum())} tokens: {guess.confidence}, {figures}, {wall:.1f} s", flush=True)


def main() -> None:
    """Print one line a batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("--draws", type=int, default=3)
    options = parser.parse_args()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    victim = load(options.model, "causal")
    model = victim.model.eval()
    width, blocks = parts(model).hidden, parts(model).blocks
    texts = sorted({e.text for e in load_examples(options.texts)}, key=lambda t: derive(0, t))
    print(f"{options.model}: width {width}")

    def cut(draw: int, size: int, most: int) -> tuple[Tensor, Tensor]:
        chosen = texts[draw * size : (draw + 1) * size]
        return pad([victim.tokenizer(t).input_ids[:most] for t in chosen], victim.vocabulary.pad_id or 0)

    for size in (1, 2, 4, 8):
        for draw in range(options.draws):
            read(model, victim.vocabulary, *cut(draw, size, min(24, int(0.95 * width) // size)))
    print("only the last block visible:")
    for draw in range(options.draws):
        read(model, victim.vocabulary, *cut(draw, 1, 24), lambda n: f".{len(blocks) - 1}." in n)
    print("random GPT-2, width 256, three blocks, random ids:")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=5000, n_embd=256, n_layer=3, n_head=4, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    gpt2 = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    plain = Vocabulary(5000, lambda ids: " ".join(map(str, ids)), lambda text: [], pad_id=0, special_ids=frozenset({0}))
    for size in (1, 2, 4, 8):
        lengths = torch.randint(8, 24, (size,)).tolist()
        ids, mask = pad([torch.randint(3, 5000, (n,)).tolist() for n in lengths], 0)
        read(gpt2, plain, ids, mask)


if __name__ == "__main__":
    main()

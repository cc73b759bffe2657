"""A small GPT-2 to be trained here: byte-pair tokens learned from the texts, fresh weights, and the texts in equal pieces.

python benchmarks/small_gpt2.py DATA/novels.train.parquet DATA/imdb.train.parquet --out runs/gpt2
rasura train runs/gpt2/texts.parquet --model runs/gpt2/fresh --task causal --test DATA/novels.validation.parquet \
    --truncate --max-length 96 --epochs 2 --learning-rate 1e-3 --precision bf16 --out runs/gpt2/trained

``runs/gpt2/trained/none-0/model`` is then a model folder for any study, audit or training (``--model``).
Leave out ``--precision bf16`` if the processor has no instructions for it: a step then takes ten times as long.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

from rasura.data.text import load_examples

END = "<|endoftext|>"


def tokenizer_of(texts: Sequence[str], size: int, length: int) -> GPT2TokenizerFast:
    """GPT-2's kind of tokenizer with ``size`` tokens, learned from ``texts``."""
    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator(texts, vocab_size=size, special_tokens=[END], show_progress=False)
    return GPT2TokenizerFast(tokenizer_object=learned._tokenizer, eos_token=END, bos_token=END, model_max_length=length)


def pieces(texts: Sequence[str], tokenizer: GPT2TokenizerFast, length: int) -> Iterator[str]:
    """The texts in pieces of ``length`` tokens and less, cut between words; the short rest of a text is left out."""
    for text, places in zip(texts, tokenizer(list(texts), return_offsets_mapping=True, verbose=False)["offset_mapping"]):
        begun = [k for k, (start, end) in enumerate(places) if text[start:end].startswith(" ")] + [len(places)]
        first = last = 0
        for k in begun:
            if k - first > length - 2 and last > first:
                yield text[places[first][0] : places[last][0]].strip()
                first = last
            last = k
        if len(places) - first > length // 4:
            yield text[places[first][0] :].strip()


def main() -> None:
    """Write the fresh model and the texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("data", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--length", type=int, default=96)
    options = parser.parse_args()
    texts = [e.text for path in options.data for e in load_examples(path)]
    tokenizer = tokenizer_of(texts, options.vocabulary, 256)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_embd=options.width, n_layer=options.blocks, n_head=options.heads, n_positions=256,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    model.save_pretrained(options.out / "fresh")
    tokenizer.save_pretrained(options.out / "fresh")
    some = list(pieces(texts, tokenizer, options.length))
    parquet.write_table(pa.table({"text": some}), options.out / "texts.parquet")
    print(
        f"{model.num_parameters()} parameters, {len(tokenizer)} tokens; {len(some)} texts of up to {options.length} tokens"
    )


if __name__ == "__main__":
    main()

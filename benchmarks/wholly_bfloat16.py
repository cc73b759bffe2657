"""Texts of a decoder whose weights, passes and update are all in bfloat16, read by ``span``.

python benchmarks/wholly_bfloat16.py DATA/sst2.validation.parquet MODELS/smollm2 --limit 4
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import rasura
from rasura.data.text import load_examples


def main() -> None:
    """Print of each text its tokens, whether it came back exactly, how sure, and the CPU seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("model")
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--longest", type=int, default=128, help="tokens that are trained on at most")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trained = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, attn_implementation="eager")
    victim = rasura.load(args.model, "causal")
    with tempfile.TemporaryDirectory() as folder:
        for text in [example.text for example in load_examples(args.data)][: args.limit]:
            batch = victim.tokenizer([text], return_tensors="pt", truncation=True, max_length=args.longest)
            update = Path(folder) / "update.safetensors"
            rasura.capture(trained, {**batch, "labels": batch["input_ids"].clone()}, update)
            begun = time.process_time()
            found = rasura.read_update(update, victim, rasura.ReadRequest(attack="span", batch_size=1))
            ids = tuple(batch["input_ids"][0].tolist())
            right = "exact" if found.tokens == (ids,) else "not exact"
            print(len(ids), right, found.confidence, f"{time.process_time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()

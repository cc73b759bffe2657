"""Who was a language model fine-tuned on? Every attack without shadow models, on adapters of one training.

python benchmarks/language_membership.py MODEL DATA/ag_news.train.parquet --texts 200 --out FOLDER

LoRA adapters of MODEL are trained on random members of DATA and saved after each epoch of ``--epochs``. Then the attacks of
``rasura membership`` part members from as many other texts of DATA, drawn at random. A folder that holds the adapters is not
trained again; one that holds the figures is not attacked again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rasura.core.batches import Batch
from rasura.core.rng import derive, generator
from rasura.data.text import load_examples
from rasura.metrics.membership import split_check
from rasura.runs.membership import infer_membership
from rasura.runs.membership_plan import MembershipPlan
from rasura.runs.training import encoded
from rasura.victims.adapters import with_fresh_adapter
from rasura.victims.batching import joined
from rasura.victims.loading import Victim, load


def written(path: Path, texts: Sequence[str]) -> str:
    """The texts as a JSONL file."""
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return str(path)


def trained(victim: Victim, rows: Sequence[Batch], options: Any, out: Path) -> None:
    """Train fresh adapters by AdamW at a constant rate, and save them after each epoch of ``options.epochs``."""
    model: Any = with_fresh_adapter(victim.model, "causal", options.rank, options.seed).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.learning_rate)
    start = time.perf_counter()
    for epoch in range(1, max(options.epochs) + 1):
        order = torch.randperm(len(rows), generator=generator(derive(options.seed, "order"), str(epoch))).tolist()
        losses = []
        for first in range(0, len(rows), options.batch_size):
            batch = joined([rows[k] for k in order[first : first + options.batch_size]], victim.vocabulary.pad_id or 0)
            optimizer.zero_grad()
            loss = model(**batch.inputs()).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, {time.perf_counter() - start:.0f} s", flush=True)
        if epoch in options.epochs:
            model.save_pretrained(out / f"epochs-{epoch}", safe_serialization=True)


def table(out: Path, options: Any) -> None:
    """Attack each adapter and print a table."""
    for epochs in options.epochs:
        plan = MembershipPlan(
            str(out / f"epochs-{epochs}"), str(out / "members.jsonl"), str(out / "others.jsonl"),
            attacks=tuple(options.attack.split(",")) if options.attack else None, truncate=True, max_length=options.tokens,
        )  # fmt: skip
        start = time.perf_counter()
        records = infer_membership(plan, out=out / f"run-{epochs}")
        print(f"\n{epochs} epochs; all attacks {time.perf_counter() - start:.0f} s", flush=True)
        print("| attack | AUC | TPR at 1 % FPR | seconds |\n|---|---|---|---|")
        for record in records:
            cells = [record.status, "-"]
            if record.status == "ok":
                cells = [
                    "{mean:.3f} [{low:.3f}, {high:.3f}]".format(**record.scores[name]) if name in record.scores else "-"
                    for name in ("auc", "tpr@0.01")
                ]
            print(f"| {record.attack} | {' | '.join(cells)} | {record.wall_seconds:.1f} |", flush=True)


def main() -> None:
    """Train, attack, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=1000, help="members, and as many others")
    parser.add_argument("--tokens", type=int, default=64, help="longer texts are cut")
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--attack", default=None, help="separated by commas; all that need no shadow models if left out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    every = list({e.text: e for e in load_examples(options.data)}.values())  # no text twice
    order = torch.randperm(len(every), generator=generator(options.seed, "texts"))[: 2 * options.texts].tolist()
    texts = [every[k].text for k in order]
    written(options.out / "members.jsonl", texts[: options.texts])
    written(options.out / "others.jsonl", texts[options.texts :])
    words = split_check(texts, [k < options.texts for k in range(len(texts))], options.seed)
    print(f"{options.texts} members and as many others, cut to {options.tokens} tokens, seed {options.seed}")
    print(f"told by words alone, held out: AUC {words.mean:.3f} [{words.low:.3f}, {words.high:.3f}]", flush=True)
    if not all((options.out / f"epochs-{e}" / "adapter_config.json").is_file() for e in options.epochs):
        victim = load(options.model, "causal", seed=options.seed)
        members = list(load_examples(options.out / "members.jsonl"))
        trained(victim, encoded(victim, members, max_length=options.tokens, truncate=True), options, options.out)
    table(options.out, options)


if __name__ == "__main__":
    main()

"""What LoRA adapters of a language model learn privately: accuracy at target epsilons and without privacy.

python benchmarks/private_lora.py MODEL DATA/sst2.train.parquet DATA/sst2.validation.parquet --public DATA/cola.train.parquet
(and --states FILE --out FILE)

A text ends with `` It was``. Adapters on the queries and values of the last block and a classifier on its last token are
trained, in float32; the classifier starts as the model's rows of `` terrible`` and `` great``, on states centred by those of
public texts. The other blocks are frozen, and their states are computed once, in bfloat16. A measured lower bound of epsilon
stands beside each run: white box, by gradient canaries in every step, and black box, by texts with the wrong label, each
trained on by a fair coin (Steinke, Nasr and Jagielski 2023).
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
from lora_setting import Lines
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import rasura
from rasura.accounting import one_run_bound, right_guesses
from rasura.core.rng import derive, generator
from rasura.data.text import load_examples

ENDING, WORDS = " It was", (" terrible", " great")
SHORTEST, LONGEST, TOGETHER = 4, 24, 64
"""Words that a phrase has at least, tokens that a text has at most, and texts that pass the frozen blocks together."""


@torch.no_grad()
def states(model: Any, tokenizer: Any, source: str, limit: int | None, least: int) -> tuple[list[Tensor], Tensor]:
    """What the last block gets of each text, ``(tokens, hidden)``, and the labels; texts drawn at random, none
    twice."""
    every = [e for e in {e.text: e for e in load_examples(source)}.values() if len(e.text.split()) >= least]
    some = [every[k] for k in torch.randperm(len(every), generator=generator(0, "texts"))[:limit].tolist()]
    end = tokenizer.encode(ENDING)
    rows = [[*tokenizer.encode(e.text.strip())[: LONGEST - len(end)], *end] for e in some]
    kept: list[Tensor] = []
    taken = model.model.layers[-1].register_forward_pre_hook(lambda module, args: kept.append(args[0].detach()))
    order = sorted(range(len(rows)), key=lambda k: len(rows[k]))
    out: dict[int, Tensor] = {}
    for start in range(0, len(order), TOGETHER):
        part = order[start : start + TOGETHER]
        size = max(len(rows[k]) for k in part)
        ids = torch.tensor([[0] * (size - len(rows[k])) + rows[k] for k in part])
        mask = torch.tensor([[0] * (size - len(rows[k])) + [1] * len(rows[k]) for k in part])
        kept.clear()
        model.model(input_ids=ids, attention_mask=mask, use_cache=False)
        out |= {k: kept[0][i, size - len(rows[k]) :].clone() for i, k in enumerate(part)}
    taken.remove()
    return [out[k] for k in range(len(rows))], torch.tensor([int(e.label or 0) for e in some])


class Adapted(nn.Module):
    """The last block of a Llama model with adapters, its final norm and a classifier, on the states before that block.

    Only the last token's answer is computed. ``centre`` and ``size``: the mean of the final states of public texts, and the
    root of their mean squared distance from it. The classifier starts as the rows of two words.
    """

    def __init__(self, body: Any, words: Tensor, rank: int, seed: int) -> None:
        super().__init__()
        config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "adapters"))
            self.body = inject_adapter_in_model(config, copy.deepcopy(body))
        self.classifier = nn.Linear(words.shape[1], 2)
        self.centre, self.size = torch.zeros(words.shape[1]), 1.0
        with torch.no_grad():
            self.classifier.weight.copy_(words / words.norm(dim=1, keepdim=True))
            self.classifier.bias.zero_()

    def final(self, states: Tensor, mask: Tensor) -> Tensor:
        """The final states of the last token ``(batch, hidden)``."""
        body: Any = self.body
        layer = body.layers[0]
        attention = layer.self_attn
        normed = layer.input_layernorm(states)
        rows, length, _ = states.shape
        cos, sin = body.rotary_emb(states, torch.arange(length)[None])

        def heads(found: Tensor) -> Tensor:
            return found.view(rows, found.shape[1], -1, attention.head_dim).transpose(1, 2)

        query = heads(attention.q_proj(normed[:, -1:]))
        query, _ = apply_rotary_pos_emb(query, query, cos[:, -1:], sin[:, -1:])
        key = heads(attention.k_proj(normed))
        key, _ = apply_rotary_pos_emb(key, key, cos, sin)
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, heads(attention.v_proj(normed)), attn_mask=mask[:, None, None].bool(), enable_gqa=True
        )
        after = states[:, -1] + attention.o_proj(mixed.transpose(1, 2).reshape(rows, -1))
        out: Tensor = body.norm(after + layer.mlp(layer.post_attention_layernorm(after)))
        return out

    def forward(self, states: Tensor, mask: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        """The loss and the logits ``(batch, 2)`` of states ``(batch, tokens, hidden)`` that end at the last token."""
        logits = self.classifier((self.final(states, mask) - self.centre) / self.size)
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def cut(model: Any) -> Any:
    """The last block of a Llama model and its final norm, frozen, in float32, without embeddings."""
    body = model.model
    body.layers, body.embed_tokens = body.layers[-1:], None
    for parameter in body.parameters():
        parameter.requires_grad_(False)
    return body.float()


def collate(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """Rows as the inputs of ``Adapted``, filled up at their beginning."""
    size = max(len(s) for s, _ in rows)
    filled = [nn.functional.pad(s.float(), (0, 0, size - len(s), 0)) for s, _ in rows]
    mask = [[0] * (size - len(s)) + [1] * len(s) for s, _ in rows]
    return {"states": torch.stack(filled), "mask": torch.tensor(mask), "labels": torch.tensor([y for _, y in rows])}


@torch.no_grad()
def answers(model: Any, rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """The losses, and which answers are right, ``(rows,)`` each."""
    order = sorted(range(len(rows)), key=lambda k: len(rows[k][0]))
    losses, right = torch.zeros(len(rows)), torch.zeros(len(rows))
    for start in range(0, len(order), TOGETHER):
        part = order[start : start + TOGETHER]
        batch = collate([rows[k] for k in part])
        logits = model(**batch).logits
        losses[part] = nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
        right[part] = (logits.argmax(1) == batch["labels"]).float()
    return losses, right


def trained(model: Any, rows: list[tuple[Tensor, int]], target: float, options: Any, seed: int) -> tuple[Any, Any, Any]:
    """``model`` trained to ``target`` epsilon (0: without privacy), its ledger and its gradient canaries (None without)."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.learning_rate)
    loader: Any = DataLoader(rows, options.batch_size, shuffle=True, collate_fn=collate, generator=generator(seed, "order"))  # type: ignore[arg-type]  # a list has a length
    ledger = canaries = None
    if target:
        canaries = rasura.GradientCanaries(options.gradient_canaries)
        model, _, loader, ledger = rasura.protect_training(
            model, optimizer, loader, f"dp-sgd:clip={options.clip}", epochs=options.epochs, target_epsilon=target,
            canaries=canaries, physical_batch_size=options.physical_batch_size,
        )  # fmt: skip
    for _ in range(options.epochs):
        for batch in loader:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    return model, ledger, canaries


def one_run(make: Any, known: list[tuple[Tensor, int]], test: list[tuple[Tensor, int]], target: float, options: Any,
            seed: int) -> dict[str, Any]:  # fmt: skip
    """Train and judge one model: the first ``options.canaries`` texts have the wrong label and are in by a fair coin."""
    n, start = options.canaries, time.process_time()
    inside = torch.rand(n, generator=generator(seed, "coins")) < 0.5
    wrong = [(s, 1 - y) for s, y in known[:n]]
    kept = [*(row for row, there in zip(wrong, inside.tolist()) if there), *known[n:]]
    model = make(seed)
    before, _ = answers(model, wrong)
    model, ledger, canaries = trained(model, kept, target, options, seed)
    after, _ = answers(model, wrong)
    _, right = answers(model, test)
    asked = n // 10 * 2
    hits = right_guesses((before - after).double().numpy(), inside.numpy(), asked)
    told = {
        "target": target, "seed": seed, "accuracy": float(right.double().mean()), "texts": len(kept),
        "black_box": one_run_bound(n, asked, hits, 0.1 / len(kept) if target else 0.0).epsilon,
    }  # fmt: skip
    if ledger is not None:
        found = canaries.measure(ledger)
        told |= {"counted": ledger.epsilon, "white_box": found.bound.epsilon, "gaussian": found.gaussian.epsilon}
    return {**told, "cpu_seconds": time.process_time() - start}


def prepared(options: Any) -> tuple[dict[str, Any], Any]:
    """The states of all texts, and what makes a fresh model for a seed."""
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if not options.states.exists():
        found = {
            "test": states(model, tokenizer, options.test, None, 1),
            "train": states(model, tokenizer, options.data, options.texts, SHORTEST),
            "public": states(model, tokenizer, options.public, 300, SHORTEST),
        }
        torch.save(found, options.states)
    known = torch.load(options.states)
    words = model.lm_head.weight[[tokenizer.encode(word)[0] for word in WORDS]].float().detach()
    body = cut(model)
    public = collate([(rows, 0) for rows in known["public"][0]])
    with torch.no_grad():
        ends = Adapted(body, words, 1, 0).final(public["states"], public["mask"])

    def make(seed: int) -> Adapted:
        made = Adapted(body, words, options.rank, seed)
        made.centre, made.size = ends.mean(0), float((ends - ends.mean(0)).square().sum(1).mean().sqrt())
        return made

    return known, make


def main() -> None:
    """Train every setting from every seed, keep each run as a line, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("test")
    parser.add_argument("--public", required=True, help="public texts, which say where final states lie")
    parser.add_argument(
        "--states", type=Path, required=True, help="file of the frozen blocks' states; made if it is missing"
    )
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines; what it holds is not done again")
    parser.add_argument("--texts", type=int, default=5000)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--canaries", type=int, default=200)
    parser.add_argument("--gradient-canaries", type=int, default=1000)
    parser.add_argument("--targets", type=float, nargs="+", default=[8.0, 0.0, 3.0], help="0: no privacy")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--physical-batch-size", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    options = parser.parse_args()
    lines = Lines(options.out)
    held, make = prepared(options)
    known, test = (list(zip(rows, labels.tolist())) for rows, labels in (held["train"], held["test"]))
    _, right = answers(make(0), test)
    labels = torch.tensor([y for _, y in test])
    weights = sum(p.numel() for p in make(0).parameters() if p.requires_grad)
    majority = float(torch.bincount(labels).max() / len(labels))
    print(f"{len(known)} texts, {weights} trained weights; tested on {len(test)}; majority class {majority:.3f}")
    print(f"untrained: {float(right.mean()):.3f}", flush=True)
    for seed in options.seeds:
        for target in options.targets:
            if not lines.has(target=target, seed=seed):
                lines.add(one_run(make, known, test, target, options, seed))
                print(lines.rows[-1], flush=True)


if __name__ == "__main__":
    main()

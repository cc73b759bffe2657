"""CPU time of one gradient-matching step, factored against explicit, on MiniLM; both in one run, taking turns.

python benchmarks/matching.py --candidates 1 8 16 32

Explicit: one candidate at a time, every weight gradient formed. Both match the same parameters with squared L2.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from rasura.attacks.updates.gradient_matching.factors import Factoriser
from rasura.attacks.updates.gradient_matching.objective import Distance, soft_cross_entropy
from rasura.core.rng import generator
from rasura.data.text import Example, encode
from rasura.victims.loading import load
from rasura.victims.step import gradients

TEXT = "Anna Berg pays on Friday."


def main() -> None:
    """Print the error in float64 and the ratio of CPU times for each number of candidates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidates", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="more than one counts waiting as work")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    victim = load("minilm", "classification")
    model = victim.model.eval()
    batch = encode([Example(TEXT, None, 1)], victim.tokenizer, "classification", max_length=64, num_labels=2)
    target, _ = gradients(model, batch.inputs())
    model.requires_grad_(False)
    factoriser = Factoriser(model, list(target))
    observed = factoriser.observed(target)
    chosen = {n: p for n, p in model.named_parameters() if n in observed}
    goal = torch.nn.functional.one_hot(batch.labels, 2).float()
    print(f"{batch.input_ids.shape[1]} tokens, {len(observed)} parameters, {options.threads} thread(s)")

    def factored(e: Tensor, wish: Distance, slope: bool) -> tuple[Tensor, Tensor | None]:
        targets = goal.to(e.dtype).expand(len(e), -1, -1)
        found = factoriser(e, batch.attention_mask, lambda z: soft_cross_entropy(z, targets), graph=slope)
        value = wish(found)
        return value.detach(), torch.autograd.grad(value.sum(), e)[0] if slope else None

    def explicit(e: Tensor, wish: dict[str, Tensor], slope: bool) -> tuple[Tensor, Tensor | None]:
        values, slopes = [], []
        for p in chosen.values():
            p.requires_grad_(True)
        for one in e.split(1):  # type: ignore[no-untyped-call]
            logits = model(inputs_embeds=one[0], attention_mask=batch.attention_mask).logits
            loss = soft_cross_entropy(logits[None], goal.to(e.dtype)[None])[0]
            own = torch.autograd.grad(loss, list(chosen.values()), create_graph=slope)
            value = torch.stack([(g - wish[n]).square().sum() for n, g in zip(chosen, own)]).sum()
            values.append(value.detach())
            if slope:
                slopes.append(torch.autograd.grad(value, e)[0])
        for p in chosen.values():
            p.requires_grad_(False)
        return torch.stack(values), torch.stack(slopes).sum(0) if slope else None

    def cpu(side: Callable[..., object], *arguments: object) -> float:
        start = time.process_time()
        side(*arguments)
        return time.process_time() - start

    rng = generator(0)
    near = Distance(observed, "l2")
    hidden = int(model.config.hidden_size)  # type: ignore[union-attr, arg-type]  # a Hugging Face config
    for count in options.candidates:
        e = (0.05 * torch.randn(count, *batch.input_ids.shape, hidden, generator=rng)).requires_grad_(True)
        for slope in (True, False):
            pairs = []
            for _ in range(options.repeats + 1):
                pairs.append((cpu(factored, e, near, slope), cpu(explicit, e, observed, slope)))
            ours, theirs = (1000 * median(side) / count for side in zip(*pairs[1:]))
            ratio = median(b / a for a, b in pairs[1:])
            what = "step" if slope else "evaluation"
            print(f"K {count:3d}, {what}: {ours:.1f} ms against {theirs:.1f} ms a candidate, ratio {ratio:.1f}", flush=True)
    model.double()
    e = (0.05 * torch.randn(2, *batch.input_ids.shape, hidden, generator=rng)).double().requires_grad_(True)
    wish = {n: g.double() for n, g in observed.items()}
    (a, da), (b, db) = factored(e, Distance(wish, "l2"), True), explicit(e, wish, True)
    assert da is not None and db is not None
    value, gradient = float(((a - b) / b).abs().max()), float((da - db).norm() / db.norm())
    print(f"float64: values differ by {value:.1e}, gradients by {gradient:.1e}")


if __name__ == "__main__":
    main()

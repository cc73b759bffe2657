"""What the signs of adapters say of the next token, beside what the model expects, behind the true beginning of a text.

python benchmarks/adapter_signs.py TEXTS.parquet --models MODELS --model smollm2 --draws 5

The client trained adapters on queries and values with AdamW: four steps on one text, from the second round on. Its
difference is little more than signs. In every block, they are compared with the states of the next token and of others: the
255 that the model expects most. Printed is at how many places of a text the signs put the true token first, and at how many
the model alone does.
"""

from __future__ import annotations

import torch
from lora_setting import options_of_one_text, texts_behind_adamw
from torch import Tensor

from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.rows import visible_gradients
from rasura.core.values import Observation
from rasura.victims.models import parts


@torch.no_grad()
def places(seen: Observation, text: list[int], others: int) -> list[tuple[int, int]]:
    """Of each token of ``text`` but the first and the last one, which has no gradient: how many of ``others`` the signs put
    before it, and how many the model."""
    known, inputs = parts(seen.model), Inputs(seen.model)
    signs = {b.index: torch.cat(visible_gradients(seen, b.qkv)) for b in known.blocks}
    signs = {k: m / m.norm(dim=1, keepdim=True).clamp_min(1e-30) for k, m in signs.items()}
    found = []
    for n in range(1, len(text) - 1):
        head = torch.tensor(text[:n])
        logits = seen.model(input_ids=head[None], attention_mask=torch.ones_like(head)[None]).logits[0, -1]
        likely = [t for t in logits.topk(others + 1).indices.tolist() if t != text[n]][:others]
        states = inputs.following(head, torch.tensor([text[n], *likely]), known.blocks)
        excess = sum((above(x, signs[k]) for k, x in states.items()), torch.zeros(()))
        found.append((int((excess[1:] > excess[0]).sum()), int((logits > logits[text[n]]).sum())))
    return found


def above(states: Tensor, signs: Tensor) -> Tensor:
    """By how many deviations of ``states`` ``(tokens, hidden)`` each of them leans more to ``signs`` ``(rows, hidden)``."""
    x = states - states[1:].mean(0)
    share = ((x / x.norm(dim=1, keepdim=True).clamp_min(1e-30)) @ signs.T).square().sum(1)
    out: Tensor = (share - share[1:].mean()) / share[1:].std()
    return out


def main() -> None:
    """Print the places of each text."""
    told = options_of_one_text(__doc__, "runs/adapter_signs.jsonl").parse_args()
    every = []
    for draw, (_, row, seen) in enumerate(texts_behind_adamw(told)):
        found = places(seen, list(row.ids(0)), 255)
        every += found
        firsts = [sum(rank == 0 for rank in ranks) for ranks in zip(*found)]
        print(f"text {draw}: {len(found)} places; first by the signs {firsts[0]}, by the model {firsts[1]}", flush=True)
    signs, expected = (list(ranks) for ranks in zip(*every))
    for what, ranks in (("signs", signs), ("model", expected)):
        first, ten = (sum(rank < most for rank in ranks) for most in (1, 10))
        print(f"{what}: first at {first} of {len(ranks)} places, among ten at {ten}")


if __name__ == "__main__":
    main()

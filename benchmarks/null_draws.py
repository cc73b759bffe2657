"""What attacks claim where there is nothing to read: noise, wrong weights, another model's update.

python benchmarks/null_draws.py --out runs/null_draws.jsonl --draws 200
python benchmarks/null_draws.py --out runs/null_draws.jsonl --table

Every registered attack on an update, on ``--draws`` draws of each of three kinds, tiny random models, the smallest budget:

- ``noise``: Gaussian tensors of a gradient's shapes and sizes in place of the gradient;
- ``weights``: a true update, read with weights that are off by 1e-4, 1e-3, .01, .1 or 1 of their own deviation;
- ``other``: a true update of a model of another seed.

A claim (``verified`` or ``span``) is false where the text is not the one that was sent; in noise there is none. Draws that
are in the file already are not run again.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from rasura import registry
from rasura.attacks.images.search import Work as Images
from rasura.attacks.updates.gradient_matching.settings import Work as Matching
from rasura.attacks.updates.span_matching.attack import Work as Spans
from rasura.core.batches import Batch
from rasura.core.interfaces import ActiveAttack, Attack, AttackFailed, Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, WITH_LENGTHS, observe
from rasura.core.values import NO_TEXT, UNKNOWN, Grant, Message, Observation, Reconstruction, Task, Vocabulary
from rasura.data.images import demo_images, encode_images
from rasura.ghost.defense import ghost
from rasura.ghost.table import ShadowSettings
from rasura.victims.step import step
from rasura.victims.vision import lenet

KINDS = ("noise", "weights", "other")
SCALES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
WORDS, PLACES, PAD, FIRST, LAST = 200, 24, 0, 1, 2
ENCODERS_ONLY = frozenset(
    {"labels", "pursuit", "dlg", "tag", "lamp-cos", "lamp-l1l2", "grab", "guided-grab", "mask-positions", "decepticons"}
)
SPECIAL = frozenset({PAD, FIRST, LAST})
SMALL_GHOST = ShadowSettings(k=12, overlap=0.3, grow=4, max_k=40, language=None)
ATTACKS = tuple(registry.ATTACKS)


def vocabulary(task: str) -> Vocabulary:
    """Words ``w3 w4 ...`` between two marks; a causal text has no end mark."""
    names = {f"w{i}": i for i in range(WORDS)}
    suffix = () if task == "causal" else (LAST,)
    return Vocabulary(
        WORDS, lambda ids: " ".join(f"w{i}" for i in ids), lambda text: [names[w] for w in text.split() if w in names],
        (FIRST,), suffix, PAD, SPECIAL,
    )  # fmt: skip


@lru_cache(maxsize=64)
def model_of(family: str, seed: int, width: int) -> nn.Module:
    """A random model of two blocks: a BERT that classifies into three, or a GPT-2 or Llama that predicts words."""
    torch.manual_seed(seed)
    common: dict[str, Any] = {"vocab_size": WORDS, "pad_token_id": PAD, "bos_token_id": FIRST, "eos_token_id": LAST}
    common |= {"attn_implementation": "eager", "tie_word_embeddings": False}
    if family == "gpt2":
        own = {"n_embd": width, "n_layer": 2, "n_head": 4, "n_positions": PLACES}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**common, **own)).eval()
    shape = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 2 * width}
    shape |= {"max_position_embeddings": PLACES}
    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **shape)).eval()
    return transformers.BertForSequenceClassification(transformers.BertConfig(**common, **shape, num_labels=3)).eval()


def small(name: str) -> Attack[Reconstruction]:
    """The attack with the least work that runs all of it."""
    made: Any = registry.attack(name)
    least: Any = {"span-matching": Spans(4, 12, 1, 1, sweeps=1, holes=0)}.get(name)
    if name in ("dlg", "tag"):
        least = Matching(4, 1, 12)
    elif name.startswith("lamp"):
        least = Matching(4, 1, 12, 4, 6)
    elif name == "grab":
        least = Matching(4, 1, 8, orders=4, beam=1, sweeps=1, entries=0.0)
    elif name == "pursuit":
        return replace(made, work={"quick": (60, 2, 1)})
    elif name in ("inverting-gradients", "feature-matching"):
        least = Images(1, 8, 1)
    elif name == "best":
        members = ("embedding-rows", "span", "mask-positions", "pursuit", "span-matching")
        return replace(made, attacks=tuple(partial(small, n) for n in members))
    return made if least is None else replace(made, levels={"quick": least})


def text_batch(draw: int, task: str) -> Batch:
    """One text, every third time two, of random words."""
    rng = generator(draw, "text")
    rows = []
    for _ in range(2 if draw % 3 == 2 else 1):
        words = (3 + torch.randint(WORDS - 3, (4 + int(torch.randint(3, (), generator=rng)),), generator=rng)).tolist()
        rows.append([FIRST, *words, *([] if task == "causal" else [LAST])])
    longest = max(map(len, rows))
    ids = torch.tensor([r + [PAD] * (longest - len(r)) for r in rows])
    mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows])
    labels = torch.where(mask.bool(), ids, -100) if task == "causal" else torch.arange(len(rows)) % 3
    texts = tuple(" ".join(f"w{i}" for i in r) for r in rows)
    return Batch(ids, mask, labels, texts, texts, special_ids=SPECIAL)


def perturbed(model: nn.Module, scale: float, draw: int) -> nn.Module:
    """``model`` with every weight off by ``scale`` of its tensor's size."""
    out, rng = copy.deepcopy(model), generator(draw, "weights")
    with torch.no_grad():
        for p in out.parameters():
            p.add_(scale * p.square().mean().sqrt() * torch.randn(p.shape, generator=rng))
    return out


def noise_like(message: Message, draw: int) -> Message:
    """Gaussian tensors of the same shapes and sizes, with the same entries hidden."""
    rng = generator(draw, "noise")
    drawn = {n: g.square().mean().sqrt() * torch.randn(g.shape, generator=rng) for n, g in message.gradients.items()}
    return replace(message, gradients={n: g * message.visible[n] if n in message.visible else g for n, g in drawn.items()})


def _images(name: str, kind: str, draw: int) -> tuple[Observation, tuple[tuple[int, ...], ...]]:
    model = lenet(4, image_size=16)
    batch = encode_images(demo_images(16)[draw % 4 : draw % 4 + 1], size=16, num_labels=4)
    truth = step(model, batch, task="vision", vocabulary=NO_TEXT, rng=generator(draw, "step"))
    return _seen(observe(truth, HONEST_SERVER), model, lambda: lenet(4, image_size=16), kind, draw), ()


def _seen(seen: Observation, model: nn.Module, other: Any, kind: str, draw: int) -> Observation:
    if kind == "noise":
        return replace(seen, message=noise_like(seen.message, draw))
    wrong = perturbed(model, SCALES[draw % len(SCALES)], draw) if kind == "weights" else other()
    return replace(seen, granted={**seen.granted, Grant.MODEL: wrong})


def observation(name: str, kind: str, draw: int) -> tuple[Observation, tuple[tuple[int, ...], ...]]:
    """What the adversary sees in a draw in which the attack ``name`` acts, and the texts that were sent."""
    if name in ("inverting-gradients", "feature-matching"):
        return _images(name, kind, draw)
    decoder = not (name in ENCODERS_ONLY or name.startswith("ghost"))
    family = ("bert", "gpt2", "bert", "llama")[draw % 4] if decoder else "bert"
    task: Task = "classification" if family == "bert" else "causal"
    width = (32, 48)[draw // 2 % 2]
    model, words = model_of(family, draw % 8, width), vocabulary(task)
    attack = registry.attack(name)
    if isinstance(attack, ActiveAttack):
        model = attack.craft(model, task, rng=generator(draw, "craft"))
    defense: Any = ()
    if name.startswith("ghost"):
        defense = (ghost(shadows=SMALL_GHOST),)
    elif name == "mask-positions":
        defense = registry.parse_defense("pruning:0.9")
    elif name != "embedding-rows" and draw // 4 % 2:
        defense = registry.parse_defense("frozen-embeddings")
    batch = text_batch(draw, task)
    truth = step(model, batch, defense, task=task, vocabulary=words, rng=generator(draw, "step"))
    reference = tuple(" ".join(f"w{3 + (k + j) % 190}" for j in range(6)) for k in range(32))
    # Where lengths are unknown, pursuit spends seconds on places that no text has.
    threat = WITH_LENGTHS if name in ("pursuit", "best") or name.startswith("ghost") else HONEST_SERVER
    seen = observe(truth, threat, reference_text=reference)
    texts = tuple(truth.text_batch.ids(k) for k in range(len(batch)))

    def other() -> nn.Module:
        fresh = model_of(family, draw % 8 + 100, width)
        return attack.craft(fresh, task, rng=generator(draw, "other")) if isinstance(attack, ActiveAttack) else fresh

    return _seen(seen, model, other, kind, draw), () if kind == "noise" else texts


def right(guess: Reconstruction, texts: tuple[tuple[int, ...], ...]) -> bool:
    """Whether what is claimed is true: every text that of the batch, holes aside; of a bag, every word in the batch."""
    if not guess.ordered:
        return {t for text in guess.tokens for t in text} <= {t for text in texts for t in text}
    left = list(texts)
    for text in guess.tokens:
        fits = [t for t in left if len(t) == len(text) and all(a in (b, UNKNOWN) for a, b in zip(text, t))]
        if not fits:
            return False
        left.remove(fits[0])
    return True


def run(name: str, kind: str, draw: int) -> dict[str, Any]:
    """One attack on one draw: its confidence, or ``failed`` or ``not applicable``, and whether a claim is false."""
    seen, texts = observation(name, kind, draw)
    row = {"attack": name, "kind": kind, "draw": draw}
    try:
        guess = small(name)(seen, rng=generator(draw, "attack"), budget=Budget("quick"))
    except AttackFailed:
        return row | {"outcome": "failed", "false": False}
    except NotApplicable as reason:
        return row | {"outcome": "not applicable", "false": False, "reason": str(reason)}
    claimed = guess.confidence in ("verified", "span")
    return row | {"outcome": guess.confidence, "false": claimed and not right(guess, texts)}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The claims of every attack as rows of a Markdown table: false ones of all, and true ones."""
    yield "| attack | kind | draws | applicable | verified, false | span, false | verified, true | span, true |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in ATTACKS:
        for kind in KINDS:
            some = [r for r in rows if (r["attack"], r["kind"]) == (name, kind)]
            n = Counter((r["outcome"], r["false"]) for r in some)
            away = n["not applicable", False]
            cells = [n["verified", True], n["span", True], n["verified", False], n["span", False]]
            yield f"| `{name}` | {kind} | {len(some)} | {len(some) - away} | " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """See the module's own text."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument("--draws", type=int, default=200)
    ask.add_argument("--attack", nargs="*", default=list(ATTACKS))
    ask.add_argument("--table", action="store_true", help="print the table of what is in the file")
    given = ask.parse_args()
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    rows = [json.loads(line) for line in lines]
    if given.table:
        print("\n".join(table(rows)))
        return
    done = {(r["attack"], r["kind"], r["draw"]) for r in rows}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("a") as out:
        for draw in range(given.draws):
            for kind in KINDS:
                for name in given.attack:
                    if (name, kind, draw) not in done:
                        start = time.process_time()
                        row = run(name, kind, draw)
                        out.write(json.dumps(row | {"seconds": round(time.process_time() - start, 2)}) + "\n")
                        out.flush()


if __name__ == "__main__":
    main()

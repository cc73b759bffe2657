"""CPU time of one gradient-matching step on MiniLM, beside the explicit way and the floor; all in one run, taking turns.

python benchmarks/matching.py --candidates 1 8 16 32
python benchmarks/matching.py --rows --candidates 1 2 8

Explicit: one candidate at a time, every weight gradient formed. Both match the same parameters with squared L2. ``--rows``
times the steps of LAMP and TAG, also by hooks and autograd in place of written derivatives. One floor of them is four
products with each layer's weights; another the same candidates through the model and twice back, with nothing compared but
the sums of squares of the factors. TAG's third is the three products that L1 and its slopes need of every layer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn

from rasura.attacks.shared.dummies import nearest_tokens, ordinary_ids, token_table
from rasura.attacks.updates.gradient_matching.factors import Factor, Factoriser
from rasura.attacks.updates.gradient_matching.objective import Distance, soft_cross_entropy
from rasura.core.batches import Batch
from rasura.core.rng import generator
from rasura.data.text import Example, encode
from rasura.victims.loading import Victim, load
from rasura.victims.step import gradients

TEXT = "Anna Berg pays on Friday."
ALPHA = 0.01


@dataclass(frozen=True)
class Setting:
    """One update of MiniLM, ``observed`` by parameter, and what candidates need to be compared with it."""

    victim: Victim
    batch: Batch
    factoriser: Factoriser
    observed: Mapping[str, Tensor]
    goal: Tensor

    @property
    def model(self) -> nn.Module:
        return self.victim.model

    @property
    def chosen(self) -> dict[str, nn.Parameter]:
        """The parameters that are matched."""
        return {n: p for n, p in self.model.named_parameters() if n in self.observed}

    def factors(self, e: Tensor, slope: bool) -> Mapping[str, Factor]:
        """Factors of candidates ``e``."""
        targets = self.goal.to(e.dtype).expand(len(e), -1, -1)
        return self.factoriser(e, self.batch.attention_mask, lambda z: soft_cross_entropy(z, targets), graph=slope)

    def factored(self, e: Tensor, wish: Distance, slope: bool) -> tuple[Tensor, Tensor | None]:
        """Distances and slopes of all candidates at once."""
        value = wish(self.factors(e, slope))
        return value.detach(), torch.autograd.grad(value.sum(), e)[0] if slope else None

    def explicit(
        self, e: Tensor, wish: Mapping[str, Tensor], slope: bool, alpha: float = 0.0
    ) -> tuple[Tensor, Tensor | None]:
        """The same for squared L2 plus ``alpha`` times L1, one by one, with every weight gradient formed."""
        values, slopes = [], []
        for p in self.chosen.values():
            p.requires_grad_(True)
        for one in e.split(1):  # type: ignore[no-untyped-call]
            logits = self.model(inputs_embeds=one[0], attention_mask=self.batch.attention_mask).logits
            loss = soft_cross_entropy(logits[None], self.goal.to(e.dtype)[None])[0]
            own = torch.autograd.grad(loss, list(self.chosen.values()), create_graph=slope)
            off = [g - wish[n] for n, g in zip(self.chosen, own)]
            value = torch.stack([d.square().sum() + (alpha * d.abs().sum() if alpha else 0.0) for d in off]).sum()
            values.append(value.detach())
            if slope:
                slopes.append(torch.autograd.grad(value, e)[0])
        for p in self.chosen.values():
            p.requires_grad_(False)
        return torch.stack(values), torch.stack(slopes).sum(0) if slope else None

    def candidates(self, count: int, rng: torch.Generator) -> Tensor:
        """Random embeddings."""
        hidden = int(self.model.config.hidden_size)  # type: ignore[union-attr, arg-type]  # a Hugging Face config
        return (0.05 * torch.randn(count, *self.batch.input_ids.shape, hidden, generator=rng)).requires_grad_(True)


def setting(text: str) -> Setting:
    """The update of ``text``."""
    victim = load("minilm", "classification")
    model = victim.model.eval()
    batch = encode([Example(text, None, 1)], victim.tokenizer, "classification", max_length=64, num_labels=2)
    target, _ = gradients(model, batch.inputs())
    model.requires_grad_(False)
    factoriser = Factoriser(model, list(target))
    goal = torch.nn.functional.one_hot(batch.labels, 2).float()
    return Setting(victim, batch, factoriser, factoriser.observed(target), goal)


def cpu(side: Callable[..., object], *arguments: object) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    side(*arguments)
    return time.process_time() - start


def squared_l2(s: Setting, counts: list[int], repeats: int) -> None:
    """Steps and evaluations of squared L2, factored against explicit; and how far apart they are in float64."""
    rng = generator(0)
    near = Distance(s.observed, "l2")
    for count in counts:
        e = s.candidates(count, rng)
        for slope in (True, False):
            pairs = []
            for _ in range(repeats + 1):
                pairs.append((cpu(s.factored, e, near, slope), cpu(s.explicit, e, s.observed, slope)))
            ours, theirs = (1000 * median(side) / count for side in zip(*pairs[1:]))
            ratio = median(b / a for a, b in pairs[1:])
            what = "step" if slope else "evaluation"
            print(f"K {count:3d}, {what}: {ours:.1f} ms against {theirs:.1f} ms a candidate, ratio {ratio:.1f}", flush=True)
    s = replace(s, factoriser=Factoriser(s.model.double(), list(s.observed)))
    e = s.candidates(2, rng).detach().double().requires_grad_(True)
    wish = {n: g.double() for n, g in s.observed.items()}
    (a, da), (b, db) = s.factored(e, Distance(wish, "l2"), True), s.explicit(e, wish, True)
    assert da is not None and db is not None
    value, gradient = float(((a - b) / b).abs().max()), float((da - db).norm() / db.norm())
    print(f"float64: values differ by {value:.1e}, gradients by {gradient:.1e}")


def twice_back(s: Setting, e: Tensor) -> None:
    """The model and its gradient by the layers' outputs, and a gradient through both: what every step does at least."""
    squares = [f.delta.square().sum() + (0.0 if f.x is None else f.x.square().sum()) for f in s.factors(e, True).values()]
    torch.autograd.grad(torch.stack(squares).sum(), e)


def layers(s: Setting, e: Tensor) -> None:
    """Four products of each layer's weights with a vector a token: what a gradient and its slopes take at least."""
    inputs = {width: torch.ones(len(e) * e.shape[2], width) for g in s.observed.values() for width in g.shape}
    for weight in (s.model.get_parameter(n).detach() for n, g in s.observed.items() if g.dim() == 2):
        for _ in range(2):
            inputs[weight.shape[1]] @ weight.T
            inputs[weight.shape[0]] @ weight


def products(s: Setting, e: Tensor) -> None:
    """Every layer's gradient, and its products with both factors."""
    tokens = e.shape[2]
    for outputs, inputs in [g.shape for g in s.observed.values() if g.dim() == 2]:
        for _ in e:
            own = torch.ones(outputs, tokens) @ torch.ones(tokens, inputs)
            torch.ones(tokens, outputs) @ own
            torch.ones(tokens, inputs) @ own.T


def sides(s: Setting, e: Tensor) -> dict[str, tuple[Callable[[], object], int]]:
    """What is timed, and how many candidates it is of."""
    cosine, tag = Distance(s.observed, "cosine"), Distance(s.observed, "l2", alpha=ALPHA)
    table, ordinary = token_table(s.model, s.victim.vocabulary), ordinary_ids(s.victim.vocabulary)
    one = e.detach()[:1].clone().requires_grad_(True)
    hooks = replace(s, factoriser=Factoriser(s.model, list(s.observed)))
    hooks.factoriser.encoder = None
    return {
        "LAMP step": (lambda: s.factored(e, cosine, True), len(e)),
        "decoding": (lambda: nearest_tokens(e.detach(), table, ordinary, 1), len(e)),
        "LAMP candidate": (lambda: s.factored(e, cosine, False), len(e)),
        "TAG step": (lambda: s.factored(e, tag, True), len(e)),
        "LAMP step by hooks": (lambda: hooks.factored(e, cosine, True), len(e)),
        "LAMP candidate by hooks": (lambda: hooks.factored(e, cosine, False), len(e)),
        "TAG step by hooks": (lambda: hooks.factored(e, tag, True), len(e)),
        "floor of a step: four products a layer": (lambda: layers(s, e), len(e)),
        "floor of a step: twice back": (lambda: twice_back(s, e), len(e)),
        "floor of L1: three products": (lambda: products(s, e), len(e)),
        "explicit TAG step": (lambda: s.explicit(one, s.observed, True, ALPHA), 1),
        "explicit L2 step": (lambda: s.explicit(one, s.observed, True), 1),
        "explicit L2 candidate": (lambda: s.explicit(one, s.observed, False), 1),
    }


def rows(s: Setting, counts: list[int], repeats: int) -> None:
    """A table: LAMP's and TAG's steps and candidates, the explicit way, and the floors."""
    rng = generator(0)
    for count in counts:
        measured = sides(s, s.candidates(count, rng))
        times: dict[str, list[float]] = {name: [] for name in measured}
        for _ in range(repeats + 1):
            for name, (side, share) in measured.items():
                times[name].append(1000 * cpu(side) / share)
        for name, found in times.items():
            print(f"K {count:3d}, {name}: {median(found[1:]):.1f} ms a candidate", flush=True)


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", action="store_true", help="LAMP's and TAG's steps in place of squared L2")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--threads", type=int, default=1, help="more than one counts waiting as work")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    s = setting(options.text)
    print(f"{s.batch.input_ids.shape[1]} tokens, {len(s.observed)} parameters, {options.threads} thread(s)")
    (rows if options.rows else squared_l2)(s, options.candidates, options.repeats)


if __name__ == "__main__":
    main()

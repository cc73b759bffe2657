"""What a model is worth behind each protection of a model service, and what is read back: ObfusLM's Table 2, scaled down.

python benchmarks/obfuslm.py utility --reference DATA/sst2.train.parquet --data DATA/sst2.validation.parquet --out runs/sst2
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rasura import recipes
from rasura.data.text import load_examples
from rasura.interfaces import Budget
from rasura.metrics.service import RougeL, TopTokens
from rasura.metrics.utility import classification
from rasura.obfuscation import services
from rasura.obfuscation.settings import ObfuscationSettings
from rasura.obfuscation.split import Split
from rasura.obfuscation.tokenizer import fixed_ids
from rasura.records import write_whole
from rasura.rng import child, generator
from rasura.threat import observe_service, service_transcript
from rasura.training import encoded
from rasura.values import Batch
from rasura.victims.loading import Victim, load
from rasura.victims.models import parts
from rasura.victims.train import FineTuning, Recipe, predictions


def none(victim: Victim, ids: list[list[int]], options: argparse.Namespace) -> services.Service:
    """No protection at all."""
    return services.plain(victim.model, victim.vocabulary)


def obfuslm(victim: Victim, ids: list[list[int]], options: argparse.Namespace) -> services.Service:
    """ObfusLM, by default with the paper's k and epsilon (Table 8)."""
    return services.obfuslm(
        victim.model, victim.vocabulary, settings=ObfuscationSettings(options.k, options.epsilon, options.beta),
        fixed=fixed_ids(victim.tokenizer, victim.vocabulary.size),
        rng=generator(options.seed, "key", options.k, str(options.epsilon)),
    )  # fmt: skip


def santext(victim: Victim, ids: list[list[int]], options: argparse.Namespace) -> services.Service:
    """SANTEXT+ with the paper's share and change; its epsilon 3 is for GloVe, whose distances are several times greater."""
    return services.santext(victim.model, victim.vocabulary, epsilon=options.santext_epsilon)


def custext(victim: Victim, ids: list[list[int]], options: argparse.Namespace) -> services.Service:
    """CUSTEXT+ as in the paper."""
    return services.custext(victim.model, victim.vocabulary)


def dp_forward(victim: Victim, ids: list[list[int]], options: argparse.Namespace) -> services.Service:
    """DP-Forward on the word embedding at the paper's epsilon."""
    return services.dp_forward(victim.model, victim.vocabulary)


def sentinel(victim: Victim, ids: list[list[int]], options: argparse.Namespace) -> services.Service:
    """SentinelLMs: ten glide reflections in any direction."""
    return services.sentinel(victim.model, victim.vocabulary, rng=generator(options.seed, "key"))


def published_sentinel(victim: Victim, ids: list[list[int]], options: argparse.Namespace) -> services.Service:
    """SentinelLMs as its authors' code has it: all ten along the vector of ones."""
    return services.sentinel(victim.model, victim.vocabulary, directions="ones", rng=generator(options.seed, "key"))


def cape(victim: Victim, ids: list[list[int]], options: argparse.Namespace) -> services.Service:
    """CAPE with the paper's epsilon and weight."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        return services.cape(victim.model, victim.vocabulary, ids)


def text_obfuscator(victim: Victim, ids: list[list[int]], options: argparse.Namespace) -> services.Service:
    """TextObfuscator with the paper's weights."""
    return services.text_obfuscator(victim.model, victim.vocabulary, ids[:2000])


PROTECTIONS: dict[str, Callable[[Victim, list[list[int]], argparse.Namespace], services.Service]] = {
    "none": none, "obfuslm": obfuslm, "santext+": santext, "custext+": custext, "dp-forward": dp_forward,
    "sentinellms": sentinel, "sentinellms-ones": published_sentinel, "textobfuscator": text_obfuscator, "cape": cape,
}  # fmt: skip


def data(options: argparse.Namespace) -> tuple[list[Any], list[Any], list[Any]]:
    """Texts to train on, texts held out, and the whole of the test file."""
    everything = load_examples(options.reference)
    picked = random.Random(options.seed).sample(everything, min(len(everything), options.train + options.holdout))
    return picked[options.holdout :], picked[: options.holdout], load_examples(options.data)


def sent(service: services.Service, rows: Sequence[Batch], rng: torch.Generator) -> list[Batch]:
    """Texts as the client sends them (or, where states are sent, what it computes them of)."""
    drawn = service.sent([row.ids(0) for row in rows], rng)
    return [replace(row, input_ids=torch.tensor([ids])) for row, ids in zip(rows, drawn)]


def accuracy(model: nn.Module, rows: Sequence[Batch], pad: int, seed: int) -> float:
    """Share of ``rows`` that ``model`` gets right; what is drawn for noise begins at ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return classification(predictions(model, rows, pad), [int(r.labels[0]) for r in rows])["accuracy"]


NEAREST = ("knn", "ednn")
INFORMED = {
    "obfuslm": "decipherment", "santext+": "preimage", "custext+": "preimage", "dp-forward": "preimage",
    "sentinellms": "isometry",
}  # fmt: skip
"""The attack that knows the mechanism; of those that are trained with the task it is InvBert."""


def attacked(service: services.Service, victim: Victim, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """What the operator reads of some of the test texts as they are sent: figures of every text, by attack and metric."""
    texts = [f"{e.text} {e.text_pair or ''}".strip() for e in load_examples(options.data)]
    chosen = random.Random(options.seed).sample([t for t in texts if len(t.split()) > 3], options.texts)
    reference = [f"{e.text} {e.text_pair or ''}".strip() for e in load_examples(options.reference)]
    reference = [t for t in reference if t not in set(chosen)][: options.references]
    words = victim.vocabulary
    ids = [(*words.prefix, *words.encode(t)[: options.max_length - 2], *words.suffix) for t in chosen]
    # What a served model learned since is no part of what was uploaded; where a client's half is trained it is.
    truth = service_transcript(service, ids, generator(options.seed, "audit"))
    seen = observe_service(truth, reference_text=tuple(reference))
    out = {}
    for name in ("blind", *NEAREST, "invbert", INFORMED.get(service.mechanism.name, "")):
        if name:
            guess = recipes.SERVICE_ATTACKS[name]()(seen, rng=generator(options.seed, name), budget=Budget(options.budget))
            found = {metric.name: metric(guess, truth) for metric in (TopTokens(1), TopTokens(3), RougeL())}
            out[name] = {metric: list(values) for metric, values in found.items() if values is not None}
    return out


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The attacks on the protection ``name`` and what a model trained behind it is worth; kept in its folder, where a second
    call finds both."""
    place = Path(options.out) / f"{name}{options.tag}"
    place.mkdir(parents=True, exist_ok=True)
    files = {what: place / f"{what}.json" for what in ("result", "attacks")}
    if not all(file.exists() for file in files.values()):
        train, held, test = data(options)
        labels = 1 + max(e.label for e in [*train, *test])
        victim = load(options.model, "classification", num_labels=labels, seed=options.seed)
        plain = [encoded(victim, some, max_length=options.max_length, truncate=True) for some in (train, held, test)]
        service = PROTECTIONS[name](victim, [list(r.ids(0)) for r in plain[0]], options)
        # What was uploaded is read before training. Where a client's half is trained, that is what sends.
        learned = isinstance(service.served, Split) and service.served.depth > 0
        if not learned and not files["attacks"].exists():
            write_whole(files["attacks"], json.dumps(attacked(service, victim, options)))
        if not files["result"].exists() and not options.attacks_only:
            trained(name, service, victim, plain, place, options)
        if files["result"].exists() and not files["attacks"].exists():
            write_whole(files["attacks"], json.dumps(attacked(service, victim, options)))
    there = {what: file for what, file in files.items() if file.exists()}
    found: dict[str, Any] = {what: json.loads(file.read_text(encoding="utf-8")) for what, file in there.items()}
    return found


def trained(
    name: str, service: services.Service, victim: Victim, plain: list[list[Batch]], place: Path, options: argparse.Namespace
) -> None:
    """Fine-tune behind a protection, every text as its client sends it; figures on the test file into ``place``."""
    start = time.process_time()
    rng = generator(options.seed, "sent")
    rows, watched, judged = (sent(service, some, rng) for some in plain)
    pad, seed = victim.vocabulary.pad_id or 0, child(generator(options.seed, "noise"))
    recipe = Recipe(
        epochs=options.epochs, batch_size=32, learning_rate=options.rate, patience=options.epochs, precision="bf16",
        seed=options.seed,
    )  # fmt: skip
    run = FineTuning(
        service.served, rows, (), recipe, place, task="classification", vocabulary=victim.vocabulary,
        evaluate=lambda m: {"accuracy": accuracy(m, watched, pad, seed)}, watched="accuracy", higher=True,
    )  # fmt: skip
    if options.embedding_factor != 1:
        table = service.served.get_parameter(parts(service.served).word_embedding)
        group = run.optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if p is not table]
        run.optimizer.add_param_group({"params": [table], "lr": options.rate * options.embedding_factor})
    for group in run.optimizer.param_groups:
        group["fused"] = True  # the same step, in one pass over the weights
    history = run.run(lambda done, of, told: print(f"{name}: epoch {done} of {of}: {told}", flush=True))
    right = accuracy(service.served, judged, pad, seed)
    run.finish({
        "protection": name, "accuracy": right, "half_width": 1.96 * math.sqrt(right * (1 - right) / len(judged)),
        "n_test": len(judged), "n_train": len(rows), "n_holdout": len(watched), "best_epoch": history.best_epoch,
        "history": history.epochs, "rate": options.rate, "embedding_factor": options.embedding_factor,
        "mechanism": dict(service.mechanism.parameters),
        "cpu_seconds": time.process_time() - start,
    })  # fmt: skip


def line(name: str, found: dict[str, Any]) -> str:
    """One row of the table. KNN+ is the better of the two nearest neighbours, as in the paper."""
    result, attacks = found.get("result"), found.get("attacks")
    if attacks is None:
        return f"| {name} | not measured" + " |" * 13
    nearest = max(NEAREST, key=lambda a: float(np.mean(attacks[a]["top1"])))
    informed = next((a for a in attacks if a in INFORMED.values()), "invbert")
    cells = [f"{100 * result['accuracy']:.1f} ± {100 * result['half_width']:.1f}" if result else "not measured"]
    for attack in (nearest, "invbert", informed):
        cells += [f"{100 * np.mean(attacks[attack][m]):.1f}" for m in ("top1", "top3", "rougeL")]
    cost = [str(result["n_train"]), f"{result['cpu_seconds']:.0f}"] if result else ["", ""]
    return "| " + " | ".join([name, *cells, informed, *cost]) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and attack behind every protection that is asked for; a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--reference", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--protection", nargs="+", default=list(PROTECTIONS))
    parser.add_argument("--tag", default="")
    parser.add_argument("--attacks-only", action="store_true")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--train", type=int, default=8000)
    parser.add_argument("--holdout", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--embedding-factor", type=float, default=1.0)
    parser.add_argument("--max-length", type=int, default=48)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--epsilon", type=float, default=0.1)
    parser.add_argument("--beta", type=float, default=0.99)
    parser.add_argument("--santext-epsilon", type=float, default=16.0)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--references", type=int, default=5000)
    parser.add_argument("--budget", default="quick")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    names = ["top-1", "top-3", "ROUGE-L"]
    head = ["protection", "accuracy", *(f"{a} {n}" for a in ("KNN+", "InvBert", "informed") for n in names)]
    head += ["informed attack", "texts", "s CPU"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|", flush=True)
    for name in options.protection:
        print(line(name, measured(name, options)), flush=True)


if __name__ == "__main__":
    main()

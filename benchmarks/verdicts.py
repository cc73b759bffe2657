"""False verdicts: sixteen families of models behind six protections, under the default attacks.

python benchmarks/verdicts.py                                            # the default attacks, two texts
python benchmarks/verdicts.py --attack blind,embedding-rows,span --limit 40   # enough texts for "holds"

The models are random and tiny. What counts is that no attack's crash, silence or refusal is taken for protection: a verdict
``not told from guessing`` is false where no attack that runs in the column reads the same texts without protection. That is
checked here on the raw scores, apart from the code that says the verdict. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rasura.core.interfaces import InputError
from rasura.report.findings import findings
from rasura.report.verdicts import NOT_TOLD, WORDS
from rasura.runs.audit import audit
from rasura.runs.plans import Plan
from rasura.testing.tiny import FAMILIES, tiny, tokenizer_folder

PROTECTIONS = (
    "frozen-embeddings", "frozen-embeddings+dropout:0.1", "frozen-blocks:1", "pruning:0.9", "gaussian:0.001", "dp-sgd:0.01",
)  # fmt: skip
SIXTEEN = (
    *FAMILIES, "electra", "mpnet", "albert", "modernbert", "opt", "qwen3", "gemma", "gpt-neox", "deberta-v2", "xlnet", "t5",
)  # fmt: skip
SHORT = dict(zip(WORDS, ("R", "A", "–", "G")))
"""Reads, above guessing, not measured, not told from guessing."""


def texts(count: int) -> tuple[str, ...]:
    """Different texts of six to nine words."""
    return tuple(" ".join(f"w{11 + (13 * k + 7 * n) % 280}" for n in range(6 + k % 4)) for k in range(count))


def audited(family: str, folder: Path, attacks: Sequence[str], limit: int) -> list[dict[str, Any]]:
    """The records of one family's audit; raises ``InputError`` where the model is refused at load."""
    model = tokenizer_folder(tiny(family, "classification", num_labels=2), folder / "model")
    plan = Plan(
        str(model), texts=texts(limit), limit=limit, attacks=tuple(attacks), defenses=PROTECTIONS, budget="quick",
        metrics=("token_recall",),
    )  # fmt: skip
    return [r.to_dict() for r in audit(plan, out=folder / "run")]


def readers(records: Iterable[Mapping[str, Any]], defense: str) -> set[str]:
    """Attacks that ended on every text behind ``defense`` and read more than guessing without protection, by raw means.

    The portfolio stands for the members that it ran on every text.
    """
    gains: dict[str, list[float]] = defaultdict(list)
    ended: dict[str, list[bool]] = defaultdict(list)
    for r in records:
        ran = [r["attack"]] if r["attack"] != "best" else str(r["details"].get("ran", "")).split(",")
        kept = [r["attack"]] if r["attack"] != "best" else [str(r["details"].get("attack"))]
        if r["attack"] == "blind":
            continue
        if r["defense"] == "none" and r["status"] == "ok" and r["scores"]:
            for name in kept:
                gains[name].append(r["scores"]["token_recall"]["mean"] - r["blind"]["token_recall"]["mean"])
        if r["defense"] == defense and r["status"] in ("ok", "failed"):
            for name in ran:
                ended[name].append(True)
    notes = len({r["batch"] for r in records})
    return {a for a, some in gains.items() if sum(some) > 0 and len(ended[a]) >= notes}


def main() -> None:
    """Print the table and what was false; exit 1 if anything was."""
    options = argparse.ArgumentParser()
    options.add_argument("--attack", default=",".join(Plan().attacks))
    options.add_argument("--family", default=",".join(SIXTEEN))
    options.add_argument("--limit", type=int, default=2)
    wanted = options.parse_args()
    refused, false, holding = {}, [], 0
    print("| family | none | " + " | ".join(PROTECTIONS) + " | gave up / crashed / not applicable |\n" + "|---" * 9 + "|")
    for family in wanted.family.split(","):
        with tempfile.TemporaryDirectory() as place:
            try:
                records = audited(family, Path(place), wanted.attack.split(","), wanted.limit)
            except InputError as reason:
                refused[family] = str(reason).replace(place, "")
                continue
        found = findings(records).verdicts
        marks = [SHORT[found[d].word] + ("*" if found[d].holds else "") for d in ("none", *PROTECTIONS)]
        ended = [sum(r["status"] == s for r in records) for s in ("failed", "crashed", "not_applicable")]
        print(f"| {family} | {' | '.join(marks)} | {' / '.join(map(str, ended))} of {len(records)} |", flush=True)
        holding += sum(found[d].holds for d in PROTECTIONS)
        said = [d for d in PROTECTIONS if (found[d].word == NOT_TOLD or found[d].holds) and not readers(records, d)]
        false += [f"{family} behind {d}: {found[d].says}" for d in said]
    print(f"\nRefused at load: {'; '.join(f'{name} ({why})' for name, why in refused.items()) or 'none'}")
    print(f"'Holds': {holding}. Without a yardstick: {len(false)}{''.join(f'; {line}' for line in false)}")
    raise SystemExit(bool(false))


if __name__ == "__main__":
    main()

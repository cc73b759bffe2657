"""The ladder: every attack on every rung of one fixed, versioned set of updates (``recipes.toml``).

python benchmarks/ladder/run.py --models FOLDER --english novels.validation.parquet --out runs/ladder
python benchmarks/ladder/run.py --out runs/ladder --table

``--models`` holds a folder for each model of the recipes but ``minilm``, which is embedded. English texts are paragraphs of
a file, joined until they are long enough; those of the other languages lie beside the recipes. Each attack on a rung is a
process, which stops after ``--minutes``; what is stopped or was interrupted goes on at the next call.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECIPES = tomllib.loads((HERE / "recipes.toml").read_text(encoding="utf-8"))
METRICS = ("rouge1", "rougeL", "exact_match", "token_recall")
TOGETHER = (("blind", "embedding-rows"), ("span",), ("dager",))
"""Attacks that share a process: those that take seconds, and each of the others."""


@dataclass(frozen=True)
class Rung:
    """One rung: texts of one language and length on one model, in batches of one size."""

    axis: str
    model: str
    language: str
    length: int
    batch: int
    defenses: tuple[str, ...]
    updates: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name for files, which tells all of it but the protections."""
        return f"v{RECIPES['version']}-{self.axis}-{self.model}-{self.language}-{self.length}-{self.batch}"


def rungs() -> Iterator[Rung]:
    """All rungs of the recipes."""
    for axis in RECIPES["axis"]:
        chosen = tuple(axis.get("defenses", RECIPES["defenses"])), tuple(axis.get("updates", ["fedsgd"]))
        where = product(axis["models"], axis.get("language", ["en"]), axis["length"], axis["batch"])
        for model, language, length, batch in where:
            yield Rung(axis["name"], model, language, length, batch, *chosen)


def texts(rung: Rung, english: str, tokenizer: Any) -> list[str]:
    """The texts of a rung: as many as its batches need, each of at least its length where the source allows it."""
    import torch

    from rasura.data.text import load_examples

    wanted = rung.batch * RECIPES["batches"][str(rung.batch)]
    if rung.language != "en":
        return [e.text for e in load_examples(HERE / "texts" / f"{rung.language}.jsonl")][:wanted]
    paragraphs = [e.text for e in load_examples(english)]
    order = torch.randperm(len(paragraphs), generator=torch.Generator().manual_seed(RECIPES["seed"])).tolist()
    out: list[str] = []
    text = ""
    for k in order:
        text = f"{text} {paragraphs[k]}".strip()
        if len(tokenizer(text, add_special_tokens=False)["input_ids"]) >= rung.length:
            out.append(text)
            text = ""
        if len(out) == wanted:
            return out
    raise SystemExit(f"{english} gives {len(out)} texts of {rung.length} tokens; {rung.name} needs {wanted}")


def climb(rung: Rung, attacks: Sequence[str], models: str, english: str, out: Path) -> None:
    """Run attacks on one rung into their folder; what the folder holds is not done again."""
    from rasura.core.run_store import RunStore
    from rasura.runs.audit import Audit
    from rasura.runs.plans import Plan
    from rasura.victims.loading import load

    task = RECIPES["models"][rung.model]
    victim = load("minilm" if rung.model == "minilm" else Path(models) / rung.model, task, seed=RECIPES["seed"])
    found = texts(rung, english, victim.tokenizer)
    plan = Plan(
        model=rung.model, task=task, texts=tuple(found), attacks=tuple(attacks), defenses=rung.defenses,
        updates=rung.updates, batch_sizes=(rung.batch,), metrics=METRICS, limit=len(found), truncate=True,
        seed=RECIPES["seed"],
    )  # fmt: skip
    prepared = Audit(plan, victim=replace(victim, max_length=rung.length))
    store = RunStore(out / rung.name / attacks[0], prepared.plan.canonical())
    try:
        for record in prepared.run(store):
            print(rung.name, record.attack, record.update, record.defense, record.status, record.confidence, flush=True)
    finally:
        store.close()


def table(out: Path) -> None:
    """Print a row for each rung, update and protection: ROUGE-1 of every attack, and how sure ``span`` was."""
    attacks: Sequence[str] = RECIPES["attacks"]
    print(
        "| axis | model | language | tokens | batch | update | protection |",
        " | ".join(attacks),
        "| `span` says | CPU s |",
    )
    print("|---" * (len(attacks) + 9) + "|")
    for rung in rungs():
        if not (out / rung.name).is_dir():
            continue
        records = [r for group in TOGETHER for r in _records(out / rung.name / group[0])]
        tried = {a: (out / rung.name / group[0]).is_dir() for group in TOGETHER for a in group}
        for update, defense in product(rung.updates, rung.defenses):
            here = [r for r in records if (r["update"], r["defense"]) == (update, defense)]
            cells = [_cell([r for r in here if r["attack"] == a], rung, tried[a]) for a in attacks]
            span = [r for r in here if r["attack"] == "span"]
            says = ", ".join(sorted({_said(r) for r in span}))
            cpu = f"{sum(r['cpu_seconds'] for r in span) / len(span):.1f}" if span else "–"
            place = [rung.axis, rung.model, rung.language, str(rung.length), str(rung.batch), update, defense]
            print("|", " | ".join([*place, *cells, says or "–", cpu]), "|")


def _records(folder: Path) -> list[Mapping[str, Any]]:
    """The Records of a folder; none if nothing ran there."""
    from rasura.core.run_store import RunStore

    if not (folder / "run.sqlite").is_file():
        return []
    store = RunStore(folder)
    records: list[Mapping[str, Any]] = list(store)
    store.close()
    return records


def _said(record: Mapping[str, Any]) -> str:
    if record["status"] != "ok":
        return f"{record['status'].replace('_', ' ')}: {record['reason']}"
    return str(record["confidence"])


def _cell(records: Sequence[Mapping[str, Any]], rung: Rung, tried: bool) -> str:
    """ROUGE-1, its interval over texts and their number; a word where nothing was measured."""
    from rasura.metrics.intervals import mean_interval

    if not records:
        return "stopped" if tried else "not run"
    read = [r for r in records if r["status"] == "ok" and "rouge1" in r["scores"]]
    if not read:
        return str(records[0]["status"]).replace("_", " ")
    values = [x for r in read for x in r["scores"]["rouge1"]["per_record"]]
    mean, low, high = mean_interval(values)
    failed, batches = [str(r["status"]) for r in records if r not in read], RECIPES["batches"][str(rung.batch)]
    note = f"; {len(failed)} of {len(records)} batches {failed[0].replace('_', ' ')}" if failed else ""
    note += f"; {batches - len(records)} of {batches} batches stopped" if len(records) < batches else ""
    return f"{100 * mean:.1f} ({100 * low:.0f} to {100 * high:.0f}; n {len(values)}{note})"


def main() -> None:
    """Climb the chosen rungs, or print what was reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="", help="folder of model folders")
    parser.add_argument("--english", default="", help="a data file of English paragraphs")
    parser.add_argument("--only", default="", help="rungs whose names contain this; several by commas")
    parser.add_argument("--minutes", type=float, default=30, help="of an attack on a rung")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--rung", default="", help=argparse.SUPPRESS)
    parser.add_argument("--attacks", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.table:
        return table(args.out)
    if args.rung:
        rung = next(r for r in rungs() if r.name == args.rung)
        return climb(rung, args.attacks.split(","), args.models, args.english, args.out)
    chosen = [r for r in rungs() if not args.only or any(word in r.name for word in args.only.split(","))]
    args.out.mkdir(parents=True, exist_ok=True)

    def one(rung: Rung, attacks: Sequence[str]) -> None:
        cells = RECIPES["batches"][str(rung.batch)] * len(rung.defenses) * len(rung.updates) * len(attacks)
        if len(_records(args.out / rung.name / attacks[0])) == cells:
            return
        (args.out / rung.name / attacks[0]).mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, "--out", str(args.out), "--rung", rung.name, "--attacks", ",".join(attacks)]
        command += ["--models", args.models, "--english", args.english]
        with (args.out / f"{rung.name}.log").open("a", encoding="utf-8") as log:
            try:
                code: Any = subprocess.run(
                    command, stdout=log, stderr=log, timeout=60 * args.minutes, env={**os.environ, "OMP_NUM_THREADS": "1"},
                    check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = f"stopped after {args.minutes:g} minutes"
        print(rung.name, *attacks, code, flush=True)

    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(one, *zip(*((rung, attacks) for attacks in TOGETHER for rung in chosen), strict=True)))
    return None


if __name__ == "__main__":
    main()

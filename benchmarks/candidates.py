"""Near copies among the candidates of a round: what comparing them with each other and with reference texts takes.

python benchmarks/candidates.py DATA/ag_news.validation.parquet --model MODELS/smollm2
python benchmarks/candidates.py DATA/ag_news.validation.parquet --model MODELS/smollm2 --groups 4

The candidates are the first texts of the file, each with near copies that lack one word; the references come after them.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

from rasura.data.text import Example, load_examples
from rasura.registry.candidates import like_earlier
from rasura.runs.candidates import ENOUGH, inputs_of, rows_of
from rasura.victims.loading import load


def main() -> None:
    """Compare once, and print what was found, the seconds and the peak of memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--copies", type=int, default=7)
    parser.add_argument("--words", type=int, default=20)
    told = parser.parse_args()
    victim = load(told.model, "causal")
    texts = [e.text.split()[: told.words] for e in load_examples(told.data) if len(e.text.split()) >= told.words]
    given = [" ".join(words[:k] + words[k + (k > 0) :]) for words in texts[: told.groups] for k in range(told.copies)]
    others = [" ".join(words) for words in texts[told.groups : told.groups + ENOUGH]]
    rows, references = (inputs_of(rows_of(victim, [Example(t, None, None) for t in some])) for some in (given, others))
    names = [name for name, _ in victim.model.named_parameters()]
    start, cpu = time.perf_counter(), time.process_time()
    found = like_earlier(victim.model, rows, references, names)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    length = max(len(row["input_ids"][0]) for row in references)
    print(f"{len(rows)} candidates, {sum(found)} of them much like an earlier one")
    print(f"{len(references)} references of at most {length} tokens")
    print(f"{wall:.1f} s, {cpu:.1f} s CPU, peak {peak:.2f} GiB")


if __name__ == "__main__":
    main()

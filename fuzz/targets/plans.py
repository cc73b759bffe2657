"""Plans of audits and files of studies, in TOML."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

from fuzz.mutations import damaged
from fuzz.target import Target, write_shared
from rasura.runs.plans import from_toml
from rasura.studies.files import load_study, names
from rasura.studies.papers import LISTS

LINE = re.compile(r"^(\s*[\w.]+ *= *)(.+)$", re.MULTILINE)
VALUES = (
    "true", "false", "0", "-1", "1", "3", "0.5", "-0.5", "1e999", "nan", "inf", "9999999999999999999999", '""', '"a"',
    '"span"', '"none"', '"../x"', '"\\u0000"', "[]", "[[]]", "{}",
    "[1, 2]", '["a"]', '["span", "span"]', "[true]", "{a = 1}", "[{}]",
    "1979-05-27", "1979-05-27T07:32:00Z", "07:32:00", '["pruning:2"]', '["dropout:nan"]', '["gaussian:1e999"]',
    '["a+b:c=d/e"]', '"""x"""', "[" * 50 + "]" * 50,
)  # fmt: skip
STUDY, PLAN = b"S", b"P"
STUDIES = Path(__file__).parents[2] / "studies"
PAPER = re.compile(rb"# (calibration|ghost|grab|obfuslm|selective-encryption)\n")

AUDIT = """
model = "minilm"
task = "classification"
attacks = ["blind", "span", "best"]
defenses = ["none", "pruning:0.9", "gaussian:0.001+dropout:0.1", "sealing:param=0.1"]
updates = ["fedsgd", "fedavg-sgd:2"]
threats = ["honest-server"]
batch_sizes = [1, 2]
metrics = ["rouge1", "token_recall"]
limit = 2
seeds = 1
budget = "quick"
show_text = false
entries = 0.5
"""


class Plans(Target):
    """``rasura.runs.plans.from_toml`` and ``rasura.studies.files.load_study``, on the studies of this repository."""

    name, share = "plans", 130

    def seeds(self) -> list[bytes]:
        # The first line says which paper's lists a study's rows are in.
        studies = [(name, f"# {name.partition('/')[0]}\n".encode()) for name in names(STUDIES)]
        read = (STUDY + paper + (STUDIES / f"{name}.toml").read_bytes() for name, paper in studies)
        return [PLAN + AUDIT.encode(), *read]

    def mutated(self, rng: Random, seeds: Sequence[bytes]) -> bytes:
        seed = seeds[0] if rng.random() < 0.4 else rng.choice(seeds)
        if rng.random() < 0.3:
            return seed[:1] + damaged(rng, seed[1:], [s[1:] for s in seeds])
        text = seed[1:].decode()
        for _ in range(rng.choice((1, 1, 2, 3))):
            found = list(LINE.finditer(text))
            if not found:
                break
            one = rng.choice(found)
            what = rng.random()
            line = one.group(1) + rng.choice(VALUES)
            if what < 0.1:
                line = ""
            elif what < 0.2:
                line = f"{rng.choice(('x', 'seed', 'texts', 'skip'))} = {rng.choice(VALUES)}\n{one.group()}"
            elif what < 0.25:
                line = f"[{rng.choice(('plan', 'train', 'service', 'membership', 'deviations', 'x'))}]\n{one.group()}"
            text = text[: one.start()] + line + text[one.end() :]
        return seed[:1] + text.encode()

    def read(self, data: bytes) -> None:
        if data[:1] == STUDY:
            if not (self.folder / LISTS).exists():
                shutil.copytree(STUDIES / LISTS, self.folder / LISTS)
            found = PAPER.match(data[1:])
            paper = found[1].decode() if found else "grab"
            (self.folder / paper).mkdir(exist_ok=True)
            write_shared(self.folder / paper / "study.toml", data[1:])
            load_study(f"{paper}/study", self.folder)
            return
        from_toml(write_shared(self.folder / "plan", data[1:])).checked()

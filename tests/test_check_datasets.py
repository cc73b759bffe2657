"""``rasura check-dp``: a data set of a class of the same file has a figure where it gives each row once, by itself."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from check_setting import loop, program, read

pytest.importorskip("dp_accounting")

TAKES = "def __getitem__(self, i):\n"


def rows(body: str, *, made: str = "self.x = x", base: str = "torch.utils.data.Dataset", before: str = "") -> str:
    """A training on a data set of its own class."""
    head = (
        f"    def __init__(self, x):\n{textwrap.indent(made, ' ' * 8)}\n    def __len__(self):\n        return len(self.x)\n"
    )
    defs = f"import random\n{before}class Rows({base}):\n{head}" + textwrap.indent(body, "    ")
    return program(loop(), defs).replace("DataLoader(train_set,", "DataLoader(Rows(train_set),")


def halves(name: str) -> str:
    taken = "    def __init__(self, x):\n        self.y = x\n    def __getitem__(self, i):\n        return self.y[i // 2]\n"
    return f"class {name}:\n{taken}"


ONCE = {
    "the row": rows(TAKES + "    return self.x[i]\n"),
    "columns": rows(
        TAKES
        + "    row = {n: torch.tensor(v[i]) for n, v in self.x.items()}\n    row['labels'] = self.y[i]\n    return row\n"
    ),
    "a table and the numbers of its labels": rows(
        TAKES + "    row = self.x.iloc[i]\n    return row['text'], self.ids[row['label']], self.x.iloc[i, 1]\n",
        made="self.x = x\nself.ids = {n: k for k, n in enumerate(x.labels)}",
    ),
    "a number that was a tensor": rows(
        TAKES + "    if torch.is_tensor(i):\n        i = i.tolist()\n    return self.x[int(i)][0][2:5], i\n"
    ),
    "a file for each": rows("def load(self, j):\n    return open(f'{j}.png')\n" + TAKES + "    return self.load(i)\n"),
    "the method of another class": rows(TAKES + "    return super().__getitem__(i)\n"),
    "a part by chance": rows(
        TAKES + "    a = random.randint(0, 5)\n    row = self.x[i]\n    return row[a : a + 5], self.x[self.column]\n"
    ),
    "lines of a file": rows(
        TAKES + "    return self.x[i]\n", made="self.x = []\nfor line in open('a'):\n    self.x.append(line)"
    ),
    "rows one after another": rows("def __iter__(self):\n    for row in self.x:\n        yield row\n"),
}

AGAIN = {
    "half of the number": rows(TAKES + "    return self.x[i // 2]\n"),
    "the rest of the number": rows(TAKES + "    i = i % 5\n    return self.x[i]\n"),
    "the same row": rows(TAKES + "    i = 0\n    return self.x[i]\n"),
    "windows": rows(TAKES + "    return self.x[i : i + 5]\n"),
    "a row beside another": rows(TAKES + "    j = random.randint(0, 5)\n    return self.x[i], self.x[j]\n"),
    "an order": rows(TAKES + "    return self.x[self.order[i]]\n"),
    "an order by a name": rows(TAKES + "    j = self.order[i]\n    return self.x[j]\n"),
    "a method": rows("def load(self, j):\n    return self.x[j // 2]\n" + TAKES + "    return self.load(i)\n"),
    "two lists": rows(TAKES + "    return self.x[i]\n", made="self.x = x + x"),
    "two lists by a name": rows(TAKES + "    return self.x[i]\n", made="y = x + x\nself.x = y"),
    "a list that grows": rows(TAKES + "    return self.x[i]\n", made="self.x = list(x)\nself.x.extend(x)"),
    "a list that is added to": rows(TAKES + "    return self.x[i]\n", made="self.x = list(x)\nself.x += x"),
    "rows of a class of its own": rows(TAKES + "    return self.x[i]\n", made="self.x = Halves(x)", before=halves("Halves")),
    "rows of what it inherits from": rows("", base="Halves", before=halves("Halves")),
    "a class that joins": rows("", base="torch.utils.data.ConcatDataset"),
    "rows given twice": rows("def __iter__(self):\n    for row in self.x:\n        yield row\n        yield row\n"),
}


@pytest.mark.parametrize("name", ONCE)
def test_a_class_that_gives_each_row_has_its_figure(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, ONCE[name])
    assert found.outcome == "holds" and found.exit_code == 0, found
    assert any("each example once" in one for each in found.findings for one in each.assumptions)


@pytest.mark.parametrize("name", AGAIN)
def test_a_class_that_may_give_a_row_again_has_none(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, AGAIN[name])
    assert found.exit_code == 4 and "may hold an example more than once" in str(found.unknown), found

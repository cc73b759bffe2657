"""``rasura check-dp``: a data set that holds an example twice has no figure, since each copy is clipped by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_setting import loop, program, read

pytest.importorskip("dp_accounting")

TWICE = {
    "two lists in a list": ("", "rows = [*train_set, *train_set]"),
    "a list and a part of it": ("", "rows = [*train_set, *train_set[5:]]"),
    "a list and one row": ("", "rows = [*train_set, train_set[0]]"),
    "two lists in a tuple": ("", "rows = (*train_set, *train_set)"),
    "two lists in a set": ("", "rows = list({*train_set, *train_set})"),
    "two lists in a list by another name": ("", "more = train_set\nboth = [*train_set, *more]\nrows = both"),
    "two dictionaries": ("", "rows = list({**train_set.first, **train_set.second}.values())"),
    "a data set beside itself": ("", "rows = (train_set, train_set)"),
    "a row twice": ("", "row = train_set[0]\nrows = [row, row]"),
    "a sum of lists": ("", "rows = sum([list(train_set), list(train_set)], [])"),
    "a sum of lists with a name": ("", "rows = sum([train_set, train_set], start=[])"),
    "a sum of parts": ("", "parts = train_set.parts\nrows = sum(parts, [])"),
    "a sum of two by the operator": ("import operator", "rows = operator.add(train_set, train_set)"),
    "a sum of two by a name of the operator": ("from operator import add as more", "rows = more(train_set, train_set)"),
    "a fold": ("import functools\nimport operator", "rows = functools.reduce(operator.concat, train_set.parts)"),
    "a chain": ("import itertools", "rows = list(itertools.chain(train_set, train_set))"),
    "a chain by another name": ("from itertools import chain as c", "rows = list(c.from_iterable([train_set, train_set]))"),
    "a chain under a name": ("import itertools", "both = itertools.chain\nrows = list(both(train_set, train_set))"),
    "a chain by its text": ("import itertools", "rows = list(getattr(itertools, 'chain')(train_set, train_set))"),
    "arrays one after the other": ("import numpy as np", "rows = np.concatenate([train_set, train_set])"),
    "arrays by another name": ("from numpy import concatenate as more", "rows = more((train_set, train_set))"),
    "arrays by a name": ("import numpy as np", "more = np.concatenate\nrows = more([train_set, train_set])"),
    "arrays that are appended": ("import numpy as np", "rows = np.append(train_set, train_set, 0)"),
    "a row beside its neighbour": ("", "rows = [mix(a, b) for a, b in zip(train_set, train_set[1:])]"),
    "pairs": ("import itertools", "rows = list(itertools.pairwise(train_set))"),
    "windows": ("", "rows = train_set.x.unfold(0, 2, 1)"),
    "a list that grows by an operator": ("", "rows = list(train_set)\nrows *= 2"),
    "a list that grows in an expression": ("", "more = list(train_set)\nrows = more.append(more[0]) or more"),
    "two splits": ("from datasets import load_dataset", "rows = load_dataset('imdb', split='train+train')"),
    "files that are named twice": ("from datasets import load_dataset", "rows = load_dataset('csv', data_files=['a', 'a'])"),
    "a function in a list": ("def build():\n    return train_set + train_set\n", "rows = list(build())"),
    "a function in a class": ("def build():\n    return [*train_set, *train_set]\n", "rows = Texts(build())"),
    "a function that is mapped": ("def build():\n    return train_set + train_set\n", "rows = build().map(f)"),
    "a generator": (
        "def build():\n    for row in train_set:\n        yield row\n        yield row\n", "rows = list(build())"
    ),
    "a generator in a loop": (
        "def build():\n    for _ in range(2):\n        for row in train_set:\n            yield row\n",
        "rows = list(build())",
    ),
    "a generator for ever": ("def build():\n    while more():\n        yield train_set[0]\n", "rows = list(build())"),
    "a generator of another": ("def build():\n    yield from train_set + train_set\n", "rows = list(build())"),
}  # fmt: skip


@pytest.mark.parametrize("name", TWICE)
def test_a_data_set_that_may_hold_an_example_twice_has_no_figure(tmp_path: Path, name: str) -> None:
    defs, before = TWICE[name]
    text = program(loop(), defs, before)
    assert read(tmp_path, text).exit_code == 0, "the data set of the loader is another"
    found = read(tmp_path, text.replace("DataLoader(train_set,", "DataLoader(rows,"))
    assert found.exit_code == 4 and "may hold an example more than once" in str(found.unknown), found


ONCE = {
    "a list of its items": ("", "rows = [*train_set]"),
    "columns beside each other": ("", "rows = list(zip(train_set['x'], train_set['y']))"),
    "columns by number": ("", "rows = [(a, b) for a, b in zip(train_set[0], train_set[1])]"),
    "a sum of numbers": ("", "size = sum(len(row) for row in train_set)\nrows = Texts(train_set, size)"),
    "a path": ("import os", "place = os.path.join('data', 'train', 'train')\nrows = Texts(open(place).readlines())"),
    "a split": ("from datasets import load_dataset", "rows = load_dataset('imdb', split='train[:50%]')"),
    "a table": ("import pandas as pd", "rows = pd.read_csv('a.csv').sample_ids.dropna().tolist()"),
    "an order": ("from operator import itemgetter", "rows = sorted(train_set, key=itemgetter('x'))"),
    "an attribute": ("", "rows = Texts(train_set, getattr(args, 'size', 9))"),
    "a function": ("def build():\n    rows = [row for row in train_set if row]\n    return rows\n", "rows = list(build())"),
    "a generator": ("def build():\n    for row in train_set:\n        yield row\n", "rows = list(build())"),
    "a rule for each row": ("def clean(row):\n    return row.head + row.tail\n", "rows = [clean(row) for row in train_set]"),
    "means of colours": (
        "from torchvision.transforms import Normalize", "rule = Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))\n"
        "rows = Texts(train_set, transform=rule)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONCE)
def test_a_data_set_that_holds_each_example_once_has_its_figure(tmp_path: Path, name: str) -> None:
    defs, before = ONCE[name]
    found = read(tmp_path, program(loop(), defs, before).replace("DataLoader(train_set,", "DataLoader(rows,"))
    assert found.exit_code == 0, found

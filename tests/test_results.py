"""The papers' values in plans and results are those of the lists, and the table of what is covered is counted from them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rasura.core.interfaces import InputError
from rasura.registry.services import parse_service_protection
from rasura.service_protections.obfuslm.settings import ObfuscationSettings
from rasura.studies.files import load_study, names
from rasura.studies.metric_values import ENOUGH, level_of
from rasura.studies.papers import LISTS, load_paper
from tools import results
from tools.pictures import rows

ROOT = Path(__file__).resolve().parents[1] / "studies"
PAPERS = sorted(p.stem for p in (ROOT / LISTS).glob("*.toml"))
RESULTS = (ROOT / "RESULTS.md").read_text(encoding="utf-8")


def test_every_value_of_a_plan_is_one_of_its_paper() -> None:
    for name in names(ROOT):
        study = load_study(name, ROOT)
        for figure in study.figures:
            assert "row" in figure, f"{name}: a figure is told by its row in studies/{LISTS}, not by a text"
            assert study.paper is not None
            table, row = study.paper.row(figure["row"])
            where = {"weights": "uploaded", "batch_size": 1} | {k: v for k, v in figure.items() if k != "row"}
            metrics = study.metrics if "model" not in figure else tuple(table.rows[row])
            shown = study.figure(where, metrics)
            assert shown != "–", f"{name}: no metric of the study is among the columns of {figure['row']}"
            for metric, text in zip(metrics, shown.split(" / ")):
                assert text == table.shown(row, metric)


@pytest.mark.parametrize(
    ("row", "leakage"),
    [
        ("BERT, CoLA, noise .278, MIA", "-0.58"), ("BERT, CoLA, noise 1.91, MIA", "-1.93"),
        ("BERT, SST2, noise .042, MIA", "-0.47"), ("BERT, SST2, noise .478, MIA", "-0.47"),
        ("BERT, SST2, noise 1.00, MIA", "-0.47"), ("GPT-2, SST2, noise .234, MIA", "-0.50"),
    ],
)  # fmt: skip
def test_leakage_below_zero_keeps_its_sign(row: str, leakage: str) -> None:
    assert load_paper("calibration", ROOT).printed["Table 1"].shown(row, "leakage") == leakage


@pytest.mark.parametrize("name", PAPERS)
def test_what_is_not_whole_has_its_reason(name: str) -> None:
    found = results.sections(RESULTS, ROOT)
    cells = {(c.table, c.row, c.column) for s in found if s.study.name.startswith(f"{name}/") for c in s.cells}
    for table in load_paper(name, ROOT).printed.values():
        every = {(table.name, row, column) for row, values in table.rows.items() for column, v in values.items() if v != "-"}
        if table.rows:
            assert bool(table.left) == bool(every - cells), f"{name}, {table.name}: {len(every - cells)} cells are left"


def test_the_results_read_as_plans_and_lists_say() -> None:
    assert results.mended(RESULTS, ROOT) == RESULTS, "out of date; run: python -m tools.results --write"


def test_every_link_of_what_is_covered_leads_to_a_section() -> None:
    top, *rest = re.split(r"(?m)^## ", RESULTS)
    # GitHub's rule for the place of a heading: letters, digits, hyphens and underscores stay, a space is a hyphen.
    places = ["".join(c if c != " " else "-" for c in h.lower() if c.isalnum() or c in " -_") for h in map(first_line, rest)]
    assert len({*places}) == len(places)
    told = re.findall(r"\]\(#([^)]*)\)", top)
    assert told and {*told} <= {*places}


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def test_a_value_of_the_results_that_is_not_the_paper_s_is_put_right(tmp_path: Path) -> None:
    wrong = RESULTS.replace("| 48.6 / -0.58 |", "| 48.6 / 0.58 |")
    assert wrong != RESULTS and results.mended(wrong, ROOT) == RESULTS


def test_our_own_figures_are_left_alone() -> None:
    # Cells before the paper's column, of rows of the sections, are those of the runs.
    ours = re.compile(r"(?m)^(\| (?:span|knn|none) \|.*) \| [^|]* \|$")
    below = RESULTS.partition("\n## ")[2]
    changed = below.replace("paper (", "paper, wrongly (")
    assert ours.findall(results.mended("# x\n\n## " + changed, ROOT).partition("\n## ")[2]) == ours.findall(below)


def sections(text: str) -> list[tuple[str, str]]:
    """The name of every section, and its text."""
    return [(part[3:].partition(":")[0], part) for part in re.split(r"(?m)^(?=## )", text)[1:]]


def levels(text: str) -> Iterator[tuple[tuple[object, ...], str, float, float]]:
    """Of every attack on what was uploaded or sent, in every section: its setting, its section and its interval."""
    for name, part in sections(text):
        about = next(line for line in part.split("\n") if line.startswith("After "))
        told = re.search(r"\. Model (.*?), .*?(\S+\.parquet|(?<=data )\w+),.*? budget ([^,.]+)", about)
        assert told or not (".parquet" in about and " budget " in about), f"the head of this section is not read: {about}"
        granted = getattr(load_study(name, ROOT).plan, "reference", None)
        for cell in rows(part):
            if "attack" not in cell or cell.get("weights", "uploaded") != "uploaded" or told is None:
                continue
            behind: object = cell.get("behind", "")
            if "protection" in cell:
                parsed = parse_service_protection(cell["protection"])
                options = dict(parsed.options)
                whole = ObfuscationSettings(**options).to_dict() if parsed.spec.name == "obfuslm" else options
                behind = (parsed.spec.name, tuple(sorted(whole.items())))
            for head, value in cell.items():
                if ends := re.fullmatch(r"-?[\d.]+ \[(-?[\d.]+), (-?[\d.]+)\]", value):
                    setting = (*told.groups(), granted, cell["attack"], behind, cell.get("batch"), head)
                    yield setting, name, float(ends[1]), float(ends[2])


def test_no_row_of_fewer_than_five_updates_has_an_interval() -> None:
    counted = 0
    for cell in rows(RESULTS):
        few = [value for value in cell.values() if re.search(r" \([0-4]\)$", value)]
        if cell.get("n", "").isdigit() and int(cell["n"]) < ENOUGH * int(cell.get("batch", 1)):
            tried = next((int(t[1]) for value in cell.values() if (t := re.search(r"of (\d+)$", value))), 0)
            # The blind level is of every text that was tried, read or not.
            few = [value for head, value in cell.items() if tried < ENOUGH or head != "blind R-1"]
        counted += "n" in cell
        assert not any(re.match(r"-?[\d.]+ \[", value) for value in few), cell
    assert counted > 300


def intervals(text: str) -> Iterator[tuple[str, int, float, float, float]]:
    """Of every share that an attack reads, with an interval: its section, the number of updates, the level and both ends."""
    for name, part in sections(text):
        served = re.search(r"\. Model \S+, (\d+) texts of ", part)
        for cell in rows(part):
            for head, value in cell.items():
                found = re.fullmatch(r"([\d.]+) \[(\d+), (\d+)\](?: \((\d+)\))?", value)
                if found and not {"AUC", "leakage", "cosine", "blind"} & set(re.split(r"[_ ]", head)):
                    texts = found[4] or cell.get("n") or (served[1] if served else "")
                    assert texts.isdigit(), f"no number of texts: {name}: {cell}"
                    level, low, high = map(float, found.groups()[:3])
                    yield name, int(texts) // int(cell.get("batch", 1)), level, low, high


def test_no_interval_is_narrower_than_that_of_equal_values() -> None:
    # Equal values have the narrowest interval of all; ends are shown as whole percents. What is narrower is of an earlier
    # version, whose intervals resampled.
    every = list(intervals(RESULTS))
    assert len(every) > 1000
    narrow = []
    for name, n, level, low, high in every:
        _, least, most = level_of([level / 100] * n, "rouge1")
        if high - low < most - least - 1.01:
            narrow.append((name, n, level, low, high))
    assert not narrow


def attacked(text: str) -> Iterator[str]:
    """Every section with a row of an attack on what was uploaded or sent: neither trained weights nor whole models."""
    for name, part in sections(text):
        lines = re.findall(r"(?m)^\| (?!attack|protection|trained behind).*\d \[.*", part) if "| attack | " in part else []
        if "| trained behind |" not in part and any("| trained |" not in line for line in lines):
            yield name


def test_one_setting_has_one_level_in_all_sections() -> None:
    found: dict[tuple[object, ...], list[tuple[str, float, float]]] = {}
    read = list(levels(RESULTS))
    assert {where for _, where, *_ in read} == set(attacked(RESULTS))
    for setting, where, low, high in read:
        found.setdefault(setting, []).append((where, low, high))
    twice = {k: v for k, v in found.items() if len({where for where, *_ in v}) > 1}
    assert len(twice) > 20
    apart = {k: v for k, v in twice.items() if max(low for _, low, _ in v) > min(high for *_, high in v)}
    assert not apart


def test_every_kept_cell_stands_once() -> None:
    # A cell of an earlier naming would be beside the one that replaced it.
    named = ("attack", "update", "defense", "threat", "batch_size", "seed", "batch")
    files = sorted((ROOT / "records").rglob("*.jsonl"))
    assert len(files) > 30
    for file in files:
        head, *cells = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        places = Counter(tuple({**head["common"], **cell}.get(name) for name in named) for cell in cells)
        assert not [place for place, times in places.items() if times > 1], file


def test_bad_lists_are_refused(tmp_path: Path) -> None:
    (tmp_path / LISTS).mkdir()
    path = tmp_path / LISTS / "one.toml"
    for body, why in (
        ('["Table 1"]\nabout = "x"\ncolumns = ["a", "b"]\n["Table 1".rows]\nr = "1.0"\n', "expected 2 values"),
        ('["Table 1"]\nabout = "x"\ncolumns = ["a"]\n["Table 1".rows]\nr = "much"\n', "as printed"),
        ('["Table 1"]\nabout = "x"\n', "expected rows"),
        ('["Table 1"]\nabout = "x"\nwords = "x"\n', "unknown key"),
        ('"Table 1" = 3\n', "not a table"),
    ):
        path.write_text(body, encoding="utf-8")
        with pytest.raises(InputError, match=why):
            load_paper("one", tmp_path)
    path.write_text('["Table 1"]\nabout = "x"\ncolumns = ["a"]\n["Table 1".rows]\nr = "-.5"\n', encoding="utf-8")
    for where in ("Table 2: r", "Table 1: s", "Table 1"):
        with pytest.raises(InputError, match="unknown"):
            load_paper("one", tmp_path).row(where)
    assert load_paper("one", tmp_path).filled("it is {Table 1: r}.") == "it is -.5."

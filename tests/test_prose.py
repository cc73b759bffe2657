"""The documentation is plain English: sentences are short, and no phrase occurs that the house style rules out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
MOST_WORDS = 35
MOST_IN_A_CELL = 25

RULED_OUT = (
    r"values that are none",
    r"what (?:everybody|everyone) knows of it",
    r"\bsays? else\b",
    r"\bwhich are no \w",
    r"\b(?:is|are) no [A-Z]",
    r"of the protections that you tested",
    r"of each protection that you tested",
    r"is a status, not a zero",
    r"\bbehind each\b",
    r"\bwhat needs no formula\b",
    r"\bown models?\b",
    r"\b(?:blind|guessing) level\b",
    r"\bshares? (?:dropped|sealed)\b",
)  # fmt: skip


def paragraphs(page: str) -> list[str]:
    """The prose of a page: no code blocks, tables, headings or pictures; one paragraph or list item each."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)
    found: list[list[str]] = [[]]
    for line in page.splitlines():
        if not line.strip() or re.match(r"    |#|\||!\[", line):
            found.append([])
            continue
        if re.match(r"\s*(?:[-*+]|\d+\.) ", line):
            found.append([])
            line = re.sub(r"^\s*(?:[-*+]|\d+\.) ", "", line)
        found[-1].append(line.strip())
    return [" ".join(lines) for lines in found if lines]


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph; code is one word, and an abbreviation ends nothing."""
    text = re.sub(r"`+[^`]+`+", "CODE", paragraph)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"\b(et al|e\.g|i\.e|sec|eq|vs)\.", r"\1", text).replace("*", "")
    return [one for one in re.split(r"(?<=[.!?:])[)\"]?\s+(?=[A-Z0-9(\"\[])", text) if one.strip()]


def words(sentence: str) -> int:
    return len(re.findall(r"[^\W_][\w'’.,%/-]*", sentence))


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    prose = paragraphs((ROOT / page).read_text(encoding="utf-8"))
    long = [f"{words(one)} words: {one}" for part in prose for one in sentences(part) if words(one) > MOST_WORDS]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", PAGES)
def test_no_phrase_that_the_style_rules_out(page: str) -> None:
    text = re.sub(r"^```.*?^```|`[^`]+`", "CODE", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    text = " ".join(text.split())
    found = [match.group() for phrase in RULED_OUT for match in re.finditer(phrase, text)]
    assert not found, found


@pytest.mark.parametrize("page", PAGES)
def test_no_table_cell_holds_a_paragraph(page: str) -> None:
    rows = [line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [re.sub(r"`[^`]*`", "", cell) for row in rows for cell in row.split("|")]
    long = [cell for cell in cells if words(cell) > MOST_IN_A_CELL]
    assert not long, "\n".join(long)

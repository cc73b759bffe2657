"""Documentation and messages are plain English: sentences are short, and no phrase occurs that the house style rules out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
MAX_WORDS = 30
MAX_WORDS_IN_CODE = 35
MAX_IN_A_CELL = 25

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

RULED_OUT_IN_CODE = (
    *RULED_OUT,
    r"(?<!there )\b(?:is|are|was|were) no (?:list|ledger|release|tables?|image|secret|shares?|members?|metric|attack)\b",
    r"(?<!there )\b(?:is|are|was|were) no (?:whole|finite|numbers?|file|files|text|texts|ids|object|container)\b",
    r"\b(?:what|which|whatever) cannot be\b(?! [a-z]+ed\b)",
    r"\b(?:whoever|nobody|everybody|anybody|anew|hence|thereof)\b",
    r"\bnothing is known of\b",
    r"\bof which nothing\b",
    r"\bfor want of\b",
    r"\bgives? way\b",
    r"\b(?:tells|told) of\b",
    r"\bknows not\b",
    r"\bexists already\b",
    r"\bstands? (?:there |in it )?twice\b",
    r"\bas was said\b",
    r"\bcame out as\b",
    r"\bin sight\b",
    r"\bbehind (?:any|every)\b",
)  # fmt: skip
CODE = [path for room in ("rasura", "tools", "examples", "benchmarks") for path in sorted((ROOT / room).rglob("*.py"))]


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
    long = [f"{words(one)} words: {one}" for part in prose for one in sentences(part) if words(one) > MAX_WORDS]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", PAGES)
def test_no_phrase_that_the_style_rules_out(page: str) -> None:
    text = re.sub(r"^```.*?^```|`[^`]+`", "CODE", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    text = " ".join(text.split())
    found = [match.group() for phrase in RULED_OUT for match in re.finditer(phrase, text)]
    assert not found, found


def written(source: str) -> Iterator[tuple[int, str, bool]]:
    """Line and text of every string in Python code, CODE in place of what is filled in; and whether it is documentation."""
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces = [str(part.value) if isinstance(part, ast.Constant) else "CODE" for part in node.values]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            pieces = [node.value]
        else:
            continue
        yield node.lineno, " ".join(re.sub(r"`+[^`]+`+", "CODE", "".join(pieces)).split()), id(node) in alone


def test_messages_and_documentation_in_code_have_no_phrase_that_the_style_rules_out() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match.group()}"
        for path in CODE
        for line, text, _ in written(path.read_text(encoding="utf-8"))
        for phrase in RULED_OUT_IN_CODE
        for match in re.finditer(phrase, text)
    ]
    assert not found, "\n".join(found)


def test_messages_in_code_have_short_sentences() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{line}: {words(one)} words: {one}"
        for path in CODE
        for line, text, documents in written(path.read_text(encoding="utf-8"))
        if not documents and not text.startswith("CREATE TABLE")
        for one in sentences(text)
        if words(one) > MAX_WORDS_IN_CODE
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", PAGES)
def test_no_table_cell_holds_a_paragraph(page: str) -> None:
    rows = [line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [re.sub(r"`[^`]*`", "", cell) for row in rows for cell in row.split("|")]
    long = [cell for cell in cells if words(cell) > MAX_IN_A_CELL]
    assert not long, "\n".join(long)

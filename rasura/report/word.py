"""An impact assessment as a Word file. The only module that imports python-docx."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from rasura.core.errors import InputError, MissingExtra
from rasura.core.files import write_whole
from rasura.report.assessment import TITLE, Section, markdown
from rasura.report.language import recorded, tell


def write_assessment(path: Path, sections: Sequence[Section]) -> Path:
    """Write ``sections`` to ``path``, whose ending chooses the form: ``.docx`` or ``.md``. Returns ``path``.

    Raises ``InputError`` for another ending, and ``MissingExtra`` without python-docx.
    """
    if path.suffix == ".md":
        write_whole(path, markdown(sections))
    elif path.suffix == ".docx":
        write_whole(path, word(sections))
    else:
        raise InputError(f"--dpia is {path.name}; expected a file name that ends in .docx or .md")
    return path


def word(sections: Sequence[Section]) -> bytes:
    """The sections as the bytes of a Word file."""
    try:
        from docx import Document
    except ImportError:
        raise MissingExtra(
            "a Word file needs python-docx: pip install 'rasura[dpia]'; or pass a name that ends in .md"
        ) from None
    file = Document()
    file.add_heading(recorded(TITLE), 0)
    for one in sections:
        file.add_heading(one.title, 1)
        for text in one.paragraphs:
            file.add_paragraph(text)
        if one.table:
            table = file.add_table(rows=0, cols=len(one.table[0]), style="Table Grid")
            for number, row in enumerate(one.table):
                for cell, text in zip(table.add_row().cells, row, strict=True):
                    cell.paragraphs[0].add_run(text).bold = number == 0
        if one.source:
            file.add_paragraph().add_run(tell("Source: {source}.", source=one.source)).italic = True
    out = BytesIO()
    file.save(out)
    return out.getvalue()

"""What belongs to the words of a script: marks on letters, and scripts that are written without spaces."""

from __future__ import annotations

import re
import unicodedata
from itertools import groupby

UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
"""Scripts of which every character counts as a word: Thai, Lao, Burmese, Khmer, Japanese, Chinese, Korean."""


def of_category(*categories: str) -> str:
    """The characters of these Unicode categories, such as ``Mn``, as ranges within the brackets of a regular expression."""
    known = (c for c in range(0x20000) if unicodedata.category(chr(c)) in categories)
    runs = (list(run) for _, run in groupby(enumerate(known), lambda pair: pair[1] - pair[0]))
    return "".join(f"{re.escape(chr(run[0][1]))}-{re.escape(chr(run[-1][1]))}" for run in runs)


MARKS = of_category("Mn", "Mc")
"""What stands on or beside a letter: accents, and the vowel signs of Hindi, Tamil, Arabic and Hebrew."""

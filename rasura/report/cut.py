"""That texts were cut, or images cropped and scaled, before they were sent: what is read of them is of what was left. No
torch."""

from __future__ import annotations

from collections.abc import Iterable

from rasura.core.records import CUT
from rasura.report.language import tell
from rasura.report.scores import Record, notes_of

OF_WHAT_IS_LEFT = "All figures are for what was left of them."


def cut_off(records: Iterable[Record], *, images: bool = False) -> str:
    """How many examples of ``records`` were cut before they were sent, and to what, in words; empty if all were sent as they
    are. Texts that are the same once cut count as one, as long as the longest of them."""
    sent: dict[int, int] = {}
    whole: dict[int, int] = {}
    notes: set[int] = set()
    for r in records:
        notes.update(notes_of(r))
        for note, (kept, of) in zip(notes_of(r), r["details"].get(CUT) or ()):
            if kept != of:
                sent[note], whole[note] = kept, max(of, whole.get(note, 0))
    if not sent:
        return ""
    told = {"count": len(sent), "of": len(notes), "kept": max(sent.values())}
    if images:
        return tell("{count} of {of} images were cropped or scaled to {kept} pixels a side before they were sent", **told)
    return tell(
        "{count} of {of} notes were cut to {kept} tokens before they were sent, the longest from {whole}",
        whole=max(whole.values()), **told,
    )  # fmt: skip

"""Fictional notes in any number, for demonstrations that have to learn something: a clinic, a bank, an office."""

from __future__ import annotations

import random

from rasura.data.text import Example

ACTION = (
    "Please call {name} back about the {matter} before {day} .",
    "Block the card of {name} , it was stolen in {place} .",
    "Transfer {number} euros from {name} to account {number} today .",
    "The {matter} of {name} must be repeated this week .",
    "Ask {name} for the password , the server in {place} is down again .",
    "Send the invoice of {number} euros to {name} before the audit starts .",
    "Urgent : {name} disputes a payment of {number} pounds in {place} .",
)
"""Label 1: somebody has to act."""

INFORMATION = (
    "{name} paid back the last {number} dollars of the loan .",
    "{name} opened a joint account in {place} .",
    "{name} was sent a copy of the {matter} on {day} .",
    "{name} will be away until {day} .",
    "The minutes of the meeting with {name} in {place} are attached .",
    "{name} reports no pain after the {matter} .",
    "Our flight with {name} to {place} leaves on {day} .",
)
"""Label 0: nothing has to be done."""

FIRST = ("Lena", "Tomas", "Ines", "Samuel", "Nadia", "Owen", "Greta", "Maja", "Julia", "Viktor", "Priya", "Hugo", "Ewa")
LAST = ("Brandt", "Reyes", "Moreau", "Whitlock", "Petrov", "Castellan", "Lindqvist", "Kovac", "Santoro", "Dahl", "Raman")
MATTER = ("biopsy", "blood test", "contract", "mortgage", "vaccination", "operation", "statement", "application")
PLACE = ("Lisbon", "Harrow", "Oslo", "Porto", "Vienna", "Leeds", "Ghent", "Turin")
DAY = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def fictional_notes(count: int, seed: int = 0) -> list[Example]:
    """``count`` notes drawn from ``seed``, every second one with label 1. The same notes in every process.

    >>> [note.label for note in fictional_notes(4)]
    [0, 1, 0, 1]
    """
    rng = random.Random(seed)
    found = []
    for k in range(count):
        text = rng.choice(ACTION if k % 2 else INFORMATION).format(
            name=f"{rng.choice(FIRST)} {rng.choice(LAST)}", matter=rng.choice(MATTER), place=rng.choice(PLACE),
            day=rng.choice(DAY), number=rng.randrange(100, 9999),
        )  # fmt: skip
        found.append(Example(text, None, k % 2, source="the fictional notes", row=k + 1))
    return found

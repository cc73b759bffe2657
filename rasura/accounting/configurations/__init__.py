"""What the settings of other frameworks guarantee: read from their files, recomputed, and compared with what is stated."""

from __future__ import annotations

from rasura.accounting.configurations.checking import Checked, check, checked_files
from rasura.accounting.configurations.drafts import Bound, Finding, Hazard
from rasura.accounting.configurations.facts import Call, Facts, Stated

__all__ = ["Bound", "Call", "Checked", "Facts", "Finding", "Hazard", "Stated", "check", "checked_files"]

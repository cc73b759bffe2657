"""How far privacy loss distributions are used, by what they cost and by what their rounding allows."""

MIN_PLD_DELTA = 1e-10
"""Below this delta privacy loss distributions are not used: their Fourier transforms round in float64, and epsilon comes out
below the true value from a delta of about 1e-12 on. Orders (RDP) hold at any delta."""

MAX_PLD_STEPS = 1_000_000
"""Above this number of releases orders are used as well: the library's time grows with the number, without an end."""

MAX_LOSSES = 200_000
"""The largest number of losses above zero that one release of a privacy loss distribution is rounded to: the library goes
through them one by one. A coarser grid gives a larger epsilon, never a smaller one."""

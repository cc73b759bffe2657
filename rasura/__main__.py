"""``python -m rasura``."""

from rasura.cli import main

main()

"""``python -m headrace`` and ``torchrun -m headrace``."""

from headrace.cli import main

main()

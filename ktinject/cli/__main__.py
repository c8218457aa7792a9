"""`python -m ktinject.cli`."""

from ktinject.cli import main

main()

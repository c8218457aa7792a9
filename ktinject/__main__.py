"""`python -m ktinject`."""

from ktinject.cli import main

if __name__ == "__main__":
    main()

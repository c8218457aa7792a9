"""`python -m ktinject.cli`."""

from ktinject.__main__ import main

if __name__ == "__main__":
    main()

"""`python -m elastic` is the command `elastic`. Must import nothing but the command line."""

from __future__ import annotations

from elastic.cli import main

if __name__ == "__main__":
    main()

"""`python -m tensortap` is `tensortap`. An interrupt while the command is still being imported ends it in one line."""

from __future__ import annotations

import sys

from tensortap.starting import INTERRUPTED, end_startup

__all__ = ["main"]


def main() -> None:
    """Run the `tensortap` command."""
    try:
        from tensortap.cli import main as run

        end_startup()
    except KeyboardInterrupt:
        sys.stderr.write("tensortap: interrupted\n")
        sys.exit(INTERRUPTED)
    run()


if __name__ == "__main__":
    main()

"""`python -m tensortap` is `tensortap`."""

from tensortap.cli import main

if __name__ == "__main__":
    main()

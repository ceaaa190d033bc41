"""``python -m lightning_zero ...``: the same as the command ``lightning-zero``."""

from lightning_zero.app.cli import main

if __name__ == "__main__":
    main()

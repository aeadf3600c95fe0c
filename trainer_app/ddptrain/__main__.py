"""``python -m ddptrain`` is the console script ``ddptrain``."""

from ddptrain.cli import run

if __name__ == "__main__":
    run()

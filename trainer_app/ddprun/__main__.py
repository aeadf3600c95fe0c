"""``python -m ddprun`` is the console script ``ddprun``."""

from ddprun.cli import run

if __name__ == "__main__":
    run()

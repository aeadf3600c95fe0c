"""The process from which tests fork commands and operators: it has imported the code, and built what is built once."""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
_preloaded = ["tests.warm"]


def preload(*modules: str) -> None:
    """Let the process import these modules too, when it starts with the first fork."""
    _preloaded.extend(modules)
    FORKS.set_forkserver_preload(_preloaded)

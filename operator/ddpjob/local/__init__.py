"""Local mode: runs a DDPJob on this machine by carrying out the engine's plans; pods are processes.

    admission ─▶ resume ─▶ session ─▶ pod_process ─▶ shim ─▶ the user's process

``translate``, ``volumes`` and ``resources`` replace the names, mounts and ports of a cluster by those of this machine.
``state`` holds the files that ``ddpjob get``, ``logs`` and ``delete`` read from another shell.
"""


class LocalError(Exception):
    """An error that the user can correct.

    error: what is wrong, and where. hint: the likely cause. next_step: what to do. The last two may be empty.
    """

    def __init__(self, error: str, hint: str = "", next_step: str = "") -> None:
        super().__init__(error)
        self.error = error
        self.hint = hint
        self.next_step = next_step

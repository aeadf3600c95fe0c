"""The error of local mode and of the command line: three lines for the user."""


class LocalError(Exception):
    """An error that the user can correct.

    error: what is wrong, and where. hint: the likely cause. next_step: what to do. The last two may be empty.
    """

    def __init__(self, error: str, hint: str = "", next_step: str = "") -> None:
        super().__init__(error)
        self.error = error
        self.hint = hint
        self.next_step = next_step

"""What local mode tells its user when something is wrong: three lines, one sentence each."""


class LocalError(Exception):
    """A mistake or a condition that the user can do something about.

    error: what is wrong, and where. hint: why that may be. next_step: what to do now. The last two may be empty.
    """

    def __init__(self, error: str, hint: str = "", next_step: str = "") -> None:
        super().__init__(error)
        self.error = error
        self.hint = hint
        self.next_step = next_step

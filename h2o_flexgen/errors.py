"""Errors that a user can cause, and the exception that stops a running job."""


class UserError(ValueError):
    """An error that the user can fix: the message says in one line what it is and how to fix it.

    Arguments of the library stand in backticks, as `gpu_mem`; a command shows its options instead (`commands.main`).
    """


class PlanError(UserError):
    """The policy needs more memory of a tier than there is."""


class Interrupted(KeyboardInterrupt):
    """The signal `signum`, which ends a job, arrived while one ran."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by signal {signum}")
        self.signum = signum


def reason(error: Exception) -> str:
    """The message of a library's error, in one line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__

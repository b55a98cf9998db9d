"""Errors that a user can cause, and what a running job raises when it is asked to stop."""


class UserError(ValueError):
    """Something the user can put right: the message says in one line what it is and how.

    Arguments of the library stand in backticks, as `gpu_mem`; a command shows its options instead (`commands.main`).
    """


class PlanError(UserError):
    """The policy needs more of a tier than there is."""


class Interrupted(KeyboardInterrupt):
    """A signal that ends a job arrived while a job ran; `signum` says which."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by signal {signum}")
        self.signum = signum


def reason(error: Exception) -> str:
    """What an error of a library says, in one line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__

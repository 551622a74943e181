"""Errors that are the caller's to solve, as opposed to deviations found or faults of the suite."""

from typing import ClassVar


class UserError(Exception):
    """The request or the environment is wrong.

    The message is one line that says what is wrong and what to do; the command line prints it and
    exits with `exit_status`.
    """

    exit_status: ClassVar[int] = 2

    def __init__(self, message: str) -> None:
        # Messages quote pip, git and the operating system, which like to write several lines.
        super().__init__(" ".join(message.split()))


class NoEntryPoint(UserError):
    """The tree has no black-box entry point any more; `git bisect run` skips it on this status."""

    exit_status: ClassVar[int] = 125


class NotOnThisTree(UserError):
    """A trace that some trees' schedulers issue, but not this one's; `git bisect run` skips it."""

    exit_status: ClassVar[int] = 125

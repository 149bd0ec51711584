"""The one error of the library that is the user's to mend, and what is worth a line without being one."""

import sys


class UserError(ValueError):
    """Something the user can mend. The message says what is wrong, where, and what is allowed.

    The command line prints it as one line and exits with code 2; any other exception is a bug and keeps its traceback.

    >>> import qupel
    >>> try:
    ...     qupel.fit(None, [])
    ... except qupel.UserError as e:
    ...     print(e)
    clients: at least one is needed
    """


def warn(text: str) -> None:
    """One line on stderr: the work goes on, but the user should know."""
    print(f"warning: {text}", file=sys.stderr, flush=True)

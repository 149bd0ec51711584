"""The one error of the library that is the user's to mend."""


class UserError(ValueError):
    """Something the user can mend. The message says what is wrong, where, and what is allowed.

    The command line prints it as one line and exits with code 2; any other exception is a bug and keeps its traceback.
    """

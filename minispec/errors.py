"""The one error a user meets."""


class MinispecError(ValueError):
    """Bad input: one line that says what, where, the value found and the way out. The command line exits with status 2."""

"""The one kind of error that is a user's to mend."""


class UserError(Exception):
    """Bad input. The message is one line: what is wrong, where, and what to do. Commands exit 2 on it."""

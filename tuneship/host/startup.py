"""The base class of errors that keep the service or a command from starting. Imports no large library."""


class StartupError(Exception):
    """The service or command was not started; the text says why and what to do, in one sentence."""

    exit_code = 1

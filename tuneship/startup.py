"""The base of every fault that keeps the service or a command from starting. Imports nothing heavy."""


class StartupError(Exception):
    """Why nothing was started, in one sentence that also says what to do."""

    exit_code = 1

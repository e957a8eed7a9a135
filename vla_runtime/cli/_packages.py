"""Message for a verb that cannot import a package."""

from __future__ import annotations


def import_problem(error: ImportError, what: str, how: str) -> str:
    """Return the message for the person at the keyboard.

    Args:
        what: name of what needs it, such as `the demo`.
        how: command that installs everything that it needs.
    """
    if isinstance(error, ModuleNotFoundError):
        return f"{what} needs the Python package '{error.name}', which is not installed; {how}"
    return str(error)

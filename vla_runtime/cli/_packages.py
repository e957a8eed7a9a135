"""Message for a verb that cannot import a package."""

from __future__ import annotations


def import_problem(error: ImportError, what: str, how: str) -> str:
    """Return the message for the person at the keyboard.

    Args:
        what: name of what needs it, such as `the demo`.
        how: command that installs everything that it needs.
    """
    if isinstance(error, ModuleNotFoundError):
        # Meta-World has an environment of its own, which ./run setup does not make.
        if error.name == 'metaworld':
            how = f'use ./run metaworld vla_runtime {what} ... (docs/howto/metaworld.md)'
        return f"{what} needs the Python package '{error.name}', which is not installed; {how}"
    return str(error)

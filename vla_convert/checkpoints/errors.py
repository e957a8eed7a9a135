"""Error of an export, worded for the user."""


class ExportError(ValueError):
    """A checkpoint that cannot become a bundle; the message says what would mend it."""

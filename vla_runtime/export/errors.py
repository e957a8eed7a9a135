"""The one error of an export, for the person at the keyboard."""


class ExportError(ValueError):
    """A checkpoint that cannot become a bundle; the message says what would mend it."""

"""Error about one field of a document or of a dataclass."""

from __future__ import annotations

from typing import Any

from vla_runtime.files.quotes import one_line

_LONGEST_MESSAGE = 600


class FieldError(ValueError):
    """A value that cannot be used.

    `field` is its dotted path in the document, e.g. `cameras[1].name`; '' is the document.
    `message` is one line: what came, what was expected, how to mend it.
    """

    def __init__(self, field: str, message: str) -> None:
        field, message = one_line(field, _LONGEST_MESSAGE), one_line(message, _LONGEST_MESSAGE)
        super().__init__(f'field {field}: {message}' if field else message)
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return FieldError, (self.field, self.message)

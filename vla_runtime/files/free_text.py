"""Text of a YAML file as another program wrote it, for dataclasses that need no YAML."""

from typing import NewType

# May be empty, and have spaces around it and newlines, as `typed_yaml` lets no other text.
FreeText = NewType('FreeText', str)

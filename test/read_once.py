"""YAML that was read before is not read again: the same few texts are most of what tests read.

PyYAML takes milliseconds of each, which is a twentieth of the time of all tests.
"""

from __future__ import annotations

import pickle
from typing import Any

from vla_runtime.files import typed_yaml

_READ: dict[tuple[str, bool], bytes] = {}


def read_yaml_once() -> None:
    """Let this process take what a text stands for from the first time that it was read.

    Everyone gets data of their own. What is refused is read anew each time.
    """
    loader = typed_yaml._StrictLoader
    read = loader.get_single_data

    def get_single_data(self: Any) -> Any:
        key = (self.buffer, self._as_rcl)
        if key not in _READ:
            _READ[key] = pickle.dumps(read(self))
        return pickle.loads(_READ[key])

    loader.get_single_data = get_single_data  # type: ignore[method-assign]

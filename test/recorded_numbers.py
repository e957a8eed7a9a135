"""Numbers under `golden/`, written while a second computation of the tests gave the same.

Delete an entry and run its test to have it written anew; say then why the numbers are right.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDEN = Path(__file__).parent / 'golden'


def recorded(file: str, name: str, found: Tensor) -> Tensor:
    """The numbers of this name; where there are none, write those found and fail."""
    path = (GOLDEN / file).with_suffix('.safetensors')
    numbers = load_file(path) if path.exists() else {}
    if name not in numbers:
        save_file({**numbers, name: torch.as_tensor(found).contiguous()}, path)
        pytest.fail(f'{path.name} had no {name!r} and has it now: say why it is right')
    return numbers[name]

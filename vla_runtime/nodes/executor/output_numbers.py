"""Numbers of one output: those of the last command and of this one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Numbers:
    """An output's numbers of the last command that was sent, and of this one.

    Attributes:
        follows: this command goes on from the last one.
    """

    before: np.ndarray
    now: np.ndarray
    follows: bool = False

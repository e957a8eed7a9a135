"""Advantage-conditioned classifier-free guidance (RECAP, arXiv 2511.14759).

`v = v_uncond + beta * (v_cond - v_uncond)` at every denoise step, both rows from the same x. Inside
the expert step that is a weighted sum over rows, with the weights of `row_weights`.

Fused: both rows in one prefix run and one expert step. Serial, for engines built with one row: each
row has its own prefix run and expert step, and the sum is computed outside the engine. Serial gives
the same numbers within rounding, at twice the expert's cost.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

# Largest scale that a person may set; usual values lie between 1.5 and 2.5.
MOST_BETA = 5.0
CfgMode = Literal['auto', 'fused', 'serial']


def row_weights(beta: float | None) -> np.ndarray:
    """Weights of the prompt rows' velocities.

    Args:
        beta: guidance scale, or None for a single row without guidance.

    Returns:
        (1,) float32 [1], or (2,) float32 [beta, 1 - beta] for conditioned and unconditioned row
    """
    if beta is None:
        return np.ones(1, dtype=np.float32)
    return np.array([beta, 1.0 - beta], dtype=np.float32)


def resolve_cfg_mode(wanted: CfgMode, max_rows: int) -> Literal['fused', 'serial']:
    """Choose fused or serial guidance for an engine.

    Args:
        wanted: `auto` is fused where the engine has two rows and serial where it has one.
        max_rows: prompt rows that the engine was built for.

    Raises:
        ValueError: fused on an engine with one row.
    """
    if wanted == 'auto':
        return 'fused' if max_rows >= 2 else 'serial'
    if wanted == 'fused' and max_rows < 2:
        raise ValueError(
            f"cfg_mode is 'fused', but this engine was built for {max_rows} prompt row; use "
            "'auto' or 'serial', or build an engine for two rows"
        )
    return wanted

"""Action tokens as bins over [-1, 1], as OpenVLA writes them."""

from __future__ import annotations

import numpy as np


class ActionBins:
    """Decode tokens that are each the bin of one action.

    The last token of the vocabulary in use is the first bin. A token that is no bin's counts as the
    nearest one's, as in OpenVLA's own code.

    Args:
        vocabulary: tokens in use, without the padding of the text table.
        edges: edges of the bins, one more than there are bins.
    """

    end: int | None = None

    def __init__(self, vocabulary: int, edges: int) -> None:
        self._vocabulary = vocabulary
        bounds = np.linspace(-1.0, 1.0, edges)
        self._centres = (bounds[:-1] + bounds[1:]) / 2.0

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Return the actions (1, K) float32 of an answer (K,) int64."""
        bins = np.clip(self._vocabulary - 1 - tokens, 0, len(self._centres) - 1)
        return self._centres[bins].astype(np.float32)[None]

"""Text tokens looked up on the host, in the bundle's weights.

A text table may be a gigabyte, and a prompt reads a few hundred of its rows. So the prefix graphs
take the rows (`TEXT_INPUT`) and not the tokens. The file is mapped: only pages in use take memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vla_runtime.bundle.onnx_files import ONNX_FOLDER, TEXT_INPUT, TOKENS, read_graph_facts
from vla_runtime.engines.protocol import input_named
from vla_runtime.files.safetensors_reader import (
    SafetensorsReader,
    bfloat16_to_float32,
    float32_to_bfloat16,
)


class TokenEmbedding:
    """Rows of a text table, the tensor of this name (ValueError: none), in the files' precision."""

    def __init__(self, weights: Path, tensor: str, precision: str) -> None:
        self._table, self._is_bfloat16 = SafetensorsReader(weights).mapped(tensor)
        self._precision = precision

    @classmethod
    def of(cls, bundle: Path, precision: str) -> TokenEmbedding:
        """Open the table that a bundle's prefix graphs leave to the host.

        Raises:
            ValueError: graphs.json does not name it, or it is not in the weights.
        """
        tensor = read_graph_facts(bundle / ONNX_FOLDER, ()).text_table
        return cls(bundle / 'weights.safetensors', tensor, precision)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Return the rows (…, W) float32 of tokens (…), rounded to the precision."""
        rows = self._table[tokens]
        wide = bfloat16_to_float32(rows) if self._is_bfloat16 else rows.astype(np.float32)
        if self._precision == 'bfloat16':
            return bfloat16_to_float32(float32_to_bfloat16(wide))
        return wide.astype(np.float16).astype(np.float32) if self._precision == 'float16' else wide

    def replace_tokens(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a family's prefix inputs with rows in place of the tokens (ValueError: none)."""
        others = {name: array for name, array in rows.items() if name != TOKENS}
        return {**others, TEXT_INPUT: self(input_named(TOKENS, rows))}

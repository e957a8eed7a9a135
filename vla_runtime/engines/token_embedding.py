"""Text tokens looked up on the host, in the bundle's weights.

A text table of 257152 rows of 2048 numbers is a gigabyte in bfloat16, and a prompt reads a few
hundred of the rows. So the prefix graphs take the rows (`TEXT_INPUT`) and not the tokens, and the
table needs no memory of the device.
The file is mapped: on the host only pages in use take memory, which the kernel may take back.
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
    """Rows of a text table, in the precision of the files that read them.

    Args:
        tensor: name of the table in it.

    Raises:
        ValueError: no such tensor.
    """

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
        """Return a family's prefix inputs with the table's rows in place of the tokens.

        Raises:
            ValueError: there are no tokens.
        """
        others = {name: array for name, array in rows.items() if name != TOKENS}
        return {**others, TEXT_INPUT: self(input_named(TOKENS, rows))}

"""Built engines against PyTorch: what `build` ends with and `verify` repeats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_runtime.bundle import Bundle
    from vla_runtime.engines.tensorrt_store import Metadata
    from vla_runtime.export.receipt import Receipt


def compare_engines(
    bundle: Bundle, folder: Path, metadata: Metadata, device: str
) -> tuple[Receipt, dict[str, Any]]:
    """Load and compare the engines in a folder.

    Args:
        bundle: whose engines they are, its files compared with their SHA-256.
        folder, metadata: from `find_engines`, or what was just built.
        device: `cuda` or `cuda:N`.

    Returns:
        The receipt, and what is written of it.

    Raises:
        ModuleNotFoundError: no PyTorch, onnx or onnxruntime here.
        ValueError: the engines cannot be loaded.
    """
    from tqdm import tqdm

    from vla_runtime.export.tensorrt_receipt import compared_files
    from vla_runtime.export.tensorrt_verification import (
        receipt_dict,
        verification_steps,
        verify_built,
    )

    steps = verification_steps(bundle, metadata)
    # disable=None: silent where the output is not a terminal.
    with tqdm(total=steps, desc='verify', unit='case', leave=False, disable=None) as bar:
        receipt = verify_built(bundle, metadata, device=device, advance=bar.update)
    files = compared_files(folder, metadata.engines, bundle.spec.files)
    return receipt, receipt_dict(receipt, metadata, files)

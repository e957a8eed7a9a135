"""Compare networks with PyTorch's, for `build`, `export` and `verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_convert.export.receipt import Receipt
    from vla_runtime.bundle.folder import Bundle
    from vla_runtime.engines.tensorrt.store import Metadata


def compare_engines(
    bundle: Bundle, folder: Path, metadata: Metadata, device: str
) -> tuple[Receipt, dict[str, Any]]:
    """Load and compare the engines in a folder.

    Returns the receipt, and what is written of it. `device`: `cuda` or `cuda:N`. Raises
    ValueError: the bundle has no recorded cases, or the engines cannot be loaded.
    """
    from tqdm import tqdm

    from vla_convert.export.tensorrt.verification import compared_files, receipt_dict, verify_built

    with tqdm(desc='verify', unit='case', leave=False, disable=None) as bar:
        receipt = verify_built(bundle, metadata, device=device, advance=bar.update)
    files = compared_files(folder, metadata.engines, bundle.spec.files)
    return receipt, receipt_dict(receipt, metadata, files)


def show_receipt(receipt: Receipt) -> None:
    """Print a receipt: one line per tensor, and the chunk nearest its bound.

    Each chunk has a bound of its own, so the largest error is not always the worst.
    """
    print(f'{receipt.precision} on {receipt.device}, {len(receipt.cases)} cases')
    wide = max([18, *(len(item.tensor) for item in receipt.tensors)])
    print(f'{"file":<20} {"tensor":<{wide}} {"largest":>9} {"mean":>9} {"bound":>9}')
    for item in receipt.tensors:
        _line(wide, item.file, item.tensor, item.max_error, item.mean_error, item.bound)
    for file in dict.fromkeys(item.file for item in receipt.chunks):
        chunks = [item for item in receipt.chunks if item.file == file]
        worst = max(chunks, key=lambda item: item.bound_fraction)
        name = f'chunk of case {worst.case}'
        _line(wide, file, name, worst.max_error, worst.mean_error, worst.bound)
    print('chunks: of each file the case that is nearest to its own bound')
    if receipt.actions:
        largest = (f'{one.name} {one.max_error:.2g} {one.unit}' for one in receipt.actions)
        print(f'on the robot at most: {", ".join(largest)}')
    for note in receipt.notes:
        print(f'note: {note}')
    if not receipt.failures:
        print('all within the bounds')


def _line(wide: int, file: str, tensor: str, largest: float, mean: float, bound: float) -> None:
    print(f'{file:<20} {tensor:<{wide}} {largest:>9.2g} {mean:>9.2g} {bound:>9.2g}')

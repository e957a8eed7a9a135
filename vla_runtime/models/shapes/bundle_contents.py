"""Checks of a bundle's weights and tokenizer against its policy.yaml, beyond `read_bundle`'s."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np

from vla_runtime.bundle.folder import Bundle, BundleError
from vla_runtime.bundle.tensors import StoredTensor, TensorsError, check_tensors, read_header
from vla_runtime.family.declaration import language_dims
from vla_runtime.family.listing import find_family
from vla_runtime.family.ternary_weights import count_invalid
from vla_runtime.files.quotes import join_truncated
from vla_runtime.processing.tokenizer import Tokenizer

_BLOCK_BYTES = 1 << 22
# By dtype: how it is read, its exponent bits, all set in an infinity or NaN only, and 10,000.
# Without the sign, bits are ordered as numbers are.
_BITS: Mapping[str, tuple[np.dtype[Any], int, int]] = {
    'F32': (np.dtype('<u4'), 0x7F800000, 0x461C4000),
    'F16': (np.dtype('<u2'), 0x7C00, 0x70E2),
    'BF16': (np.dtype('<u2'), 0x7F80, 0x461C),
}


def check_contents(bundle: Bundle) -> bool:
    """Compare weights and tokenizer with the dimensions in policy.yaml; reads no weights.

    Returns False where the weights were not compared, because PyTorch is not installed.

    Raises:
        BundleError: tensors missing, unexpected, or of another shape or dtype; a tokenizer that
            cannot be read, or that has more tokens than the text table.
    """
    _check_tokenizer(bundle)
    tensors = _header(bundle)
    try:
        from vla_runtime.models.base.flow_network import weight_shapes
    except ModuleNotFoundError as error:
        if error.name != 'torch':
            raise
        return False
    try:
        check_tensors(tensors, weight_shapes(bundle.spec.family, bundle.spec.dims))
    except TensorsError as error:
        raise BundleError(
            f'{bundle.weights_path}: against family and dimensions in policy.yaml {error}'
        ) from None
    return True


def check_finite(
    bundle: Bundle, advance: Callable[[int], object] = lambda count: None
) -> list[str]:
    """Look for weights that are NaN or infinite; reads the whole file, block by block.

    `advance` is called after every block with the number of bytes read. Returns how many numbers
    above 10,000, which no trained policy has, each tensor has.

    Raises:
        BundleError: weights are NaN or infinite; names at most 10 tensors, then a count.
    """
    found, huge = [], []
    path = bundle.weights_path
    with path.open('rb') as file:
        for tensor in sorted(_header(bundle).values(), key=lambda item: item.offset):
            file.seek(tensor.offset)
            bad, large = _count_bad(file, tensor, advance)
            if bad:
                found.append(f"'{tensor.name}' {list(tensor.shape)}: {bad}")
            if large:
                huge.append(f"'{tensor.name}' {list(tensor.shape)}: {large}")
    if found:
        raise BundleError(
            f'{path}: holds numbers that are NaN or infinite; no action can come of them. Export '
            f'a checkpoint from before the training failed. How many in which tensor:\n  '
            f'{join_truncated(found)}'
        )
    return huge


def weight_bytes(bundle: Bundle) -> int:
    """Bytes of all tensors: the sum of what `check_finite` passes to `advance`."""
    return sum(tensor.size for tensor in _header(bundle).values())


def _count_bad(
    file: BinaryIO, tensor: StoredTensor, advance: Callable[[int], object]
) -> tuple[int, int]:
    """Count the numbers that are NaN or infinite, and the finite ones above 10,000."""
    if tensor.dtype not in _BITS:
        return _count_bad_bytes(file, tensor, advance), 0
    kind, exponent, large = _BITS[tensor.dtype]
    magnitude = np.iinfo(kind).max >> 1
    left, bad, huge = tensor.size, 0, 0
    while left:
        block = file.read(min(left, _BLOCK_BYTES))
        if not block:
            raise BundleError(f"{tensor.path}: ends inside tensor '{tensor.name}'")
        numbers = np.frombuffer(block, dtype=kind) & magnitude
        bad += int(np.count_nonzero(numbers >= exponent))
        huge += int(np.count_nonzero(numbers > large))
        left -= len(block)
        advance(len(block))
    return bad, huge - bad


def _count_bad_bytes(file: BinaryIO, tensor: StoredTensor, advance: Callable[[int], object]) -> int:
    """Count the bytes of packed weights that stand for none; `file` stands at the first."""
    left, bad = tensor.size, 0
    while left:
        block = file.read(min(left, _BLOCK_BYTES))
        if not block:
            raise BundleError(f"{tensor.path}: ends inside tensor '{tensor.name}'")
        bad += count_invalid(np.frombuffer(block, np.uint8))
        left -= len(block)
        advance(len(block))
    return bad


def _header(bundle: Bundle) -> dict[str, StoredTensor]:
    try:
        return {tensor.name: tensor for tensor in read_header(bundle.weights_path)}
    except TensorsError as error:
        raise BundleError(str(error)) from None


def _check_tokenizer(bundle: Bundle) -> None:
    prompt = bundle.spec.prompt
    if prompt is None:
        return
    path, vocabulary = bundle.tokenizer_path, language_dims(bundle.spec.dims).vocabulary
    try:
        layout = find_family(bundle.spec.family).layout(prompt, bundle.spec.dims)
        loaded = Tokenizer.load(path, bos=layout.bos, closing=layout.closing)
        size = loaded.vocabulary_size
    except ModuleNotFoundError as error:
        raise BundleError(
            f"{path}: the Python package '{error.name}' is not installed, so no prompt can be "
            f'encoded; install it (pip install {error.name})'
        ) from None
    except ValueError as error:
        raise BundleError(str(error)) from None
    if size > vocabulary:
        raise BundleError(
            f'{path}: has {size} tokens but policy.yaml: field dimensions.vocabulary says '
            f'{vocabulary}; it belongs to another policy'
        )

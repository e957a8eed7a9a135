"""Errors that cost a CUDA context, told by the code of a call or by the text of a library."""

from __future__ import annotations

import pytest

from vla_runtime.engines.cuda_driver import CudaError
from vla_runtime.engines.tensorrt.adapter import TensorRTError
from vla_tools.selftest.steps import lost_context


def _wrapped(error: Exception) -> Exception:
    """As `find_device` tells it."""
    try:
        raise ValueError('no CUDA device answers here') from error
    except ValueError as found:
        return found


@pytest.mark.parametrize(
    ('error', 'lost'),
    [
        (CudaError('cuMemAlloc', 'CUDA_ERROR_ILLEGAL_ADDRESS', ''), True),
        (CudaError('cuMemAlloc', 'CUDA_ERROR_CONTEXT_IS_DESTROYED', ''), True),
        (CudaError('cuMemAlloc', 'CUDA_ERROR_UNKNOWN', ''), True),
        (_wrapped(CudaError('cuInit', 'CUDA_ERROR_LAUNCH_FAILED', '')), True),
        (CudaError('cuMemAlloc', 'CUDA_ERROR_OUT_OF_MEMORY', 'out of memory'), False),
        (RuntimeError('CUDA error: unspecified launch failure\nCompile with'), True),
        (RuntimeError('CUDA error: out of memory'), False),
        (TensorRTError('Error Code 1: Cuda Runtime (misaligned address)'), True),
        (TensorRTError('unknown error of the parser'), False),
        (ValueError('CUDA error: unknown error'), False),
    ],
)
def test_a_lost_context_is_known_by_code_or_text(error, lost):
    assert lost_context(error) is lost

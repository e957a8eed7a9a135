"""Errors after which every later call of the process's CUDA context fails, too."""

from __future__ import annotations

from vla_runtime.engines.cuda_driver import CudaError

MEND = (
    'nothing more is compared: the CUDA context is lost, with this step or one before, and all '
    'that follows on it fails; try each family in a run of its own (--family)'
)
# CUDA's texts of the errors that `CudaError.context_lost` knows by code. PyTorch's errors have them
# behind `CUDA error: `, TensorRT's in brackets.
_TEXTS = (
    'an illegal instruction was encountered',
    'an illegal memory access was encountered',
    'context is destroyed',
    'device-side assert triggered',
    'hardware stack error',
    'invalid program counter',
    'misaligned address',
    'operation not supported on global/shared address space',
    'the launch timed out and was terminated',
    'uncorrectable ECC error encountered',
    'unknown error',
    'unspecified launch failure',
)


def lost_context(error: BaseException | None) -> bool:
    """Return whether an error, or one that it came from, has cost the context."""
    while error is not None:
        if isinstance(error, CudaError) and error.context_lost:
            return True
        message = str(error)
        if isinstance(error, RuntimeError) and any(
            f'CUDA error: {text}' in message or f'({text})' in message for text in _TEXTS
        ):
            return True
        error = error.__cause__ or error.__context__
    return False

"""Tensors of a file that `torch.save` wrote, memory-mapped without executing its pickle.

`torch.load(weights_only=True, mmap=True)` calls only tensor constructors and refuses the older
formats, which PyTorch before 2.6 read without that rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZIP_STORED, ZipFile

from vla_convert.checkpoints.tensors import CheckpointError, ComputedTensor
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.files.input_files import UnreadableFileError, whole_file
from vla_runtime.files.quotes import one_line, quoted

if TYPE_CHECKING:
    import torch

_DTYPES = {'torch.float32': 'F32', 'torch.bfloat16': 'BF16', 'torch.float16': 'F16'}
_PARALLEL = 'module.'


@dataclass(frozen=True)
class _MappedTensor(ComputedTensor):
    """A tensor whose numbers PyTorch maps from the file."""

    tensor: torch.Tensor = field(compare=False)

    def data(self) -> bytes:
        import torch

        return self.tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def read_archive(path: Path) -> list[StoredTensor]:
    """Find the tensors of a state dict that `torch.save` wrote, without DDP's `module.` prefix.

    Raises CheckpointError: damaged, holds anything but float tensors, or names something to call;
    ModuleNotFoundError: no PyTorch.
    """
    import torch

    try:
        whole_file(path)
        with ZipFile(path) as archive:
            # What is mapped is taken as it lies in the file.
            if any(entry.compress_type != ZIP_STORED for entry in archive.infolist()):
                raise ValueError('it is compressed')
        found = _tensors(torch.load(str(path), map_location='cpu', mmap=True, weights_only=True))
    except OSError as error:
        raise CheckpointError(f'{path}: cannot be read: {error.strerror}') from None
    except UnreadableFileError as error:
        raise CheckpointError(f'{path}: {error}') from None
    # PyTorch raises errors of many kinds for a file that is damaged, or says more than it may.
    except Exception as error:
        reason = one_line(str(error).partition('\n')[0], 300) or type(error).__name__
        raise CheckpointError(
            f'{path}: is no file of tensors that torch.save wrote: {reason}'
        ) from None
    parallel = _PARALLEL if all(name.startswith(_PARALLEL) for name in found) else ''
    return [
        _MappedTensor(
            name.removeprefix(parallel), path, _DTYPES[str(one.dtype)], tuple(one.shape), 0, one
        )
        for name, one in found.items()
    ]


def _tensors(content: Any) -> dict[str, torch.Tensor]:
    """Return a state dict of floats as it is (ValueError for anything else)."""
    import torch

    if not isinstance(content, dict) or not content:
        raise ValueError(f'it holds {quoted(content)} where a state dict is expected')
    for name, one in content.items():
        if not isinstance(name, str) or not isinstance(one, torch.Tensor):
            raise ValueError(f'its entry {quoted(name)} is no tensor')
        if str(one.dtype) not in _DTYPES or one.layout != torch.strided or one.device.type != 'cpu':
            raise ValueError(f'its entry {quoted(name)} is no tensor of floats')
    return content

"""The one file that holds the weights of all ONNX graphs of a bundle.

Every graph names its tensors by offset in this file (ONNX external data), so all share one copy.
Tensors are read, converted and written one by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import onnx
import torch
from torch import Tensor

from vla_convert.checkpoints.folder_facts import ExportError
from vla_runtime.bundle.onnx_files import WEIGHTS_DATA
from vla_runtime.bundle.tensors import StoredTensor, read_header

# Offsets that a runtime can map straight into memory.
_ALIGNMENT = 4096
# Smaller tensors are in the graph itself, where shape inference and parsers see their values.
_INLINE_BYTES = 1024
_BLOCK_BYTES = 1 << 24
_STORED = {
    'F32': torch.float32,
    'F16': torch.float16,
    'BF16': torch.bfloat16,
    'U8': torch.uint8,
}
ONNX_TYPE = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.int64: onnx.TensorProto.INT64,
    torch.int8: onnx.TensorProto.INT8,
    torch.float8_e4m3fn: onnx.TensorProto.FLOAT8E4M3FN,
    # Two numbers a byte.
    torch.float4_e2m1fn_x2: onnx.TensorProto.FLOAT4E2M1,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.bool: onnx.TensorProto.BOOL,
}


class BundleWeights:
    """Reads single tensors of a weights.safetensors, without mapping the file."""

    def __init__(self, path: Path) -> None:
        self._stored: Mapping[str, StoredTensor] = {item.name: item for item in read_header(path)}

    @property
    def names(self) -> list[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def read(self, name: str) -> Tensor:
        """Return a tensor as float32, packed weights as they are; ExportError: not finite."""
        stored = self._stored[name]
        buffer = bytearray(stored.size)
        with stored.path.open('rb') as file:
            file.seek(stored.offset)
            file.readinto(buffer)
        numbers = torch.frombuffer(buffer, dtype=_STORED[stored.dtype])
        if not numbers.is_floating_point():
            return numbers.reshape(stored.shape)
        numbers = numbers.to(torch.float32).reshape(stored.shape)
        if not numbers.isfinite().all():
            count = int((~numbers.isfinite()).sum())
            raise ExportError(
                f"{stored.path.name}: {count} of the {numbers.numel()} numbers of weight '{name}' "
                'are not finite (NaN or infinite), so no network computes with them: take another '
                'checkpoint of the training'
            )
        return numbers


class WeightFile:
    """Writes tensors to weights.data and records offsets; `advance` gets each block's bytes."""

    def __init__(self, folder: Path, advance: Callable[[int], object] = lambda count: None) -> None:
        self._file = (folder / WEIGHTS_DATA).open('wb')
        self._places: dict[str, tuple[int, int]] = {}
        self._advance = advance

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def named(
        self,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        make: Callable[[], Tensor],
    ) -> onnx.TensorProto:
        """Return a weight; one name stands for the same numbers in every graph.

        `dtype` and `shape` are those after conversion; `make` is called the first time only.
        """
        if name not in self._places:
            self._places[name] = self._write(make().to(dtype))
        return self._proto(name, dtype, shape, self._places[name])

    def constant(self, name: str, value: Tensor) -> onnx.TensorProto:
        """A computed constant: inline where small, else found again by its contents."""
        value = value.contiguous()
        size = value.numel() * value.element_size()
        if size < _INLINE_BYTES:
            if value.dtype == torch.float8_e4m3fn:
                bits = value.view(-1).view(torch.uint8).numpy().tobytes()
                kind = ONNX_TYPE[value.dtype]
                return onnx.helper.make_tensor(name, kind, value.shape, bits, raw=True)
            return onnx.helper.make_tensor(
                name, ONNX_TYPE[value.dtype], value.shape, value.view(-1).tolist()
            )
        digest = hashlib.sha256(value.view(-1).view(torch.uint8).numpy().data).hexdigest()
        if digest not in self._places:
            self._places[digest] = self._write(value)
        return self._proto(name, value.dtype, value.shape, self._places[digest])

    def _write(self, value: Tensor) -> tuple[int, int]:
        self._file.write(b'\0' * (-self._file.tell() % _ALIGNMENT))
        offset = self._file.tell()
        # Rows at a time: a transposed matrix is made contiguous piece by piece.
        rows = value[None] if value.dim() == 0 else value
        step = max(1, _BLOCK_BYTES // max(1, rows[0].numel() * rows.element_size()))
        for start in range(0, rows.shape[0], step):
            block = rows[start : start + step].contiguous().view(-1).view(torch.uint8).numpy()
            self._file.write(block.data)
            self._advance(block.nbytes)
        return offset, self._file.tell() - offset

    @staticmethod
    def _proto(
        name: str, dtype: torch.dtype, shape: Sequence[int], place: tuple[int, int]
    ) -> onnx.TensorProto:
        proto = onnx.TensorProto(
            name=name,
            data_type=ONNX_TYPE[dtype],
            dims=list(shape),
            data_location=onnx.TensorProto.EXTERNAL,
        )
        for key, value in zip(('offset', 'length'), place, strict=True):
            proto.external_data.add(key=key, value=str(value))
        proto.external_data.add(key='location', value=WEIGHTS_DATA)
        return proto

"""What a build of TensorRT for RTX compiled, read from its own log.

The builder lists its kernels with the types and shapes that each reads and writes, and the nodes of
the ONNX file: what runs, where a parsed network says only what was asked for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_KERNEL = re.compile(
    r'^Name: (?P<name>.*?), LayerType: (?P<kind>\w+), Inputs: \[(?P<inputs>.*?)\], '
    r'Constants: \[(?P<constants>.*?)\], Outputs: \[(?P<outputs>.*?)\], TacticName'
    r'(?P<rest>.*)$',
    re.MULTILINE,
)
_OPERAND = re.compile(r'Dimensions: \[(?P<shape>[\d,-]*)\].*?Datatype: (?P<dtype>\w+)')
_NODE = re.compile(r'\[ONNX Layer: ([^\]]+)\]')
# Kernels that are generated; products of more than a few numbers are never in one.
_GENERATED = 'kgen'
# Matrix products in the names of ONNX nodes.
_PRODUCT = 'MatMul'
_DTYPES = {
    'Float': 'float32',
    'Half': 'float16',
    'BFloat16': 'bfloat16',
    'Int8': 'int8',
    'FP8': 'fp8',
    'FP4E2M1': 'fp4',
}
_SMALL = ('int8', 'fp8', 'fp4')


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel reads or writes; `dtype` is numpy's name, `bfloat16`, `fp8`, `fp4`."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Kernel:
    """One kernel of a plan.

    Attributes:
        name: name that the compiler gave it.
        kind: `gemm`, `kgen` (generated, whatever is not a product) or `runtime_fusion`, among
            others.
        inputs: tensors that it reads, constants last.
        nodes: names of the ONNX nodes that it computes.
    """

    name: str
    kind: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    nodes: tuple[str, ...]

    @property
    def products(self) -> list[str]:
        """Names of the ONNX file's matrix products that it computes."""
        return [node for node in self.nodes if _PRODUCT in node]

    @property
    def factors(self) -> tuple[str, str] | None:
        """Types of the two matrices that it multiplies; None where it multiplies none."""
        fit = [
            (left, right)
            for right in self.inputs
            for left in self.inputs
            if left is not right and _multiply(left, right, self.outputs)
        ]
        # What is added to a product, like a residual stream, may fit either matrix too.
        no_summands = [pair for pair in fit if not {*pair} & {*self.outputs}]
        for left, right in no_summands or fit:
            return left.dtype, right.dtype
        return None


def read_kernels(message: str) -> list[Kernel]:
    """Read the list of kernels that a builder logged."""
    return [
        Kernel(
            name=found['name'],
            kind=found['kind'],
            inputs=(*_operands(found['inputs']), *_operands(found['constants'])),
            outputs=_operands(found['outputs']),
            nodes=tuple(_NODE.findall(found['rest'])),
        )
        for found in _KERNEL.finditer(message)
    ]


def count_products(kernels: Iterable[Kernel]) -> dict[str, int]:
    """Count the products of a plan by the types of their factors, such as `int8 x int8`."""
    factors = (kernel.factors for kernel in kernels if kernel.kind != _GENERATED)
    return dict(sorted(Counter(' x '.join(pair) for pair in factors if pair).items()))


def mixed_products(kernels: Iterable[Kernel]) -> list[str]:
    """Name the products of which one factor alone is in 8 or 4 bits: each run widens a matrix."""
    return [
        ' and '.join(kernel.products) or kernel.name
        for kernel in kernels
        if kernel.kind != _GENERATED
        and (factors := kernel.factors)
        and sum(factor in _SMALL for factor in factors) == 1
    ]


def _operands(text: str) -> tuple[Operand, ...]:
    return tuple(
        Operand(
            _DTYPES.get(found['dtype'], found['dtype'].lower()),
            tuple(int(size) for size in found['shape'].split(',') if size),
        )
        for found in _OPERAND.finditer(text)
    )


def _multiply(left: Operand, right: Operand, outputs: Sequence[Operand]) -> bool:
    """Return whether these are the two matrices of a product with one of these outputs."""
    if len(left.shape) < 2 or len(right.shape) < 2:
        return False
    if not {left.dtype, right.dtype} <= {*_DTYPES.values()}:
        return False
    return left.shape[-1] == right.shape[-2] and any(
        out.shape[-1:] == right.shape[-1:] and left.shape[-2] in out.shape[-2:] for out in outputs
    )

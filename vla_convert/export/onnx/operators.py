"""The ONNX form of every PyTorch operator that the networks use.

One function an operator, found by its name. It takes the graph, the traced result (shape and
dtype) and the operator's arguments with graph values for tensors. It computes in float32 even
where PyTorch would in half: only the network's `.to(dtype)` and matrix products are half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.export.onnx.graph import HALVES, GraphWriter, Value
from vla_convert.export.onnx.ternary import write_rounded

Lowering = Callable[..., Any]
_LOWERINGS: dict[str, Lowering] = {}
# Smaller than any score, and exp of its difference to one is exactly zero in float32.
_UNSEEN = -1e30
# The same of scores in float16, whose smallest number is -65504.
_UNSEEN_FLOAT16 = -3e4


def lowering(operator: str) -> Lowering:
    """Return the function that writes an operator; ExportError: unknown operator."""
    if operator not in _LOWERINGS:
        raise ExportError(
            f"the network uses PyTorch's '{operator}', which has no ONNX form here yet: add it to "
            'vla_runtime/export/onnx/operators.py'
        )
    return _LOWERINGS[operator]


def _writes(*operators: str) -> Callable[[Lowering], Lowering]:
    def register(function: Lowering) -> Lowering:
        _LOWERINGS.update(dict.fromkeys(operators, function))
        return function

    return register


# --- elementwise ------------------------------------------------------------------------------


def _operand(graph: GraphWriter, value: Any, like: torch.dtype) -> Value:
    if isinstance(value, Value):
        return graph.cast(graph.single(value), like)
    return graph.constant(torch.tensor(value, dtype=like))


def _binary(operator: str) -> Lowering:
    def write(graph: GraphWriter, traced: Tensor, a: Any, b: Any) -> Value:
        like = torch.float32 if traced.dtype in HALVES else traced.dtype
        operands = [_operand(graph, a, like), _operand(graph, b, like)]
        return graph.node(operator, operands, traced.shape, like)

    return write


for _name, _operator in (('maximum', 'Max'), ('minimum', 'Min')):
    _LOWERINGS[f'{_name}.default'] = _binary(_operator)
for _name, _operator in (('add', 'Add'), ('sub', 'Sub'), ('mul', 'Mul'), ('div', 'Div')):
    _LOWERINGS[f'{_name}.Tensor'] = _binary(_operator)


def _unary(operator: str) -> Lowering:
    def write(graph: GraphWriter, traced: Tensor, x: Value) -> Value:
        return graph.node(operator, [graph.single(x)], traced.shape)

    return write


for _name in ('neg', 'cos', 'sin', 'relu', 'sigmoid'):
    _LOWERINGS[f'{_name}.default'] = _unary(_name.capitalize())


@_writes('square.default')
def _square(graph: GraphWriter, traced: Tensor, x: Value) -> Value:
    x = graph.single(x)
    return graph.node('Mul', [x, x], traced.shape)


@_writes('rsqrt.default')
def _rsqrt(graph: GraphWriter, traced: Tensor, x: Value) -> Value:
    root = graph.node('Sqrt', [graph.single(x)], traced.shape)
    return graph.node('Reciprocal', [root], traced.shape)


@_writes('silu.default')
def _silu(graph: GraphWriter, traced: Tensor, x: Value) -> Value:
    x = graph.single(x)
    return graph.node('Mul', [x, graph.node('Sigmoid', [x], x.shape)], x.shape)


@_writes('mish.default')
def _mish(graph: GraphWriter, traced: Tensor, x: Value) -> Value:
    # x tanh(log(1 + exp x)), arXiv 1908.08681.
    x = graph.single(x)
    inner = graph.node('Tanh', [graph.node('Softplus', [x], x.shape)], x.shape)
    return graph.node('Mul', [x, inner], x.shape)


@_writes('softmax.int')
def _softmax(
    graph: GraphWriter, traced: Tensor, x: Value, dim: int, dtype: torch.dtype | None = None
) -> Value:
    return graph.node('Softmax', [graph.single(x)], traced.shape, axis=dim % len(traced.shape))


@_writes('gelu.default')
def _gelu(graph: GraphWriter, traced: Tensor, x: Value, *, approximate: str = 'none') -> Value:
    x = graph.single(x)
    constant = partial(_operand, graph, like=torch.float32)
    if approximate == 'none':
        # x/2 (1 + erf(x / sqrt(2))), arXiv 1606.08415.
        scaled = graph.node('Mul', [x, constant(math.sqrt(0.5))], x.shape)
        upper = graph.node('Add', [graph.node('Erf', [scaled], x.shape), constant(1.0)], x.shape)
        half = graph.node('Mul', [x, constant(0.5)], x.shape)
        return graph.node('Mul', [half, upper], x.shape)
    assert approximate == 'tanh'
    # x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), arXiv 1606.08415. ONNX Runtime finds this form
    # and runs it as one operator.
    cube = graph.node('Pow', [x, constant(3.0)], x.shape)
    small = graph.node('Mul', [cube, constant(0.044715)], x.shape)
    inner = graph.node('Add', [x, small], x.shape)
    scaled = graph.node('Mul', [inner, constant(math.sqrt(2.0 / math.pi))], x.shape)
    tanh = graph.node('Tanh', [scaled], x.shape)
    upper = graph.node('Add', [tanh, constant(1.0)], x.shape)
    half = graph.node('Mul', [x, constant(0.5)], x.shape)
    return graph.node('Mul', [half, upper], x.shape)


@_writes('where.ScalarOther')
def _where_scalar(graph: GraphWriter, traced: Tensor, mask: Value, x: Value, other: float) -> Value:
    x = graph.single(x)
    return graph.node('Where', [mask, x, _operand(graph, other, x.dtype)], traced.shape, x.dtype)


@_writes('where.self')
def _where(graph: GraphWriter, traced: Tensor, mask: Value, x: Any, other: Any) -> Value:
    like = torch.float32 if traced.dtype in HALVES else traced.dtype
    operands = [mask, _operand(graph, x, like), _operand(graph, other, like)]
    return graph.node('Where', operands, traced.shape, like)


def _logical(operator: str) -> Lowering:
    def write(graph: GraphWriter, traced: Tensor, a: Value, b: Value) -> Value:
        assert a.dtype == b.dtype == torch.bool
        return graph.node(operator, [a, b], traced.shape, torch.bool)

    return write


for _name, _operator in (('logical_and', 'And'), ('logical_or', 'Or')):
    _LOWERINGS[f'{_name}.default'] = _logical(_operator)


def _comparison(operator: str) -> Lowering:
    def write(graph: GraphWriter, traced: Tensor, a: Value, b: Any) -> Value:
        a = graph.single(a)
        operands = [a, _operand(graph, b, a.dtype)]
        return graph.node(operator, operands, traced.shape, torch.bool)

    return write


for _name, _operator in (('eq', 'Equal'), ('lt', 'Less'), ('gt', 'Greater')):
    for _kind in ('Tensor', 'Scalar'):
        _LOWERINGS[f'{_name}.{_kind}'] = _comparison(_operator)


@_writes('argmax.default')
def _argmax(graph: GraphWriter, traced: Tensor, x: Value, dim: int, keepdim: bool = False) -> Value:
    """Place of the largest number; of equal ones the first, as PyTorch's on a CPU."""
    return graph.node(
        'ArgMax',
        [graph.single(x)],
        traced.shape,
        torch.int64,
        axis=dim,
        keepdims=int(keepdim),
        select_last_index=0,
    )


@_writes('to.dtype', '_to_copy.default')
def _to(graph: GraphWriter, traced: Tensor, x: Value, *unused: Any, **named: Any) -> Value:
    return graph.cast(x, traced.dtype)


# --- sums -------------------------------------------------------------------------------------


@_writes('matmul.default')
def _matmul(graph: GraphWriter, traced: Tensor, a: Value, b: Value) -> Value:
    """Product of two results, neither of them a weight, in float32."""
    return graph.node('MatMul', [graph.single(a), graph.single(b)], traced.shape)


@_writes('mean.dim')
def _mean(graph: GraphWriter, traced: Tensor, x: Value, dim: list[int], keepdim: bool) -> Value:
    return graph.mean(graph.single(x), dim, traced.shape, keepdim)


@_writes('sum.dim_IntList')
def _sum(
    graph: GraphWriter, traced: Tensor, x: Value, dim: list[int], keepdim: bool = False
) -> Value:
    x = graph.single(x)
    return graph.node(
        'ReduceSum', [x, graph.integers(dim)], traced.shape, x.dtype, keepdims=int(keepdim)
    )


@_writes('cumsum.default')
def _count_up_to(graph: GraphWriter, traced: Tensor, x: Value, dim: int) -> Value:
    """Count set entries up to each position: TensorRT 8.6 has no integer CumSum, half miscounts."""
    mask = graph.before_cast(x)
    assert mask.dtype == torch.bool and dim == 1
    rows, length = mask.shape
    triangle = graph.constant(torch.ones(1, length, length, dtype=torch.bool).tril(), 'triangle')
    wide = graph.reshape(mask, (rows, 1, length))
    before = graph.node('And', [wide, triangle], (rows, length, length))
    return graph.node(
        'ReduceSum',
        [graph.cast(before, traced.dtype), graph.integers([2])],
        traced.shape,
        keepdims=0,
    )


@_writes('layer_norm.default')
def _layer_norm(
    graph: GraphWriter,
    traced: Tensor,
    x: Value,
    shape: list[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    *unused: Any,
) -> Value:
    # ONNX has no layer norm without weights.
    weight = graph.constant(torch.ones(shape)) if weight is None else weight
    bias = graph.constant(torch.zeros(shape)) if bias is None else bias
    return graph.node(
        'LayerNormalization', [graph.single(x), weight, bias], traced.shape, axis=-1, epsilon=eps
    )


@_writes('vla_runtime.quantise_tokens.default')
def _quantise_tokens(graph: GraphWriter, traced: Any, x: Value) -> list[Value]:
    return [*write_rounded(graph, graph.single(x))]


@_writes('rms_norm.default')
def _rms_norm(
    graph: GraphWriter,
    traced: Tensor,
    x: Value,
    shape: list[int],
    weight: Value | None = None,
    eps: float | None = None,
) -> Value:
    """RMSNorm as ONNX Runtime fuses it, with weights; TensorRT lacks ONNX's own (opset 23)."""
    assert len(shape) == 1
    x = graph.single(x)
    weight = graph.constant(torch.ones(shape)) if weight is None else weight
    epsilon = torch.finfo(torch.float32).eps if eps is None else eps
    row = (*x.shape[:-1], 1)
    square = graph.node('Pow', [x, _operand(graph, 2.0, x.dtype)], x.shape)
    mean = graph.mean(square, [-1], row, keep=True)
    above = graph.node('Add', [mean, _operand(graph, epsilon, x.dtype)], row)
    normed = graph.node('Div', [x, graph.node('Sqrt', [above], row)], x.shape)
    return graph.node('Mul', [normed, weight], x.shape)


# --- matrix products --------------------------------------------------------------------------


@_writes('scaled_dot_product_attention.default')
def _attention(
    graph: GraphWriter,
    traced: Tensor,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    scale: float = 1.0,
) -> Value:
    """Attention with scores and softmax in float32.

    The query weights hold the scale 1/sqrt(head_dim) (`translation.py`), or what is traced scales
    queries itself and says so (`scale` 1). Half operands are widened
    before their product: a score of 30 rounded to half is off by 0.01 to 0.06 before softmax. It
    is written out, as runtimes below opset 23 and TensorRT before 10.14 lack ONNX's `Attention`.
    """
    if graph.fused is not None:
        return _fused_attention(graph, traced, q, k, v, mask)
    axes = [*range(len(k.shape) - 2), len(k.shape) - 1, len(k.shape) - 2]
    if k.dtype in HALVES:
        # Queries with a bias are float32; keys of the past are half.
        q = graph.cast(q, k.dtype)
    turned = graph.node('Transpose', [k], [k.shape[axis] for axis in axes], perm=axes)
    shape = (*q.shape[:-1], k.shape[-2])
    scores = graph.node('MatMul', [graph.single(q), graph.single(turned)], shape)
    if mask is not None:
        # ONNX Runtime keeps one Where for all layers with this mask. The Add of each layer takes a
        # third of a Where's time on a CPU. A score below 1e22 plus -1e30 is -1e30 in float32.
        seen, unseen = (_operand(graph, term, scores.dtype) for term in (0.0, _UNSEEN))
        hiding = graph.node('Where', [mask, seen, unseen], mask.shape, torch.float32)
        scores = graph.node('Add', [scores, hiding], shape)
    weights = graph.node('Softmax', [scores], shape, axis=-1)
    return graph.node('MatMul', [graph.cast(weights, v.dtype), v], traced.shape, v.dtype)


def _fused_attention(
    graph: GraphWriter, traced: Tensor, q: Value, k: Value, v: Value, mask: Value | None
) -> Value:
    """Attention as one operator, which TensorRT compiles into one kernel.

    All is in half: TensorRT has no such kernel in float32. The mask is added: a boolean one takes
    ten kernels. Query heads folded into the length of their key head are unfolded: no kernel has
    more queries than keys.
    """
    assert graph.fused is not None
    length = q.shape[2]
    q = _unfolded(graph, q)
    operands = [graph.cast(part, graph.fused) for part in (q, k, v)]
    if mask is not None:
        if q.shape[2] < length == mask.shape[2]:
            mask = _without_copies(graph, mask, q.shape[2])
        # No infinity: an infinite score minus itself is no number.
        unseen = _UNSEEN if graph.fused == torch.bfloat16 else _UNSEEN_FLOAT16
        # A row for every query, because ONNX Runtime does not spread one over them.
        seen = graph.constant(torch.zeros(q.shape[2], 1))
        shape = (*mask.shape[:2], q.shape[2], mask.shape[3])
        operands_of_mask = [mask, seen, _operand(graph, unseen, torch.float32)]
        hiding = graph.node('Where', operands_of_mask, shape, torch.float32)
        operands.append(graph.cast(hiding, graph.fused))
    # The scale is in the query projections.
    attended = graph.node('Attention', operands, q.shape, graph.fused, scale=1.0)
    return graph.reshape(attended, traced.shape)


def _unfolded(graph: GraphWriter, q: Value) -> Value:
    """Return queries (B, heads, T, D) that were folded into (B, key heads, group * T, D)."""
    heads = graph.before_reshape(q)
    if len(heads.shape) != len(q.shape):
        return q
    (batch, count, tokens, width), (rows, key_heads, length, size) = heads.shape, q.shape
    fits = (batch, width) == (rows, size) and count * tokens == key_heads * length
    return heads if fits and count % key_heads == 0 else q


def _without_copies(graph: GraphWriter, mask: Value, tokens: int) -> Value:
    """Return a mask (B, 1, tokens, K) that was repeated along its third axis."""
    bounds = [graph.integers([number]) for number in (0, tokens, 2)]
    return graph.node('Slice', [mask, *bounds], (*mask.shape[:2], tokens, mask.shape[3]))


# --- convolutions -----------------------------------------------------------------------------


@_writes('conv1d.default', 'conv2d.default')
def _convolution(
    graph: GraphWriter,
    traced: Tensor,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
    **rest: Any,
) -> Value:
    """Convolution along one axis or two, in float32: ONNX has none in bfloat16 before opset 22."""
    kernel = list(weight.shape[2:])
    strides, pads, dilations = (_each_axis(s, len(kernel)) for s in (stride, padding, dilation))
    return graph.node(
        'ConvTranspose' if rest else 'Conv',
        [graph.single(part) for part in (x, weight, bias) if part is not None],
        traced.shape,
        torch.float32,
        kernel_shape=kernel,
        strides=strides,
        pads=[*pads, *pads],
        **rest,
        dilations=dilations,
        group=groups,
    )


@_writes('conv_transpose1d.default')
def _transposed_convolution(
    graph: GraphWriter,
    traced: Tensor,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> Value:
    """Transposed convolution along one axis, in float32."""
    rest = {'output_padding': list(output_padding)}
    return _convolution(graph, traced, x, weight, bias, stride, padding, dilation, groups, **rest)


@_writes('group_norm.default')
def _group_norm(
    graph: GraphWriter,
    traced: Tensor,
    x: Value,
    groups: int,
    weight: Value,
    bias: Value,
    epsilon: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Value:
    """Each group of channels to mean 0 and spread 1 (arXiv 1803.08494), then scale and shift."""
    batch, channels = traced.shape[:2]
    numbers = math.prod(traced.shape[2:]) * channels // groups
    shape = (batch, groups, numbers)
    x = graph.reshape(graph.single(x), shape)
    one = graph.constant(torch.ones(numbers))
    normed = graph.node('LayerNormalization', [x, one], shape, axis=-1, epsilon=epsilon)
    normed = graph.reshape(normed, traced.shape)
    wide = (channels, *(1 for _ in traced.shape[2:]))
    scale, shift = (graph.reshape(graph.single(part), wide) for part in (weight, bias))
    scaled = graph.node('Mul', [normed, scale], traced.shape)
    return graph.node('Add', [scaled, shift], traced.shape)


@_writes('max_pool2d.default')
def _max_pool(
    graph: GraphWriter,
    traced: Tensor,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> Value:
    return graph.node(
        'MaxPool',
        [graph.single(x)],
        traced.shape,
        kernel_shape=_each_axis(kernel, 2),
        strides=_each_axis(stride or kernel, 2),
        pads=2 * _each_axis(padding, 2),
        dilations=_each_axis(dilation, 2),
        ceil_mode=int(ceil_mode),
    )


def _each_axis(sizes: Sequence[int], axes: int) -> list[int]:
    """A number for each axis; PyTorch states one for all where they are equal."""
    return list(sizes) * axes if len(sizes) == 1 else list(sizes)


# --- what only moves numbers ------------------------------------------------------------------


@_writes(
    'view.default',
    'reshape.default',
    'unsqueeze.default',
    'squeeze.dim',
    'flatten.using_ints',
    'unflatten.int',
)
def _reshape(graph: GraphWriter, traced: Tensor, x: Value, *unused: Any) -> Value:
    return graph.reshape(x, traced.shape)


@_writes(
    'contiguous.default', 'clone.default', 'alias.default', 'detach.default', 'detach_.default'
)
def _same(graph: GraphWriter, traced: Tensor, x: Value, *unused: Any, **named: Any) -> Value:
    return x


@_writes('expand.default')
def _expand(graph: GraphWriter, traced: Tensor, x: Value, *unused: Any) -> Value:
    if tuple(traced.shape) == x.shape:
        return x
    return graph.node('Expand', [x, graph.integers(traced.shape)], traced.shape)


@_writes('transpose.int')
def _transpose(graph: GraphWriter, traced: Tensor, x: Value, a: int, b: int) -> Value:
    axes = list(range(len(x.shape)))
    axes[a], axes[b] = axes[b], axes[a]
    return graph.node('Transpose', [x], traced.shape, perm=axes)


@_writes('permute.default')
def _permute(graph: GraphWriter, traced: Tensor, x: Value, axes: list[int]) -> Value:
    return graph.node('Transpose', [x], traced.shape, perm=list(axes))


@_writes('cat.default')
def _concat(graph: GraphWriter, traced: Tensor, parts: Sequence[Value], dim: int = 0) -> Value:
    axis = dim % len(traced.shape)
    if (whole := graph.cut_from(parts, axis)) is not None:
        return whole
    types = {part.dtype for part in parts}
    # Half only where all parts are half: none is rounded because of another.
    dtype = types.pop() if len(types) == 1 else torch.float32
    operands = [graph.cast(part, dtype) for part in parts]
    return graph.node('Concat', operands, traced.shape, dtype, axis=axis)


@_writes('stack.default')
def _stack(graph: GraphWriter, traced: Tensor, parts: Sequence[Value], dim: int = 0) -> Value:
    axis = dim % len(traced.shape)
    shape = (*traced.shape[:axis], 1, *traced.shape[axis + 1 :])
    return _concat(graph, traced, [graph.reshape(part, shape) for part in parts], axis)


@_writes('chunk.default', 'split_with_sizes.default')
def _split(
    graph: GraphWriter, traced: Sequence[Tensor], x: Value, sizes: Any, dim: int = 0
) -> list[Value]:
    return graph.split(x, [tuple(part.shape) for part in traced], dim)


@_writes('slice.Tensor')
def _slice(
    graph: GraphWriter, traced: Tensor, x: Value, dim: int, start: int | None, end: int
) -> Value:
    length = x.shape[dim]
    begin = max(0, (start or 0) + (length if (start or 0) < 0 else 0))
    if begin == 0 and traced.shape[dim] == length:
        return x
    bounds = [graph.integers([n]) for n in (begin, begin + traced.shape[dim], dim % len(x.shape))]
    return graph.node('Slice', [x, *bounds], traced.shape)


@_writes('select.int')
def _select(graph: GraphWriter, traced: Tensor, x: Value, dim: int, index: int) -> Value:
    axis = dim % len(x.shape)
    place = graph.constant(torch.tensor(index % x.shape[axis]))
    return graph.node('Gather', [x, place], traced.shape, axis=axis)


@_writes('gather.default')
def _gather(graph: GraphWriter, traced: Tensor, x: Value, dim: int, places: Value) -> Value:
    return graph.node('GatherElements', [x, places], traced.shape, axis=dim % len(x.shape))


@_writes('repeat.default')
def _repeat(graph: GraphWriter, traced: Tensor, x: Value, times: list[int]) -> Value:
    for axis, count in enumerate(times):
        if count > 1:
            shape = (*x.shape[:axis], x.shape[axis] * count, *x.shape[axis + 1 :])
            x = graph.node('Concat', [x] * count, shape, axis=axis)
    return x


@_writes('repeat_interleave.self_int')
def _repeat_each(graph: GraphWriter, traced: Tensor, x: Value, count: int, dim: int) -> Value:
    shape = (*x.shape[: dim + 1], 1, *x.shape[dim + 1 :])
    wide = (*x.shape[: dim + 1], count, *x.shape[dim + 1 :])
    expanded = graph.node('Expand', [graph.reshape(x, shape), graph.integers(wide)], wide)
    return graph.reshape(expanded, traced.shape)


@_writes('embedding.default')
def _embedding(graph: GraphWriter, traced: Tensor, table: Value, tokens: Value) -> Value:
    return graph.node('Gather', [table, tokens], traced.shape, axis=0)

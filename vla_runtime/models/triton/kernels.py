"""Kernels of an expert's layer in Triton; `expert.TritonExpert` launches them.

A layer is eight kernels: norm; projection and rotary positions; attention to a part of the keys;
the sum over these parts; output projection; residual, gate and norm; gate and up; down. The next
layer's norm adds what `down` gives. All numbers between a load and a store are float32.

Rows of matrices are tokens. A product whose outputs are few is cut into parts of its inputs, which
the next norm adds up in order, so that equal inputs give equal bits.

Only code that has found Triton imports this module. Triton reads annotations as code, so arguments
have none; constants of a compilation are written in capitals.
"""

# mypy: allow-untyped-defs
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    x,
    parts,
    gate,
    scale,
    shift,
    normed,
    count,
    tokens,
    width,
    epsilon,
    gate_batch,
    gate_token,
    batch_stride,
    token_stride,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    NORMED: tl.constexpr,
    SHIFTED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add a product to the residual stream, and normalise the sum; one program a token.

    Args:
        x: (N, W) float32, added to.
        parts: (PARTS, N, W) float32, of the product; without PARTS nothing is added.
        gate: float32, times the product if GATED, of token t in row b at
            b * gate_batch + t * gate_token.
        scale, shift: float32, addressed likewise with the other strides.
        normed: (N, W), x / RMS times its scale, plus its shift if SHIFTED; written if NORMED.
        WIDTH: a power of 2 from W on.
    """
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    inside = column < width
    batch, token = row // tokens, row % tokens
    values = tl.load(x + row * width + column, mask=inside, other=0.0)
    if PARTS > 0:
        product = tl.zeros((WIDTH,), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            at = (part * count + row) * width + column
            product += tl.load(parts + at, mask=inside, other=0.0)
        if GATED:
            at = batch * gate_batch + token * gate_token + column
            product *= tl.load(gate + at, mask=inside, other=0.0)
        values += product
        tl.store(x + row * width + column, values, mask=inside)
    if NORMED:
        inverse = tl.rsqrt(tl.sum(values * values, axis=0) / width + epsilon)
        at = batch * batch_stride + token * token_stride + column
        values *= inverse * tl.load(scale + at, mask=inside, other=0.0)
        if SHIFTED:
            values += tl.load(shift + at, mask=inside, other=0.0)
        tl.store(normed + row * width + column, values.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _operand(operand, rows, is_row, inputs, is_input, width):
    """A tile (rows, inputs) of a matrix."""
    at = rows[:, None] * width + inputs[None, :]
    return tl.load(operand + at, mask=is_row[:, None] & is_input[None, :], other=0.0)


@triton.jit
def _weights(weight, outputs, is_output, inputs, is_input, width):
    """A tile (inputs, outputs) of a matrix that is stored as (outputs, width)."""
    at = outputs[None, :] * width + inputs[:, None]
    return tl.load(weight + at, mask=is_output[None, :] & is_input[:, None], other=0.0)


@triton.jit
def _two_products(
    operand,
    weight,
    rows,
    is_row,
    outputs,
    is_output,
    offset,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products of rows with some outputs of a matrix, and with those `offset` behind."""
    first = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    second = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in tl.range(0, width, INNER):
        inner = start + tl.arange(0, INNER)
        is_inner = inner < width
        values = _operand(operand, rows, is_row, inner, is_inner, width)
        of_first = _weights(weight, outputs, is_output, inner, is_inner, width)
        of_second = _weights(weight, outputs + offset, is_output, inner, is_inner, width)
        first = tl.dot(values, of_first, first, input_precision=PRECISION)
        second = tl.dot(values, of_second, second, input_precision=PRECISION)
    return first, second


@triton.jit
def project_kernel(
    operand,
    weight,
    cosine,
    sine,
    query,
    key,
    value,
    count,
    tokens,
    width,
    heads,
    kv_heads,
    length,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Queries, keys and values of the normed residual stream, rotated, in their places.

    A program computes ROWS tokens of COLUMNS pairs of one head: number i and number i + HALF.

    Args:
        operand: (N, W).
        weight: ((heads + 2 kv_heads) * D, W), or of the heads alone without kv_heads.
        cosine, sine: (N, HALF) float32.
        query: (N, heads, D).
        key, value: (B, kv_heads, length, D); the suffix's tokens come first.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    per_head = tl.cdiv(HALF, COLUMNS)
    column_tile = tl.program_id(1)
    head = column_tile // per_head
    pair = (column_tile % per_head) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_pair = rows < count, pair < HALF
    row, token = rows // tokens, rows % tokens
    outputs = head * 2 * HALF + pair

    first, second = _two_products(
        operand,
        weight,
        rows,
        is_row,
        outputs,
        is_pair,
        HALF,
        width,
        ROWS,
        COLUMNS,
        INNER,
        PRECISION,
    )

    inside = is_row[:, None] & is_pair[None, :]
    if head < heads + kv_heads:
        at = rows[:, None] * HALF + pair[None, :]
        cos, sin = tl.load(cosine + at, mask=inside), tl.load(sine + at, mask=inside)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    if head < heads:
        place = query + ((rows * heads + head) * 2 * HALF)[:, None] + pair[None, :]
        tl.store(place, first.to(query.dtype.element_ty), mask=inside)
        tl.store(place + HALF, second.to(query.dtype.element_ty), mask=inside)
    else:
        kv_head = (head - heads) % kv_heads
        at = (((row * kv_heads + kv_head) * length + token) * 2 * HALF)[:, None] + pair[None, :]
        if head < heads + kv_heads:
            tl.store(key + at, first.to(key.dtype.element_ty), mask=inside)
            tl.store(key + at + HALF, second.to(key.dtype.element_ty), mask=inside)
        else:
            tl.store(value + at, first.to(value.dtype.element_ty), mask=inside)
            tl.store(value + at + HALF, second.to(value.dtype.element_ty), mask=inside)


@triton.jit
def attend_kernel(
    query,
    key,
    value,
    suffix_sees,
    lengths,
    attended,
    weight,
    count,
    tokens,
    suffix_keys,
    heads,
    kv_heads,
    length,
    part_length,
    score_scale,
    HEAD: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of the queries that share a head of keys to one part of these keys.

    Args:
        query: (N, heads, HEAD), rotated; key, value: (B, kv_heads, length, HEAD).
        suffix_sees: (tokens, suffix_keys) uint8, which of the first keys a token sees.
        lengths: (B,) int32, keys of a row that are valid. What is behind them is never read.
        attended: (parts, N, heads, HEAD) float32, of a part alone.
        weight: (parts, N, heads) float32, logarithm of the sum of a part's exponentials.
        DIM: a power of 2 from HEAD on.
    """
    group = heads // kv_heads
    row_head, part = tl.program_id(1), tl.program_id(2)
    row, head = row_head // kv_heads, row_head % kv_heads
    queries = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_query = queries < tokens * group
    token = queries // group
    at_query = (row * tokens + token) * heads + head * group + queries % group
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD
    of_query = is_query[:, None] & is_dim[None, :]
    q = tl.load(query + at_query[:, None] * HEAD + dim[None, :], mask=of_query, other=0.0)

    sums = tl.zeros((ROWS, DIM), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    largest = tl.full((ROWS,), float('-inf'), dtype=tl.float32)
    valid = tl.load(lengths + row)
    begin = part * part_length
    end = tl.minimum(begin + part_length, valid)
    first_key = (row * kv_heads + head) * length
    for start in tl.range(begin, end, KEYS):
        places = start + tl.arange(0, KEYS)
        is_key = places < end
        at = (first_key + places)[:, None] * HEAD + dim[None, :]
        of_key = is_key[:, None] & is_dim[None, :]
        k = tl.load(key + at, mask=of_key, other=0.0)
        v = tl.load(value + at, mask=of_key, other=0.0)
        in_suffix = is_query[:, None] & (places < suffix_keys)[None, :]
        seen = tl.load(
            suffix_sees + token[:, None] * suffix_keys + places[None, :], mask=in_suffix, other=1
        )
        seen = (seen != 0) & is_key[None, :]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale
        scores = tl.where(seen, scores, float('-inf'))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        # A part may have no key that a query sees.
        reference = tl.where(larger == float('-inf'), 0.0, larger)
        shrunk = tl.exp(largest - reference)
        weights = tl.exp(scores - reference[:, None])
        total = total * shrunk + tl.sum(weights, axis=1)
        sums = sums * shrunk[:, None]
        sums = tl.dot(weights.to(v.dtype), v, sums, input_precision=PRECISION)
        largest = larger

    nothing = total == 0.0
    sums = sums / tl.where(nothing, 1.0, total)[:, None]
    logarithm = tl.where(nothing, float('-inf'), largest + tl.log(tl.where(nothing, 1.0, total)))
    at_part = part * count * heads + at_query
    tl.store(attended + at_part[:, None] * HEAD + dim[None, :], sums, mask=of_query)
    tl.store(weight + at_part, logarithm, mask=is_query)


@triton.jit
def combine_kernel(
    attended,
    weight,
    result,
    queries,
    parts,
    HEAD: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Attention to all keys, of the parts; one program a query.

    Args:
        attended, weight: result of `attend_kernel`, (parts, queries, HEAD) and (parts, queries).
        result: (queries, HEAD).
    """
    query = tl.program_id(0)
    part, dim = tl.arange(0, PARTS), tl.arange(0, DIM)
    is_part, is_dim = part < parts, dim < HEAD
    logarithm = tl.load(weight + part * queries + query, mask=is_part, other=float('-inf'))
    weights = tl.exp(logarithm - tl.max(logarithm, axis=0))
    weights = weights / tl.sum(weights, axis=0)
    at = (part * queries + query)[:, None] * HEAD + dim[None, :]
    inside = is_part[:, None] & is_dim[None, :]
    values = tl.load(attended + at, mask=inside, other=0.0)
    found = tl.sum(values * weights[:, None], axis=0)
    tl.store(result + query * HEAD + dim, found.to(result.dtype.element_ty), mask=is_dim)


@triton.jit
def product_kernel(
    operand,
    weight,
    parts,
    count,
    width,
    inputs,
    part_inputs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Product of rows with a matrix, of one part of the inputs.

    Args:
        operand: (N, inputs); weight: (W, inputs).
        parts: (parts, N, W) float32.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    is_row, is_column = rows < count, columns < width
    end = tl.minimum((part + 1) * part_inputs, inputs)
    product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in tl.range(part * part_inputs, end, INNER):
        inner = start + tl.arange(0, INNER)
        is_inner = inner < end
        values = _operand(operand, rows, is_row, inner, is_inner, inputs)
        matrix = _weights(weight, columns, is_column, inner, is_inner, inputs)
        product = tl.dot(values, matrix, product, input_precision=PRECISION)
    place = parts + (part * count + rows)[:, None] * width + columns[None, :]
    tl.store(place, product, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def gated_kernel(
    operand,
    weight,
    hidden,
    count,
    width,
    hidden_width,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Hidden numbers of a gated MLP of the normed residual stream.

    Args:
        operand: (N, W).
        weight: (2 * hidden_width, W), gate before up; hidden: (N, hidden_width).
        GELU: the activation is GELU in its tanh form, else SiLU.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < count, columns < hidden_width
    gate, up = _two_products(
        operand,
        weight,
        rows,
        is_row,
        columns,
        is_column,
        hidden_width,
        width,
        ROWS,
        COLUMNS,
        INNER,
        PRECISION,
    )

    if GELU:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = gate * tl.sigmoid(gate)
    place = hidden + rows[:, None] * hidden_width + columns[None, :]
    inside = is_row[:, None] & is_column[None, :]
    tl.store(place, (activated * up).to(hidden.dtype.element_ty), mask=inside)

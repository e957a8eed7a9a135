"""All layers of an expert in one Triton kernel; `triton_persistent.PersistentExpert` launches it.

A layer is eight phases, which are the kernels of `triton_kernels`: norm; projection; attention to
parts of the keys; the sum over these; output projection; norm; gate and up; down. One launch has as
many programs as run at the same time. Each does its share of a phase, says so in a counter, and
waits until all shares of the phase before are done.

No wait is for ever: a program that has looked `limit` times says in which phase, and goes on; the
result is then NaN.

Annotations and capitals as in `triton_kernels`.
"""

# mypy: allow-untyped-defs
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from vla_runtime.families.blocks.triton_kernels import (
    attend_kernel,
    gated_kernel,
    norm_kernel,
    product_kernel,
    project_kernel,
)

# Phases of a layer.
PHASES = 8
# Numbers between two counters: each has a cache line of its own.
COUNTER = 32
# Cache lines that a program asks for at a time.
LINES = 256


@triton.jit
def _arrive(counters, stage, COUNTER: tl.constexpr):
    """Say that this program has done its share of a stage, and that others may read it."""
    # Every thread has written before one of them says so.
    tl.debug_barrier()
    tl.atomic_add(counters + stage * COUNTER, 1, sem='release', scope='gpu')


@triton.jit
def _wait(counters, failed, stage, programs, limit, COUNTER: tl.constexpr):
    """Wait for all programs' shares of a stage; return how often the next wait may look."""
    place = counters + stage * COUNTER
    seen = tl.atomic_add(place, 0, sem='acquire', scope='gpu')
    looked = 0
    while (seen < programs) & (looked < limit):
        seen = tl.atomic_add(place, 0, sem='acquire', scope='gpu')
        looked += 1
    if seen < programs:
        tl.atomic_max(failed, stage + 1, sem='relaxed', scope='gpu')
        limit = 0
    tl.debug_barrier()
    return limit


@triton.jit
def _fetch(numbers, first, count, LINES: tl.constexpr):
    """Ask for numbers in the L2 cache; the programs share the work, and nothing waits for it."""
    line_size: tl.constexpr = 1024 // numbers.dtype.element_ty.primitive_bitwidth
    lines = tl.cdiv(count, line_size)
    begin = tl.program_id(0) * LINES
    for start in tl.range(begin, lines, tl.num_programs(0) * LINES, num_stages=1):
        line = tl.minimum(start + tl.arange(0, LINES), lines - 1)
        address = (numbers + first + line * line_size).to(tl.int64)
        tl.inline_asm_elementwise(
            'prefetch.global.L2 [$1]; mov.u32 $0, 0;',
            '=r,l',
            [address],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _shares(stage, norms, project, attend, combine, out, gate, down, PHASES: tl.constexpr):
    """Tiles of a stage."""
    phase = stage % PHASES
    # The last stage is a norm's too.
    found = norms
    if phase == 1:
        found = project
    elif phase == 2:
        found = attend
    elif phase == 3:
        found = combine
    elif phase == 4:
        found = out
    elif phase == 6:
        found = gate
    elif phase == 7:
        found = down
    return found


@triton.jit
def _note(clocks, place, NOTED: tl.constexpr):
    """Write the multiprocessor's clock, where the time of each stage is wanted."""
    if NOTED:
        tl.debug_barrier()
        clock = tl.inline_asm_elementwise(
            'mov.u64 $0, %clock64;', '=l', [], dtype=tl.int64, is_pure=False, pack=1
        )
        tl.store(clocks + place, clock)


@triton.jit
def combine_kernel(
    attended,
    weight,
    result,
    queries,
    parts,
    query_tile,
    HEAD: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """As `triton_kernels.combine_kernel`, QUERIES of them.

    Args:
        attended, weight, result, queries, parts: see there.
        query_tile: place of these among all queries, in tiles.
        PARTS: `parts`, of a compilation.
    """
    query = query_tile * QUERIES + tl.arange(0, QUERIES)
    dim = tl.arange(0, DIM)
    is_query = query < queries
    largest = tl.full((QUERIES,), float('-inf'), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        of_part = tl.load(weight + part * queries + query, mask=is_query, other=0.0)
        largest = tl.maximum(largest, of_part)
    inside = is_query[:, None] & (dim < HEAD)[None, :]
    sums = tl.zeros((QUERIES, DIM), dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        at = part * queries + query
        share = tl.exp(tl.load(weight + at, mask=is_query, other=0.0) - largest)
        total += share
        at_part = at[:, None] * HEAD + dim[None, :]
        sums += share[:, None] * tl.load(attended + at_part, mask=inside, other=0.0)
    sums = sums / total[:, None]
    place = result + query[:, None] * HEAD + dim[None, :]
    tl.store(place, sums.to(result.dtype.element_ty), mask=inside)


# Which stages run is no property of a compilation.
@triton.jit(do_not_specialize=['first', 'last', 'stages', 'limit'])
def step_kernel(
    x,
    parts,
    normed,
    hidden,
    query,
    keys,
    values,
    sight,
    lengths,
    of_parts,
    part_weight,
    attended,
    cosine,
    sine,
    qkv,
    out,
    gated,
    down,
    offsets,
    norms,
    counters,
    failed,
    clocks,
    first,
    last,
    stages,
    limit,
    count,
    tokens,
    width,
    hidden_width,
    own,
    heads,
    kv_heads,
    length,
    layer_keys,
    part_length,
    score_scale,
    epsilon,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    STAGES: tl.constexpr,
    HEAD_PAIRS: tl.constexpr,
    GATE_PAIRS: tl.constexpr,
    OUT_OUTPUTS: tl.constexpr,
    OUT_INPUTS: tl.constexpr,
    OUT_PARTS: tl.constexpr,
    DOWN_OUTPUTS: tl.constexpr,
    DOWN_INPUTS: tl.constexpr,
    DOWN_PARTS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    KEY_STAGES: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    COMBINED: tl.constexpr,
    MODULATED: tl.constexpr,
    GELU: tl.constexpr,
    PRECISION: tl.constexpr,
    FETCH: tl.constexpr,
    PHASES: tl.constexpr,
    COUNTER: tl.constexpr,
    LINES: tl.constexpr,
    NOTED: tl.constexpr,
):
    """Stages `first` to `last` of a step: PHASES a layer, and one that adds the last product.

    Args:
        x: (N, W) float32, the residual stream, added to.
        parts: (most parts, N, W) float32; normed (N, W); hidden (N, hidden_width).
        query, of_parts, part_weight, attended, cosine, sine, sight, lengths: as of
            `triton_kernels`, of one layer.
        keys, values: (layers, B, kv_heads, length, D).
        qkv, out, gated, down: matrices of the first layer.
        offsets: (layers + 1, 4) int64, where the matrices of a layer are, in numbers behind these;
            the last is read and not used.
        norms: (2 layers, 3, W) float32: scale, shift and gate of each norm; without MODULATED the
            scale alone is read.
        counters: (stages, COUNTER) int32, whose first numbers count programs that have done
            their share; 0 at first.
        failed: (1,) int32, 0 at first; stage + 1 where a program waited in vain.
        clocks: (stages, programs, 2) int64, of the multiprocessor before and after its program's
            share of a stage; written if NOTED.
        first, last: stages of this launch. One that has all of them needs all of its programs at
            the same time.
        stages: stages of a whole step.
        limit: how often a wait looks.
        layer_keys: numbers of a layer in `keys`.
        OUT_OUTPUTS, OUT_INPUTS, OUT_PARTS, DOWN_OUTPUTS, DOWN_INPUTS, DOWN_PARTS: outputs and
            inputs of a program, and parts of all inputs, of the two products that are cut.
        COMBINED: queries of a program of `combine_kernel`.
        FETCH: 0, or which weights are asked for ahead: 1 those of the next two products or so, a
            part in each phase; 2 those of the next product.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    row_tiles = tl.cdiv(count, ROWS)
    head_dim: tl.constexpr = 2 * HALF
    queries = tokens * (heads // kv_heads)
    pairs: tl.constexpr = (HALF + HEAD_PAIRS - 1) // HEAD_PAIRS
    out_tiles, down_tiles = tl.cdiv(width, OUT_OUTPUTS), tl.cdiv(width, DOWN_OUTPUTS)
    query_tiles, gate_tiles = tl.cdiv(queries, QUERIES), tl.cdiv(hidden_width, GATE_PAIRS)
    all_heads = count // tokens * kv_heads
    all_project = row_tiles * (heads + 2 * kv_heads) * pairs
    all_attend = query_tiles * all_heads * KEY_PARTS
    all_combine = tl.cdiv(count * heads, COMBINED)
    all_out = row_tiles * out_tiles * OUT_PARTS
    all_gate = row_tiles * gate_tiles
    all_down = row_tiles * down_tiles * DOWN_PARTS
    for stage in tl.range(first, last, num_stages=1):
        layer, phase = stage // PHASES, stage % PHASES
        of_layer = offsets + layer * 4
        own_qkv = qkv + tl.multiple_of(tl.load(of_layer), 16)
        own_out = out + tl.multiple_of(tl.load(of_layer + 1), 16)
        own_gated = gated + tl.multiple_of(tl.load(of_layer + 2), 16)
        own_down = down + tl.multiple_of(tl.load(of_layer + 3), 16)
        own_keys = keys + layer * layer_keys
        own_values = values + layer * layer_keys
        own_norms = norms + layer * 6 * width
        busy = program < _shares(
            stage,
            count,
            all_project,
            all_attend,
            all_combine,
            all_out,
            all_gate,
            all_down,
            PHASES,
        )
        # Who waits for a program's share waits for all before it: an idle one need not be waited
        # for, nor wait itself.
        if busy & (stage > first):
            before = _shares(
                stage - 1,
                count,
                all_project,
                all_attend,
                all_combine,
                all_out,
                all_gate,
                all_down,
                PHASES,
            )
            before = tl.minimum(before, programs)
            limit = _wait(counters, failed, stage - 1, before, limit, COUNTER)
        _note(clocks, (stage * programs + program) * 2, NOTED)

        if stage == stages - 1:
            gate = norms + (layer * 6 - 1) * width
            for row in tl.range(program, count, programs, num_stages=1):
                norm_kernel(
                    x,
                    parts,
                    gate,
                    x,
                    x,
                    normed,
                    count,
                    tokens,
                    width,
                    epsilon,
                    0,
                    0,
                    0,
                    0,
                    DOWN_PARTS,
                    MODULATED,
                    False,
                    False,
                    WIDTH,
                    row,
                )
                tl.debug_barrier()
                if tl.load(failed, volatile=True) > 0:
                    column = tl.arange(0, WIDTH)
                    nothing = tl.full((WIDTH,), float('nan'), dtype=tl.float32)
                    tl.store(x + row * width + column, nothing, mask=column < width)
        elif phase == 0:
            # Of the layer before.
            gate = norms + (layer * 6 - 1) * width
            for row in tl.range(program, count, programs, num_stages=1):
                if layer == 0:
                    norm_kernel(
                        x,
                        parts,
                        x,
                        own_norms,
                        own_norms + width,
                        normed,
                        count,
                        tokens,
                        width,
                        epsilon,
                        0,
                        0,
                        0,
                        0,
                        0,
                        False,
                        True,
                        MODULATED,
                        WIDTH,
                        row,
                    )
                else:
                    norm_kernel(
                        x,
                        parts,
                        gate,
                        own_norms,
                        own_norms + width,
                        normed,
                        count,
                        tokens,
                        width,
                        epsilon,
                        0,
                        0,
                        0,
                        0,
                        DOWN_PARTS,
                        MODULATED,
                        True,
                        MODULATED,
                        WIDTH,
                        row,
                    )
        elif phase == 1:
            for tile in tl.range(program, all_project, programs, num_stages=1):
                project_kernel(
                    normed,
                    own_qkv,
                    cosine,
                    sine,
                    query,
                    own_keys,
                    own_values,
                    count,
                    tokens,
                    width,
                    heads,
                    kv_heads,
                    length,
                    HALF,
                    ROWS,
                    HEAD_PAIRS,
                    INNER,
                    PRECISION,
                    STAGES,
                    tile % row_tiles,
                    tile // row_tiles,
                )
        elif phase == 2:
            for tile in tl.range(program, all_attend, programs, num_stages=1):
                attend_kernel(
                    query,
                    own_keys,
                    own_values,
                    sight,
                    lengths,
                    of_parts,
                    part_weight,
                    count,
                    tokens,
                    own,
                    heads,
                    kv_heads,
                    length,
                    part_length,
                    score_scale,
                    head_dim,
                    DIM,
                    QUERIES,
                    KEYS,
                    PRECISION,
                    KEY_STAGES,
                    tile % query_tiles,
                    tile // query_tiles % all_heads,
                    tile // query_tiles // all_heads,
                )
        elif phase == 3:
            for tile in tl.range(program, all_combine, programs, num_stages=1):
                combine_kernel(
                    of_parts,
                    part_weight,
                    attended,
                    count * heads,
                    KEY_PARTS,
                    tile,
                    head_dim,
                    DIM,
                    KEY_PARTS,
                    COMBINED,
                )
        elif phase == 4:
            for tile in tl.range(program, all_out, programs, num_stages=1):
                product_kernel(
                    attended,
                    own_out,
                    parts,
                    count,
                    width,
                    heads * head_dim,
                    OUT_INPUTS,
                    ROWS,
                    OUT_OUTPUTS,
                    INNER,
                    PRECISION,
                    STAGES,
                    tile % row_tiles,
                    tile // row_tiles % out_tiles,
                    tile // row_tiles // out_tiles,
                )
        elif phase == 5:
            for row in tl.range(program, count, programs, num_stages=1):
                norm_kernel(
                    x,
                    parts,
                    own_norms + 2 * width,
                    own_norms + 3 * width,
                    own_norms + 4 * width,
                    normed,
                    count,
                    tokens,
                    width,
                    epsilon,
                    0,
                    0,
                    0,
                    0,
                    OUT_PARTS,
                    MODULATED,
                    True,
                    MODULATED,
                    WIDTH,
                    row,
                )
        elif phase == 6:
            for tile in tl.range(program, all_gate, programs, num_stages=1):
                gated_kernel(
                    normed,
                    own_gated,
                    hidden,
                    count,
                    width,
                    hidden_width,
                    GELU,
                    ROWS,
                    GATE_PAIRS,
                    INNER,
                    PRECISION,
                    STAGES,
                    tile % row_tiles,
                    tile // row_tiles,
                )
        else:
            for tile in tl.range(program, all_down, programs, num_stages=1):
                product_kernel(
                    hidden,
                    own_down,
                    parts,
                    count,
                    width,
                    hidden_width,
                    DOWN_INPUTS,
                    ROWS,
                    DOWN_OUTPUTS,
                    INNER,
                    PRECISION,
                    STAGES,
                    tile % row_tiles,
                    tile // row_tiles % down_tiles,
                    tile // row_tiles // down_tiles,
                )

        _note(clocks, (stage * programs + program) * 2 + 1, NOTED)
        if stage < stages - 1:
            if busy:
                _arrive(counters, stage, COUNTER)
            if FETCH > 0:
                of_qkv = (heads + 2 * kv_heads) * head_dim * width
                of_out = width * heads * head_dim
                of_gated = 2 * hidden_width * width
                of_down = width * hidden_width
                # The last layer's next is itself, which does no harm.
                next_layer = tl.minimum(layer + 1, stages // PHASES - 1)
                next_qkv = qkv + tl.load(offsets + next_layer * 4)
                if FETCH == 1:
                    if phase == 0:
                        _fetch(own_out, 0, of_out, LINES)
                    elif phase == 1:
                        _fetch(own_gated, 0, of_gated // 2, LINES)
                    elif phase == 2:
                        _fetch(own_gated, of_gated // 2, of_gated // 2, LINES)
                    elif phase == 3:
                        _fetch(own_down, 0, of_down // 2, LINES)
                    elif phase == 4:
                        _fetch(own_down, of_down // 2, of_down // 2, LINES)
                    elif phase == 5:
                        _fetch(next_qkv, 0, of_qkv, LINES)
                    elif phase == 6:
                        next_keys = next_layer * layer_keys
                        _fetch(keys, next_keys, layer_keys, LINES)
                        _fetch(values, next_keys, layer_keys, LINES)
                else:
                    if phase == 2:
                        _fetch(own_out, 0, of_out, LINES)
                    elif phase == 4:
                        _fetch(own_gated, 0, of_gated, LINES)
                    elif phase == 6:
                        _fetch(own_down, 0, of_down, LINES)
                    elif phase == 7:
                        _fetch(next_qkv, 0, of_qkv, LINES)

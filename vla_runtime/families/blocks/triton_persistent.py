"""The expert over one prefix in one Triton kernel a denoise step.

In eight kernels a layer most of the time is the wait of each kernel for the one before, and the
memory stands still meanwhile. Here programs stay for the whole step, and ask for the weights of the
products to come while they wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vla_runtime.families.blocks import triton_persistent_kernel as kernels
from vla_runtime.families.blocks import triton_step
from vla_runtime.families.blocks.fused_expert import Past
from vla_runtime.families.blocks.gemma import Modulation
from vla_runtime.families.blocks.layers import gelu_tanh
from vla_runtime.families.blocks.triton_expert import TritonExpert, _half, _power
from vla_runtime.families.blocks.triton_persistent_kernel import COUNTER, LINES, PHASES
from vla_runtime.families.blocks.triton_step import tiles

# Tiles, as in `triton_expert`; of the two products that are cut, outputs and inputs of a program.
# With a chunk's 50 tokens each product has about as many programs' shares as a large GPU has
# multiprocessors.
ROWS, INNER = 128, 64
HEAD_PAIRS, GATE_PAIRS = 16, 32
OUT_OUTPUTS, OUT_INPUTS = 64, 256
DOWN_OUTPUTS, DOWN_INPUTS = 64, 512
QUERIES, KEYS, KEY_STAGES = 64, 32, 2
# Keys of a part in one row, and queries that a program sums the parts of.
PART, COMBINED = 64, 4
STAGES, EXACT_INNER, EXACT_STAGES = 6, 16, 4
WARPS = 8
# Weights that are asked for ahead, as `FETCH` of the kernel.
FETCH = 1
# Programs that a multiprocessor runs at a time.
PER_MULTIPROCESSOR = 1
# Looks at a counter, of about a microsecond each, before a program gives up.
LIMIT = 2**18
# Each program writes when it begins and ends its share of a stage: for measurements.
NOTED = False
# All programs are launched together or not at all.
COOPERATIVE = True


class PersistentExpert(TritonExpert):
    """`TritonExpert` in one kernel where its layers are alike and attend to the suffix too.

    Steps whose actions have flow times of their own, and other layers, run as those of
    `TritonExpert`.

    Args:
        blocks, of_suffix, kernel, static_shapes: see `TritonExpert`.
    """

    def __init__(self, blocks: Sequence[Any], *rest: Any) -> None:
        super().__init__(blocks, *rest)
        first = self._matrices[0]
        self._alike = not any(block.cross for block in blocks) and all(
            [matrix.shape for matrix in matrices] == [matrix.shape for matrix in first]
            and block.head_dim == blocks[0].head_dim
            and block.epsilon == blocks[0].epsilon
            and (block.input_scale is None) == (blocks[0].input_scale is None)
            for block, matrices in zip(blocks, self._matrices, strict=True)
        )

    def _allocate(self, own: Past | None, cross: Past | None) -> None:
        super()._allocate(own, cross)
        if not self._alike:
            return
        block, device = self._blocks[0], self._x.device
        layers, count = len(self._blocks), self._count
        self._stages = layers * PHASES + 1
        self._offsets = self._addresses().to(device)
        self._norms = torch.zeros(2 * layers, 3, block.width, device=device)
        if block.input_scale is not None:
            plain: list[Any] = [s for b in self._blocks for s in (b.input_scale, b.post_scale)]
            torch.stack(plain, out=self._norms[:, 0])
        self._counters = torch.zeros(self._stages * COUNTER + 1, dtype=torch.int32, device=device)
        self._failed = self._counters[-1:]
        attention = self._own
        self._part = PART * attention.batch
        self._key_parts = tiles(attention.length, self._part)
        heads = attention.heads
        self._of_parts = torch.empty(self._key_parts, count, heads, block.head_dim, device=device)
        self._part_weights = torch.empty(self._key_parts, count, heads, device=device)
        self._cut = [
            tiles(block.out.weight.shape[1], OUT_INPUTS),
            tiles(block.down.weight.shape[1], DOWN_INPUTS),
        ]
        self._parts = torch.empty(max(self._cut), count, block.width, device=device)
        self._programs = _multiprocessors(device) * PER_MULTIPROCESSOR
        noted = self._stages * self._programs * 2 if NOTED else 0
        self._clocks = torch.zeros(max(1, noted), dtype=torch.int64, device=device)

    def _addresses(self) -> Tensor:
        """Return where each layer's matrices are behind those of the first, (layers + 1, 4)."""
        first = [matrix.data_ptr() for matrix in self._matrices[0]]
        size = self._matrices[0][0].element_size()
        distances = [
            [matrix.data_ptr() - start for matrix, start in zip(matrices, first, strict=True)]
            for matrices in [*self._matrices, self._matrices[-1]]
        ]
        if any(distance % (16 * size) for layer in distances for distance in layer):
            raise ValueError('matrices of layers that do not begin at multiples of 16 numbers')
        return torch.tensor(distances, dtype=torch.int64) // size

    def __call__(self, h: Tensor, modulations: Sequence[Modulation]) -> Tensor:
        """See `FusedExpert`."""
        shared = all(modulation[0].numel() == self._width for modulation in modulations)
        if not self._alike or not shared:
            return super().__call__(h, modulations)
        with triton_step.device_of(h):
            self._x.copy_(h)
            self._counters.zero_()
            if modulations:
                wide = [part.view(-1) for one in modulations[: len(self._norms)] for part in one]
                torch.stack(wide, out=self._norms.view(len(wide), -1))
            # An interpreter runs one program after the other: none may wait for a later one.
            for first, last in self._launches(h.device.type != 'cpu'):
                self._launch(bool(modulations), first, last)
        return self._x

    def _launches(self, at_once: bool) -> list[tuple[int, int]]:
        if at_once:
            return [(0, self._stages)]
        return [(stage, stage + 1) for stage in range(self._stages)]

    def _launch(self, modulated: bool, first: int, last: int) -> None:
        """Run stages of a step."""
        block, attention, count = self._blocks[0], self._own, self._count
        exact = attention.query.dtype == torch.float32
        half = block.head_dim // 2
        queries = self._tokens * attention.heads // attention.kv_heads
        # What an interpreter does not know.
        interpreted = self._x.device.type == 'cpu'
        cooperative = {} if interpreted else {'launch_cooperative_grid': COOPERATIVE}
        kernels.step_kernel[(self._programs,)](
            self._x,
            self._parts,
            self._normed,
            self._hidden,
            attention.query,
            attention.keys,
            attention.values,
            attention.sight,
            attention.lengths,
            self._of_parts,
            self._part_weights,
            attention.attended,
            attention.cosine,
            attention.sine,
            *self._matrices[0],
            self._offsets,
            self._norms,
            self._counters,
            self._failed,
            self._clocks,
            first,
            last,
            self._stages,
            LIMIT,
            count,
            self._tokens,
            self._width,
            self._hidden.shape[1],
            attention.own,
            attention.heads,
            attention.kv_heads,
            attention.length,
            attention.keys[0].numel(),
            self._part,
            block.head_dim**-0.5,
            block.epsilon,
            HALF=half,
            DIM=_power(block.head_dim),
            WIDTH=_power(self._width),
            ROWS=min(ROWS, _power(count)),
            INNER=EXACT_INNER if exact else INNER,
            STAGES=EXACT_STAGES if exact else STAGES,
            HEAD_PAIRS=min(HEAD_PAIRS, _power(half)),
            GATE_PAIRS=GATE_PAIRS,
            OUT_OUTPUTS=OUT_OUTPUTS,
            OUT_INPUTS=OUT_INPUTS,
            OUT_PARTS=self._cut[0],
            DOWN_OUTPUTS=DOWN_OUTPUTS,
            DOWN_INPUTS=DOWN_INPUTS,
            DOWN_PARTS=self._cut[1],
            QUERIES=min(_half(QUERIES) if exact else QUERIES, _power(queries)),
            KEYS=_half(KEYS) if exact else KEYS,
            KEY_STAGES=KEY_STAGES,
            KEY_PARTS=self._key_parts,
            COMBINED=COMBINED,
            MODULATED=modulated,
            GELU=block.gated.activation is gelu_tanh,
            PRECISION=self._precision,
            FETCH=0 if interpreted else FETCH,
            PHASES=PHASES,
            COUNTER=COUNTER,
            LINES=LINES,
            NOTED=NOTED,
            num_warps=WARPS,
            **cooperative,
        )


def _multiprocessors(device: torch.device) -> int:
    """Return how many programs surely run at a time; on a CPU or without a device, a few."""
    if device.type != 'cuda':
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count

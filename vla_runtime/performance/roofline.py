"""What a policy needs of a device on paper: memory, and the least time of every phase.

The roofline model (Williams et al., CACM 2009): a phase takes at least as long as its counted
operations at the device's rate, and as its counted bytes at the device's bandwidth. A floor is no
estimate: no real run reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass

from vla_runtime.engines.protocol import SLOTS
from vla_runtime.families.blocks.dimensions import GemmaDims
from vla_runtime.families.pi.dimensions import PiDims
from vla_runtime.performance import operation_counts
from vla_runtime.performance.devices import GIB, MATRIX_BYTES, Device
from vla_runtime.performance.operation_counts import Work

_FLOAT32 = 4


@dataclass(frozen=True)
class Rates:
    """What a device can do at most, published or measured.

    Attributes:
        flops_per_s: matrix products in the precision at hand.
        bytes_per_s: of its memory.
        source: where the two come from.
    """

    flops_per_s: float
    bytes_per_s: float
    source: str


@dataclass(frozen=True)
class Floor:
    """The least time of some work.

    Attributes:
        milliseconds: at least.
        bound: which of the two it is: `compute` or `memory`.
    """

    milliseconds: float
    bound: str


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that serving a policy takes.

    Attributes:
        weights: of everything that is loaded, the whole text table included.
        past: keys and values, all prefix slots of every number of rows that is built.
        activations: of the widest moment of the prefill, an estimate.
    """

    weights: int
    past: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.past + self.activations


def published_rates(device: Device, precision: str) -> Rates:
    """The table's rates of a device."""
    source = '; '.join(filter(None, (device.source, device.note(precision))))
    return Rates(device.flops_per_s(precision), device.bytes_per_s, source)


def floor(work: Work, rates: Rates) -> Floor:
    """The least time that this work takes at these rates."""
    seconds = work.least_time_s(rates.flops_per_s, rates.bytes_per_s)
    computes = work.flops / rates.flops_per_s >= work.bytes / rates.bytes_per_s
    return Floor(seconds * 1e3, 'compute' if computes else 'memory')


def phase_floors(
    dims: PiDims, rates: Rates, *, precision: str, rows: int, steps: int, views: int
) -> dict[str, Floor]:
    """Least times of one inference, phase by phase.

    Args:
        dims: of the policy; `cameras` fixes the length of the prefix.
        rates: of the device.
        precision: of the large matrices, a key of `MATRIX_BYTES`.
        rows: prompt rows, 2 under guidance.
        steps: denoise steps.
        views: cameras whose image has changed at a miss.

    Returns:
        `vision` (one view), `prefix`, `step`, `denoise` (all steps), and two sums: `miss` (every
        phase) and `hit` (denoise alone)
    """
    size = MATRIX_BYTES[precision]
    step = operation_counts.denoise_step(dims, rows, size)
    floors = {
        'vision': floor(operation_counts.vision(dims, 1, size), rates),
        'prefix': floor(operation_counts.prefix(dims, rows, size), rates),
        'step': floor(step, rates),
        'denoise': floor(step * steps, rates),
    }
    vision, prefix, denoise = (
        floors[phase].milliseconds for phase in ('vision', 'prefix', 'denoise')
    )
    slowest = max(
        ('vision', vision * views), ('prefix', prefix), ('denoise', denoise), key=lambda p: p[1]
    )
    floors['miss'] = Floor(views * vision + prefix + denoise, f'mostly {slowest[0]}')
    floors['hit'] = Floor(denoise, floors['denoise'].bound)
    return floors


def memory_need(dims: PiDims, backend: str, *, precision: str, rows: int) -> MemoryNeed:
    """What serving takes in device memory.

    PyTorch holds one network and computes any number of rows with it. ONNX Runtime and TensorRT
    have a prefix and an expert of static shape for each number of rows, each with its own copy of
    the weights. Scratch memory is shared where all runs take it from one place; an ONNX Runtime
    session keeps its own.

    Args:
        dims: of the policy.
        backend: `torch`, `onnxruntime` or `tensorrt`.
        precision: of the large matrices, a key of `MATRIX_BYTES`.
        rows: most prompt rows; every number from 1 to this is built.
    """
    size, built = MATRIX_BYTES[precision], range(1, rows + 1)
    d, language = dims, dims.language
    a_prefix = 2 * language.depth * language.num_kv_heads * d.prefix_length * language.head_dim
    held = SLOTS * sum(built)
    # Gate, up and their product, beside the residual stream, its norm and one sum in float32.
    widest = 3 * language.mlp_dim * size + 3 * language.width * _FLOAT32
    at_once = sum(built) if backend == 'onnxruntime' else rows
    return MemoryNeed(
        weights=weight_bytes(dims, size)
        if backend == 'torch'
        else engine_weight_bytes(dims, size, len(built)),
        past=held * a_prefix * size,
        activations=at_once * d.prefix_length * widest,
    )


def engine_weight_bytes(dims: PiDims, matrix_bytes: int, pairs: int) -> int:
    """Bytes of the weights in the vision engine and in `pairs` prefix and expert engines.

    They lack what the networks have and no engine reads: most of the last prefix layer, and what
    makes pi0.5's modulation of the time.
    """
    vision, prefix, expert = _engine_weights(dims, matrix_bytes)
    return vision + pairs * (prefix + expert)


def largest_engine_bytes(dims: PiDims, matrix_bytes: int) -> int:
    """Bytes of the weights in the largest engine; every number of rows has the same."""
    return max(_engine_weights(dims, matrix_bytes))


def _engine_weights(dims: PiDims, matrix_bytes: int) -> tuple[int, int, int]:
    """Of vision, prefix and expert."""
    looked_up = dims.prompt_length * dims.language.width
    text = (dims.vocabulary * dims.language.width - looked_up) * matrix_bytes
    prefix = operation_counts.prefix(dims, 1, matrix_bytes).weight_bytes + text
    expert = operation_counts.denoise_step(dims, 1, matrix_bytes).weight_bytes
    vision = operation_counts.vision(dims, 1, matrix_bytes).weight_bytes
    return vision, prefix, expert


def weight_bytes(dims: PiDims, matrix_bytes: int = _FLOAT32) -> int:
    """Bytes of all parameters of the networks.

    Args:
        dims: of the policy.
        matrix_bytes: size of a number of the large matrices; all else is float32.
    """
    language, expert, width = dims.language, dims.expert, dims.expert.width
    matrices = _blocks(language) + _blocks(expert) + dims.vocabulary * language.width
    norms = (2 * expert.depth + 1) * width
    others = (2 * language.depth + 1) * language.width
    others += 2 * dims.action_dim * width + width + dims.action_dim
    if dims.state_dim:
        # pi0: plain norms, state projection, and the two layers that mix action and time.
        others += norms + (dims.state_dim + 1) * width + (3 * width + 2) * width
    else:
        # pi0.5: each norm's modulation from the time, and the two layers before them.
        others += norms * 3 * (width + 1) + 2 * (width + 1) * width
    vision = operation_counts.vision(dims, 1, matrix_bytes).weight_bytes
    return vision + matrices * matrix_bytes + others * _FLOAT32


def fits(need: MemoryNeed, device: Device) -> bool:
    """Whether that is to be had on the device, with what the table reserves left out."""
    return need.total <= (device.memory_gib - device.reserved_gib) * GIB


def _blocks(d: GemmaDims) -> int:
    attention = 2 * (d.num_heads + d.num_kv_heads) * d.head_dim
    return d.depth * d.width * (attention + 3 * d.mlp_dim)

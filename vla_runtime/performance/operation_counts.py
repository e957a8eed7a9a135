"""What a policy's networks compute and move, counted from their dimensions alone.

Pure numbers, no network: what `roofline` compares a measured time with. Counted are the operations
of matrix products and attention (a multiply-add is two; padding is computed like everything else,
because shapes are static), and the bytes that must cross the memory bus whatever the caches do:
each weight once a run, keys and values, inputs and outputs. Not counted are elementwise operations,
norms and softmax (below one percent), and activations between layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from vla_runtime.families.blocks.dimensions import GemmaDims
from vla_runtime.families.pi.dimensions import PiDims

_FLOAT32 = 4


@dataclass(frozen=True)
class Work:
    """An amount of work: of one run of a network, or of several.

    Attributes:
        flops: floating point operations.
        weight_bytes: weights read.
        data_bytes: keys and values, inputs and outputs, read and written.
    """

    flops: int
    weight_bytes: int
    data_bytes: int

    @property
    def bytes(self) -> int:
        """Everything moved."""
        return self.weight_bytes + self.data_bytes

    def least_time_s(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The roofline (Williams et al., CACM 2009): no machine of these rates is faster."""
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s)

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.data_bytes + other.data_bytes,
        )

    def __mul__(self, runs: int) -> Work:
        return Work(self.flops * runs, self.weight_bytes * runs, self.data_bytes * runs)


NOTHING = Work(0, 0, 0)


def vision(dims: PiDims, images: int = 1, matrix_bytes: int = _FLOAT32) -> Work:
    """One run of the vision network over `images` images.

    Args:
        dims: of the policy.
        images: in one run; 0 is no run.
        matrix_bytes: size of a number of the large matrices (2 in half precision).
    """
    if not images:
        return NOTHING
    d, out = dims.vision, dims.language.width
    patch = 3 * d.patch_size**2
    matrices = d.depth * (4 * d.width**2 + 2 * d.width * d.mlp_dim) + d.width * out
    biases = d.depth * (5 * d.width + d.mlp_dim) + out
    others = patch * d.width + d.width + d.tokens * d.width + (2 * d.depth + 1) * 2 * d.width
    products = d.tokens * (matrices + patch * d.width)
    attention = 2 * d.depth * d.tokens**2 * d.width
    data = 3 * d.image_size**2 + d.tokens * out
    return Work(
        flops=2 * images * (products + attention),
        weight_bytes=(matrices + biases) * matrix_bytes + others * _FLOAT32,
        data_bytes=images * data * _FLOAT32,
    )


def prefix(dims: PiDims, rows: int = 1, matrix_bytes: int = _FLOAT32) -> Work:
    """One run of the language prefill over R prompt rows; its last layer makes keys and values.

    Args:
        dims, matrix_bytes: as for `vision`.
        rows: R.
    """
    d, tokens = dims.language, dims.prefix_length
    layer, keys_values = _block(d), 2 * d.width * d.num_kv_heads * d.head_dim
    matrices = (d.depth - 1) * layer + keys_values
    attention = (d.depth - 1) * _attention(d, tokens, tokens)
    text = rows * dims.prompt_length * d.width
    norms = (2 * d.depth - 1) * d.width
    images = dims.cameras * dims.vision.tokens * d.width
    return Work(
        flops=2 * rows * (tokens * matrices + attention),
        weight_bytes=(matrices + text) * matrix_bytes + norms * _FLOAT32,
        data_bytes=images * _FLOAT32 + _past_bytes(dims, rows, matrix_bytes),
    )


def denoise_step(dims: PiDims, rows: int = 1, matrix_bytes: int = _FLOAT32) -> Work:
    """One run of the action expert over R prompt rows and the x that they share.

    Args:
        dims, rows, matrix_bytes: as for `prefix`.
    """
    d, actions = dims.expert, dims.horizon * dims.action_dim
    stateful = dims.state_dim > 0
    suffix = dims.horizon + stateful
    matrices = d.depth * _block(d)
    # x is one for all rows, and so is its embedding.
    embedding = dims.action_dim * d.width + (2 * d.width**2 if stateful else 0)
    state = dims.state_dim * d.width
    out = d.width * dims.action_dim
    products = rows * (suffix * matrices + state + dims.horizon * out) + dims.horizon * embedding
    attention = rows * d.depth * _attention(d, suffix, dims.prefix_length + suffix)
    biases = d.width + dims.action_dim + (2 * d.width if stateful else 0)
    # Norms: pi0's own weights; of pi0.5 a row of the time table.
    norms = (2 * d.depth + 1) * d.width * (1 if stateful else 3)
    conditioning = d.width if stateful else 0
    outputs = actions + rows * (actions + dims.state_dim)
    return Work(
        flops=2 * (products + attention),
        weight_bytes=matrices * matrix_bytes
        + (embedding + state + out + biases + (norms if stateful else 0)) * _FLOAT32,
        data_bytes=(actions + outputs + conditioning + (0 if stateful else norms)) * _FLOAT32
        + _past_bytes(dims, rows, matrix_bytes),
    )


def inference(
    dims: PiDims,
    *,
    steps: int,
    rows: int = 1,
    images: int | None = None,
    prefix_runs: int = 1,
    matrix_bytes: int = _FLOAT32,
) -> dict[str, Work]:
    """One chunk, phase by phase: `vision`, `prefix` and `denoise`.

    Args:
        dims, rows, matrix_bytes: as for `prefix`.
        steps: denoise steps.
        images: that have changed, each a run of its own; None is all cameras.
        prefix_runs: 0 when the prefix was found in the cache.
    """
    changed = dims.cameras if images is None else images
    return {
        'vision': vision(dims, 1, matrix_bytes) * changed,
        'prefix': prefix(dims, rows, matrix_bytes) * prefix_runs,
        'denoise': denoise_step(dims, rows, matrix_bytes) * steps,
    }


def _block(d: GemmaDims) -> int:
    """Matrix elements of a decoder block; as many multiply-adds a token."""
    queries, keys = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    return d.width * (2 * queries + 2 * keys + 3 * d.mlp_dim)


def _attention(d: GemmaDims, queries: int, keys: int) -> int:
    """Multiply-adds of scores and weighted values of one layer."""
    return 2 * d.num_heads * d.head_dim * queries * keys


def _past_bytes(dims: PiDims, rows: int, matrix_bytes: int) -> int:
    """Keys and values of R prefixes, with their mask."""
    d = dims.language
    numbers = 2 * d.depth * d.num_kv_heads * dims.prefix_length * d.head_dim
    return rows * (numbers * matrix_bytes + dims.prefix_length)

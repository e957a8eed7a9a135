"""Counts of operations and bytes: of a network's runs, and of a policy's phases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_FLOAT32 = 4


@dataclass(frozen=True)
class Work:
    """Work of one run of a network, or of several; `data_bytes` are all numbers but weights."""

    flops: int
    weight_bytes: int
    data_bytes: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.data_bytes

    def least_time_s(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Roofline (Williams et al., CACM 2009), seconds: no machine of these rates is faster."""
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s)

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.data_bytes + other.data_bytes,
        )

    def __mul__(self, runs: int) -> Work:
        return Work(self.flops * runs, self.weight_bytes * runs, self.data_bytes * runs)


@dataclass(frozen=True)
class NetworkCounts:
    """Counts of one run of one network.

    Attributes:
        matrices: count of weights that may be in reduced precision, read or not.
        looked_up: number of those in text tables that a run does not read.
        hosted: number of those in the text table whose rows engines get from the host.
        others: count of weights that stay float32.
        past: count of numbers handed from prefix to head in the matrices' precision.
        data_bytes: bytes of other inputs and outputs.
        packed: bytes of packed weights, four each.
    """

    flops: int
    matrices: int
    looked_up: int
    hosted: int
    others: int
    past: int
    data_bytes: int
    packed: int = 0

    def held_bytes(self, matrix_bytes: int) -> int:
        """Weights of this network in PyTorch, whole text tables included."""
        return self.matrices * matrix_bytes + self.others * _FLOAT32 + self.packed

    def work(self, matrix_bytes: int) -> Work:
        """Return the work of one run, with `matrix_bytes` per number of a matrix."""
        return Work(
            self.flops,
            self.held_bytes(matrix_bytes) - self.looked_up * matrix_bytes,
            self.past * matrix_bytes + self.data_bytes,
        )


@dataclass(frozen=True)
class PolicyCounts:
    """Counts of one policy's networks.

    Attributes:
        vision: counts of one image; the mean over the cameras where their images' sizes differ.
        prefix, step: counts by number of prompt rows; `step` of one run of the head.
        matrices, others, packed: all weights, as in `NetworkCounts`.
        widest: numbers that the widest operation of a prefix of one row reads and writes.
        passes: runs of the head for each step: those of an answer of a `tokens` head, else 1.
    """

    cameras: int
    vision: NetworkCounts
    prefix: Mapping[int, NetworkCounts]
    step: Mapping[int, NetworkCounts]
    matrices: int
    others: int
    widest: int
    packed: int = 0
    passes: int = 1

    def inference(
        self,
        *,
        steps: int,
        rows: int = 1,
        images: int | None = None,
        prefix_runs: int = 1,
        matrix_bytes: int = _FLOAT32,
    ) -> dict[str, Work]:
        """Return the work of one chunk by phase: `vision`, `prefix` and `denoise`.

        Args:
            images: number of changed images, one run each; None: all cameras.
            prefix_runs: 0 when the prefix was found in the cache.
            matrix_bytes: size of a number of the large matrices (2 in half precision).
        """
        changed = self.cameras if images is None else images
        return {
            'vision': self.vision.work(matrix_bytes) * changed,
            'prefix': self.prefix[rows].work(matrix_bytes) * prefix_runs,
            'denoise': self.step[rows].work(matrix_bytes) * (steps * self.passes),
        }

"""Operations and bytes of a policy's networks, counted by running them without numbers.

The networks run on PyTorch's `meta` device, so the counts are of the code that runs, in any family.
An export writes them into the bundle, for machines without PyTorch.

Counted are the operations of matrix products and attention (a multiply-add is two; padding is
computed like everything else, because shapes are static), and the bytes that must cross the memory
bus whatever the caches do: each weight once a run (whole, where only a part is read), what the
prefix hands to the head, inputs and outputs. Not counted are elementwise operations, norms and
softmax (below one percent), and activations between layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path

from vla_runtime.bundle.folder import Bundle
from vla_runtime.engines.onnx.files import ONNX_FOLDER
from vla_runtime.families.family import PolicyDims
from vla_runtime.files.json_file import JsonMapping, read_json

_FLOAT32 = 4
# In the bundle, beside the graphs.
_FILE = f'{ONNX_FOLDER}/operations.json'
# Prompt rows to count: without and with guidance.
_ROWS = (1, 2)


@dataclass(frozen=True)
class Work:
    """Work of one run of a network, or of several.

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
        flops: floating point operations.
        matrices: count of weights that may be in reduced precision, read or not.
        looked_up: number of those in text tables that a run does not read.
        hosted: number of those in the text table whose rows engines get from the host.
        others: count of weights that stay float32.
        past: count of numbers handed from prefix to head in the matrices' precision.
        data_bytes: bytes of other inputs and outputs.
    """

    flops: int
    matrices: int
    looked_up: int
    hosted: int
    others: int
    past: int
    data_bytes: int

    def held_bytes(self, matrix_bytes: int) -> int:
        """Weights of this network in PyTorch, whole text tables included."""
        return self.matrices * matrix_bytes + self.others * _FLOAT32

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
        cameras: number of cameras.
        vision: counts of one image; the mean over the cameras where their images' sizes differ.
        prefix, step: counts by number of prompt rows.
        matrices, others: all weights, as in `NetworkCounts`.
        widest: numbers that the widest operation of a prefix of one row reads and writes.
    """

    cameras: int
    vision: NetworkCounts
    prefix: Mapping[int, NetworkCounts]
    step: Mapping[int, NetworkCounts]
    matrices: int
    others: int
    widest: int

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
            steps: denoise steps.
            rows: R, prompt rows.
            images: number of changed images, one run each; None: all cameras.
            prefix_runs: 0 when the prefix was found in the cache.
            matrix_bytes: size of a number of the large matrices (2 in half precision).
        """
        changed = self.cameras if images is None else images
        return {
            'vision': self.vision.work(matrix_bytes) * changed,
            'prefix': self.prefix[rows].work(matrix_bytes) * prefix_runs,
            'denoise': self.step[rows].work(matrix_bytes) * steps,
        }


def counts_of(bundle: Bundle) -> PolicyCounts:
    """Read the counts that the export wrote into a bundle; without them, count.

    Raises:
        JsonError: counts that are damaged.
        ValueError: no counts, and PyTorch is not installed.
    """
    if _FILE in bundle.spec.files:
        return _read(read_json(bundle.folder / _FILE))
    return count_operations(bundle.spec.family, bundle.spec.dims)


def write_counts(folder: Path, counts: PolicyCounts) -> None:
    """Write counts into the folder of a bundle that is not sealed yet."""
    (folder / _FILE).write_text(json.dumps(asdict(counts), indent=1) + '\n', encoding='utf-8')


def _read(document: JsonMapping) -> PolicyCounts:
    def network(stated: JsonMapping) -> NetworkCounts:
        return NetworkCounts(
            **{item.name: stated.get(item.name, int) for item in fields(NetworkCounts)}
        )

    def by_rows(key: str) -> dict[int, NetworkCounts]:
        stated = document.mapping(key)
        return {rows: network(stated.mapping(str(rows))) for rows in _ROWS}

    return PolicyCounts(
        cameras=document.get('cameras', int),
        vision=network(document.mapping('vision')),
        prefix=by_rows('prefix'),
        step=by_rows('step'),
        matrices=document.get('matrices', int),
        others=document.get('others', int),
        widest=document.get('widest', int),
    )


@lru_cache(maxsize=32)
def count_operations(family: str, dims: PolicyDims) -> PolicyCounts:
    """Count a policy's networks.

    Args:
        family: name of the family.
        dims: dimensions of the policy.

    Raises:
        ValueError: PyTorch is not installed.
    """
    try:
        from vla_runtime.performance.meta_runs import MetaRuns
    except ImportError as error:
        raise ValueError(
            f'operations are counted by PyTorch, which cannot be imported here ({error}); run this '
            'where PyTorch is installed, or on a bundle with ONNX files, which has the counts'
        ) from None
    runs = MetaRuns(family, dims)
    matrices, others = runs.weights()
    return PolicyCounts(
        cameras=dims.cameras,
        vision=runs.vision(),
        prefix={rows: runs.prefix(rows) for rows in _ROWS},
        step={rows: runs.step(rows) for rows in _ROWS},
        matrices=matrices,
        others=others,
        widest=runs.widest(),
    )

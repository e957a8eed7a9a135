"""Operations and bytes of a policy's networks, counted by running them without numbers.

The networks run on PyTorch's `meta` device, so the counts are of the code that runs. An export
writes them into the bundle, for machines without PyTorch.

Counted are the operations of matrix products and attention (a multiply-add is two; padding is
computed too), and the bytes that must cross the memory bus whatever the caches do: each weight once
a run (whole, where only a part is read), what the prefix hands to the head, inputs and outputs. Not
counted are elementwise operations, norms and softmax (below one percent), and activations between
layers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path

from vla_runtime.bundle.folder import Bundle
from vla_runtime.bundle.onnx_files import ONNX_FOLDER
from vla_runtime.family.counts import NetworkCounts, PolicyCounts
from vla_runtime.family.declaration import PolicyDims
from vla_runtime.files.json_file import JsonMapping, read_json

# In the bundle, beside the graphs.
_FILE = f'{ONNX_FOLDER}/operations.json'
# Prompt rows to count: without and with guidance.
_ROWS = (1, 2)


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
    (folder / _FILE).write_text(json.dumps(asdict(counts), indent=1) + '\n', encoding='utf-8')


def _read(document: JsonMapping) -> PolicyCounts:
    def network(stated: JsonMapping) -> NetworkCounts:
        return NetworkCounts(
            # Counts of a bundle that an earlier vla_runtime made have none.
            packed=stated.get('packed', int, 0),
            **{
                item.name: stated.get(item.name, int)
                for item in fields(NetworkCounts)
                if item.name != 'packed'
            },
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
        packed=document.get('packed', int, 0),
        passes=document.get('passes', int, 1),
    )


@lru_cache(maxsize=32)
def count_operations(family: str, dims: PolicyDims) -> PolicyCounts:
    """Count a policy's networks; ValueError where PyTorch is not installed."""
    try:
        from vla_runtime.models.shapes.meta_runs import MetaRuns
    except ImportError as error:
        raise ValueError(
            f'operations are counted by PyTorch, which cannot be imported here ({error}); run this '
            'where PyTorch is installed, or on a bundle with ONNX files, which has the counts'
        ) from None
    runs = MetaRuns(family, dims)
    matrices, others, packed = runs.weights()
    return PolicyCounts(
        cameras=dims.cameras,
        vision=runs.vision(),
        prefix={rows: runs.prefix(rows) for rows in _ROWS},
        step={rows: runs.step(rows) for rows in _ROWS},
        matrices=matrices,
        others=others,
        widest=runs.widest(),
        packed=packed,
        passes=runs.passes(),
    )

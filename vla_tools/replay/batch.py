"""Many recordings, replayed in several processes or on a cluster, resumable, with one summary.

A result is written at once, under a name of all that it depends on: an interrupted command
resumes, and what changed or failed is replayed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from vla_runtime.files.atomic_write import write_text
from vla_runtime.files.json_file import LARGEST_RESULT, JsonError, read_json
from vla_runtime.files.machine import available_cores
from vla_runtime.processes.workers import Pool
from vla_tools.replay.units import Json, Unit, run_unit

SUMMARY = 'summary.json'
_COUNTS = ('inferences', 'replayed', 'compared', 'identical', 'predictions')


def run_batch(units: Sequence[Unit], folder: Path, pool: Pool) -> Iterator[tuple[Unit, Json]]:
    """Yield every unit with its result, existing ones first.

    `folder` must exist; the pool is opened only if a result is missing. Raises ChildProcessError:
    a process was killed (results so far are kept); ClusterError: unusable cluster; WriteError.
    """
    missing: list[tuple[Unit, Path]] = []
    for unit in units:
        path = folder / f'{unit.name}.json'
        result = _read(path)
        if result is None:
            missing.append((unit, path))
        else:
            yield unit, result
    if not missing:
        return
    with pool() as submit:
        futures = {submit(run_unit, unit): (unit, path) for unit, path in missing}
        for future in as_completed(futures):
            unit, path = futures[future]
            result = future.result()
            write_text(path, json.dumps(result) + '\n')
            yield unit, result


def cores(threads: int) -> int:
    """Number of processes that run at once on this machine, each with so many threads."""
    return max(1, available_cores() // max(1, threads))


def totals(results: Sequence[Json]) -> Json:
    """Return the totals over many recordings."""
    usable = [result for result in results if 'error' not in result]
    return {
        'recordings': len(results),
        'failed': len(results) - len(usable),
        **{
            name: sum(result[name] for result in usable)
            for name in _COUNTS
            if any(name in result for result in usable)
        },
        'joints': _by_joint(usable),
    }


def _by_joint(results: Sequence[Json]) -> dict[str, dict[str, float | str]]:
    """Mean and largest error of each joint over all recordings that have it."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    for result in results:
        weight = result.get('compared', result.get('predictions', 0))
        if not weight:
            continue
        for column, name in enumerate(result['joints']):
            mean = _known(row[column] for row in result['mean_error_by_step'])
            largest = _known(row[column] for row in result['largest_error_by_step'])
            if mean:
                found.setdefault(name, []).append(
                    (sum(mean) / len(mean), max(largest), result['units'][column])
                )
    return {
        name: {
            'unit': values[0][2],
            'mean_error': sum(mean for mean, _, _ in values) / len(values),
            'largest_error': max(largest for _, largest, _ in values),
        }
        for name, values in sorted(found.items())
    }


def _known(values: Any) -> list[float]:
    return [value for value in values if value is not None]


def lines(results: Sequence[Json]) -> list[str]:
    """Lines of text: one per recording, and the totals."""
    shown = [_line(result) for result in results]
    total = totals(results)
    counts = ', '.join(f'{name} {value}' for name, value in total.items() if name != 'joints')
    shown += ['', counts]
    wide = max([20, *map(len, total['joints'])])
    for name, values in total['joints'].items():
        if not values['largest_error']:
            continue
        shown.append(
            f'  {name:<{wide}} {values["unit"]:<8} mean error {values["mean_error"]:.3g}, largest '
            f'{values["largest_error"]:.3g}'
        )
    return shown


def _line(result: Json) -> str:
    name = result['recording']
    if 'error' in result:
        return f'{name}: {result["error"]}'
    if 'predictions' in result:
        return f'{name}: {result["predictions"]} predictions'
    text = (
        f'{name}: replayed {result["replayed"]} of {result["inferences"]}, compared '
        f'{result["compared"]}, bit-identical {result["identical"]}'
    )
    for word, field in (('skipped', 'skipped'), ('noted', 'notes')):
        counts = result[field]
        if counts:
            text += f', {word} {sum(counts.values())}: {max(counts, key=counts.get)}'
    return text + (f'; problems: {"; ".join(result["problems"])}' if result['problems'] else '')


def write_summary(path: Path, results: Sequence[Json]) -> None:
    """Write all results and their totals, in the order of the recordings (WriteError)."""
    ordered = sorted(results, key=lambda result: result['recording'])
    document = {'total': totals(ordered), 'recordings': ordered}
    write_text(path, json.dumps(document, indent=1) + '\n')


def _read(path: Path) -> Json | None:
    try:
        result = dict(read_json(path, LARGEST_RESULT).values)
    except JsonError:
        return None
    # What failed for want of a bundle, a package or memory may be there now.
    is_whole = result.get('compared') or result.get('predictions')
    return result if 'recording' in result and 'error' not in result and is_whole else None

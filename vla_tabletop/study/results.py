"""A study's results on disk: JSON with everything that matters, CSV with a row a condition."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vla_runtime import __version__
from vla_runtime.files.atomic_write import write_text
from vla_runtime.files.json_file import LARGEST_RESULT, JsonError, read_json
from vla_tabletop.sim.gl import mujoco
from vla_tabletop.sim.success_rate import SuccessRate
from vla_tabletop.study.catalogue import Study
from vla_tabletop.study.condition import Condition, value_text, varied_fields
from vla_tabletop.study.episode import EpisodeResult
from vla_tabletop.study.statistics import (
    MEANS,
    Mean,
    Summary,
    by_family,
    compare,
    summarise,
)

Json = dict[str, Any]

# What `study_record` writes.
_RECORD = (
    *('study', 'title', 'question', 'x', 'varied', 'command', 'bundle', 'bundle_sha256', 'seeds'),
    *('versions', 'machine', 'same', 'conditions'),
)


@dataclass(frozen=True)
class Provenance:
    """Provenance of results: the command that repeats them, and what it ran.

    `bundle`: policies, separated by a semicolon; `bundle_sha256`: `bundle_identity` of each,
    separated by a space; `seeds`: first, and one after the last; `code`: `code_version`;
    `source_sha256`: `source_digest`.
    """

    command: str
    bundle: str
    bundle_sha256: str
    seeds: tuple[int, int]
    code: str
    source_sha256: str


def study_record(
    study: Study, provenance: Provenance, results: Mapping[Condition, Sequence[EpisodeResult]]
) -> Json:
    """A study as plain data; what cannot be measured is None."""
    varied = varied_fields(study.conditions)
    return {
        'study': study.name,
        'title': study.title,
        'question': study.question,
        'x': study.x,
        'varied': list(varied),
        **asdict(provenance),
        'versions': {
            'vla_runtime': __version__,
            'python': platform.python_version(),
            'mujoco': mujoco.__version__,
            **{name: metadata.version(name) for name in ('numpy', 'torch')},
            **_backend_versions(study.conditions),
            **({'metaworld': metadata.version('metaworld')} if study.world == 'metaworld' else {}),
        },
        'machine': f'{platform.system()} {platform.machine()}, {os.cpu_count()} cores; simulated '
        'clock, so its speed makes no difference; another CPU or PyTorch rounds in another way, so '
        'single trajectories differ there while rates stay within their intervals',
        'same': [_same_record(pair, varied, results) for pair in study.same],
        'conditions': [
            _condition_record(condition, varied, results, study) for condition in study.conditions
        ],
    }


def _backend_versions(conditions: Sequence[Condition]) -> Json:
    """Return the version of a backend beside PyTorch, where one ran the policy."""
    if not any(c.chunk_source == 'policy' and c.backend == 'onnxruntime' for c in conditions):
        return {}
    import onnxruntime

    # Not from the metadata: its distribution may be onnxruntime-gpu.
    return {'onnxruntime': onnxruntime.__version__}


def _same_record(
    pair: tuple[Condition, Condition],
    varied: Sequence[str],
    results: Mapping[Condition, Sequence[EpisodeResult]],
) -> Json:
    """Count equal trajectories of two conditions; all of them should be equal."""
    first, second = (results[condition] for condition in pair)
    equal = [
        a.trajectory == b.trajectory != '' and a.seed == b.seed
        for a, b in zip(first, second, strict=True)
    ]
    return {
        'labels': [_label(condition, varied) for condition in pair],
        'equal': sum(equal),
        'of': len(equal),
    }


def _label(condition: Condition, varied: Sequence[str]) -> dict[str, str]:
    return {name: value_text(name, getattr(condition, name)) for name in varied}


def _condition_record(
    condition: Condition,
    varied: Sequence[str],
    results: Mapping[Condition, Sequence[EpisodeResult]],
    study: Study,
) -> Json:
    episodes, reference = results[condition], study.reference_of(condition)
    groups = {name: summary_record(summarise(g)) for name, g in by_family(episodes).items()}
    versus = None
    if reference is not None and condition != reference:
        versus = asdict(compare(episodes, results[reference]))
    return {
        'label': _label(condition, varied),
        'settings': asdict(condition),
        'groups': groups,
        'versus_reference': versus,
        'is_reference': condition == reference,
        'episodes': [
            [e.seed, e.family, e.outcome, e.touched, e.meant, round(e.steps, 1), e.trajectory]
            for e in episodes
        ],
    }


def summary_record(summary: Summary) -> Json:
    return {
        'episodes': summary.success.episodes,
        'success': _rate(summary.success),
        'obeyed': _rate(summary.obeyed),
        'wrong_block': summary.wrong_block,
        'timeout': summary.timeout,
        'refused': summary.refused,
        'halted': summary.halted,
        'cache_use': asdict(summary.cache_use),
        **{name: _mean(getattr(summary, name)) for name in MEANS},
    }


def _rate(rate: SuccessRate) -> Json:
    low, high = rate.interval()
    return {'count': rate.successes, 'rate': rate.rate, 'low': low, 'high': high}


def _mean(mean: Mean) -> Json:
    return {name: value if math.isfinite(value) else None for name, value in asdict(mean).items()}


def write_study(folder: Path, record: Json) -> list[Path]:
    """Write study_NAME.json and study_NAME.csv; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f'study_{record["study"]}'
    json_path, csv_path = stem.with_suffix('.json'), stem.with_suffix('.csv')
    # A line a condition: a file that can be read, and compared with the last one.
    head = {name: value for name, value in record.items() if name != 'conditions'}
    lines = ',\n'.join(json.dumps(condition) for condition in record['conditions'])
    text = json.dumps(head, indent=2)[:-2] + ',\n  "conditions": [\n' + lines + '\n  ]\n}\n'
    write_text(json_path, text)
    rows = [row for condition in record['conditions'] for row in _csv_rows(record, condition)]
    table = io.StringIO()
    writer = csv.DictWriter(table, fieldnames=list(rows[0]), lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
    write_text(csv_path, table.getvalue())
    return [json_path, csv_path]


def _csv_rows(record: Json, condition: Json) -> list[Json]:
    rows = []
    for group, summary in condition['groups'].items():
        row = {name: condition['label'][name] for name in record['varied']}
        row |= {'family': group, 'episodes': summary['episodes']}
        for name in ('success', 'obeyed'):
            rate = summary[name]
            row[f'{name}_count'] = rate['count']
            for part in ('rate', 'low', 'high'):
                row[f'{name}_{part}'] = f'{rate[part]:.4f}'
        row |= {name: summary[name] for name in ('wrong_block', 'timeout', 'refused', 'halted')}
        row |= summary['cache_use']
        for name in MEANS:
            for part in ('value', 'low', 'high'):
                value = summary[name][part]
                row[f'{name}_{part}'] = '' if value is None else f'{value:.6g}'
        versus = (
            condition['versus_reference']
            if group == 'all' or len(condition['groups']) == 1
            else None
        )
        for name in ('won', 'lost', 'p', 'low', 'high'):
            row[f'versus_reference_{name}'] = '' if versus is None else f'{versus[name]:.4g}'
        rows.append(row)
    return rows


def read_studies(folder: Path) -> list[Json]:
    """Every study_*.json of a folder; ValueError: names one that is no study's result."""
    return [_read_study(path) for path in sorted(folder.glob('study_*.json'))]


def _read_study(path: Path) -> Json:
    try:
        study = read_json(path, LARGEST_RESULT)
        missing = [key for key in _RECORD if key not in study]
        if missing:
            raise study.error(missing[0], 'is missing')
        for condition in study.mappings('conditions'):
            condition.mapping('label')
            condition.mapping('groups')
    except JsonError as error:
        raise ValueError(
            f'{error}; every study_*.json here is shown in study.html: move it elsewhere'
        ) from None
    return dict(study.values)

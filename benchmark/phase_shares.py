"""Shares of vision, prefix and denoise loop in a miss of every published size, on paper, beside
those that others measured and published.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from parts.measurement import write_result

from vla_runtime.families.operation_counts import count_operations
from vla_runtime.family.declaration import with_cameras
from vla_runtime.family.listing import find_family, performance_figures, preset, preset_names
from vla_tools.performance.devices import DEVICES
from vla_tools.performance.roofline import miss_shares, phase_floors, published_rates

_DEVICES = ('orin-nano', 'agx-orin', 'rtx-3060', 'rtx-5070', 'rtx-5090')


def shares(model: str, views: int, precision: str) -> dict[str, Any]:
    """Return one published size with that many cameras, all changed, on every device."""
    found = preset(model)
    assert found is not None
    family, dims = found
    counts = count_operations(family, with_cameras(dims, views))
    steps = find_family(family).denoise_steps
    devices: dict[str, Any] = {}
    for device in _DEVICES:
        floors = phase_floors(
            counts,
            published_rates(DEVICES[device], precision),
            precision=precision,
            rows=1,
            steps=steps,
            views=views,
        )
        devices[device] = {
            'least_ms': floors['miss'].milliseconds,
            'least': miss_shares(floors, views),
            'measured_by_others': [
                {
                    'runtime': run.runtime,
                    'ms': run.total_ms,
                    'vision': run.vision_ms / run.total_ms,
                    'source': run.source,
                }
                for run in performance_figures(model).runs_on(device)
            ],
        }
    return {'views': views, 'steps': steps, 'devices': devices}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--views', type=int, default=2, help='default: 2')
    parser.add_argument('--precision', default='bfloat16', help='default: bfloat16')
    parser.add_argument('--json', type=Path, help='write here instead of to benchmark/results/')
    arguments = parser.parse_args()
    figures = {name: shares(name, arguments.views, arguments.precision) for name in preset_names()}
    for model, one in figures.items():
        for device, found in one['devices'].items():
            parts = '  '.join(f'{phase} {share:4.0%}' for phase, share in found['least'].items())
            others = ', '.join(
                f'{run["runtime"]} {run["ms"]:.0f} ms, vision {run["vision"]:.0%}'
                for run in found['measured_by_others']
            )
            print(f'{model:10} {device:10} {found["least_ms"]:8.1f} ms  {parts}  {others}')
    print(write_result('phase_shares', figures, ('torch', 'numpy'), arguments.json).name)


if __name__ == '__main__':
    main()

"""Power mode, clocks and temperatures: what the kernel and nvpmodel say, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_tools.cli.bench import _power_lines
from vla_tools.performance import device_rates
from vla_tools.performance.device_rates import power_state

GPU = 'class/devfreq/17000000.gpu'
CORES = 'devices/system/cpu/cpufreq/policy0'


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """Write files of a /sys of its own; no nvpmodel on PATH."""
    tree = tmp_path / 'sys'
    tree.mkdir()
    monkeypatch.setattr(device_rates, '_SYS', tree)
    monkeypatch.setenv('PATH', str(tmp_path / 'bin'))

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text)

    return write


def make_nvpmodel(tmp_path: Path, script: str) -> None:
    tool = tmp_path / 'bin' / 'nvpmodel'
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\n{script}\n')
    tool.chmod(0o755)


def test_a_jetson_says_mode_clocks_and_temperatures(kernel, tmp_path):
    make_nvpmodel(tmp_path, 'echo "NV Power Mode: MAXN_SUPER"; echo 2')
    kernel(
        {
            f'{GPU}/cur_freq': '1020000000\n',
            f'{GPU}/min_freq': '306000000\n',
            f'{GPU}/max_freq': '1020000000\n',
            f'{CORES}/scaling_cur_freq': '1728000\n',
            f'{CORES}/scaling_max_freq': '1728000\n',
            'class/thermal/thermal_zone0/type': 'cpu-thermal\n',
            'class/thermal/thermal_zone0/temp': '48500\n',
            'class/thermal/thermal_zone1/type': 'gpu-thermal\n',
            'class/thermal/thermal_zone1/temp': '51250\n',
        }
    )
    found = power_state()
    assert found == {
        'power_mode': 'MAXN_SUPER 2',
        'clocks': {
            '17000000.gpu': {'now_mhz': 1020, 'least_mhz': 306, 'most_mhz': 1020},
            'policy0': {'now_mhz': 1728, 'most_mhz': 1728},
        },
        'celsius': {'cpu-thermal': 48.5, 'gpu-thermal': 51.25},
    }
    assert _power_lines({'before': found, 'after': found}) == [
        'power mode: MAXN_SUPER 2',
        'clocks after it: 17000000.gpu 1020 MHz of 1020, policy0 1728 MHz of 1728',
        'hottest: gpu-thermal 51 °C before, gpu-thermal 51 °C after',
    ]


def test_what_is_not_there_or_cannot_be_read_is_left_out(kernel, tmp_path):
    assert power_state() == {}
    make_nvpmodel(tmp_path, 'exit 1')
    kernel(
        {
            f'{GPU}/cur_freq': '',
            'class/thermal/thermal_zone0/type': 'cv0-thermal\n',
            'class/thermal/thermal_zone0/temp': 'off\n',
            'class/thermal/thermal_zone1/temp': '40000\n',
        }
    )
    assert power_state() == {}
    assert _power_lines({'before': {}, 'after': {}}) == []

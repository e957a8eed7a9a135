"""An inference on a CPU by turns: PyTorch's plain modules, the fused ones, and ONNX Runtime.

Each kind runs once a round on the same images, in one process, on one thread. CPU time is written
beside wall time: on a machine that others use too, it alone says what an inference costs.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from unittest import mock

import numpy as np
from measurement import percentiles, write_result
from mid_size import write_mid_size

from vla_runtime.engines.onnx.files import graph_path
from vla_runtime.families.flow_network import FlowNetwork
from vla_runtime.families.pi.flow_policy import PiNetwork
from vla_runtime.performance.bench import look
from vla_runtime.policy import Policy

PACKAGES = ('torch', 'onnxruntime', 'numpy', 'opencv-python-headless')
_IMAGE = (480, 640, 3)
_WARM_UP = 2


def load_policies(bundle: Path, precision: str) -> dict[str, Policy]:
    """The same policy in every way that it can run here."""
    policies = {'fused': Policy.load(bundle, 'torch', precision=precision, threads=1)}
    with mock.patch.object(PiNetwork, 'fused', FlowNetwork.fused):
        policies['plain'] = Policy.load(bundle, 'torch', precision=precision, threads=1)
    if graph_path(bundle, 'vision').is_file() and precision == 'float32':
        policies['onnxruntime'] = Policy.load(bundle, 'onnxruntime', threads=1)
    return policies


def measure(policies: dict[str, Policy], rounds: int) -> dict[str, Any]:
    """Milliseconds of a miss and of a hit, by kind, and how far the chunks are apart."""
    random = np.random.default_rng(0)
    spec = policies['plain'].spec
    found: dict[str, dict[str, list[float]]] = {name: {} for name in policies}
    apart = dict.fromkeys(policies, 0.0)
    for round_ in range(rounds + _WARM_UP):
        images: dict[str, np.ndarray | None] = {
            name: random.integers(0, 256, _IMAGE, dtype=np.uint8) for name in spec.camera_names
        }
        chunks = {}
        for name, policy in policies.items():
            for case in ('miss', 'hit'):
                wall, cpu = perf_counter(), process_time()
                chunk, _ = policy.infer(look(spec, images), number=round_)
                times = {'wall': perf_counter() - wall, 'cpu': process_time() - cpu}
                chunks[name] = chunk.actions
                if round_ >= _WARM_UP:
                    for clock, seconds in times.items():
                        found[name].setdefault(f'{case}_{clock}', []).append(seconds * 1e3)
        for name, actions in chunks.items():
            apart[name] = max(apart[name], float(np.abs(actions - chunks['plain']).max()))
    return {
        name: {
            **{case: {**percentiles(values), 'min': min(values)} for case, values in cases.items()},
            'largest_difference_from_plain': apart[name],
        }
        for name, cases in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('bundle', type=Path, nargs='?', help='default: the mid-size policy')
    parser.add_argument('--rounds', type=int, default=30)
    parser.add_argument('--precision', default='float32', choices=('float32', 'bfloat16'))
    parser.add_argument('--json', type=Path, help='write here instead of to benchmark/results/')
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = arguments.bundle or write_mid_size(Path(folder) / 'bundle')
        figures = measure(load_policies(bundle, arguments.precision), arguments.rounds)
    for name, cases in figures.items():
        print(
            name, {case: round(v['median'], 2) for case, v in cases.items() if isinstance(v, dict)}
        )
    print(write_result('cpu_paths', {'milliseconds': figures}, PACKAGES, arguments.json))


if __name__ == '__main__':
    main()

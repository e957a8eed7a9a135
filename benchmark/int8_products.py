"""Signed against unsigned inputs of int8 products, by turns in ONNX Runtime on a CPU, one thread.

Files in int8 have signed inputs with zero point 0, all that TensorRT multiplies. The other form, of
ONNX Runtime's own quantiser, is unsigned with a zero point: its 256 steps cover an uneven range
without waste. Both are made of the same ranges and the same matrices: what does one form for both
runtimes cost? Errors are those of chunks against PyTorch's in float32, on observations that were
not calibrated on. Processor time is compared round by round; other work on the machine slows both.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import mid_size
import numpy as np
import onnx
from measurement import in_turn, median_ratio, percentiles, write_result
from onnx import TensorProto, numpy_helper

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import ONNX_FOLDER, ROWS, engine_graphs
from vla_runtime.export.onnx.bundle import export_bundle
from vla_runtime.export.onnx.calibration import calibration_cases
from vla_runtime.export.onnx.eight_bits import EightBits
from vla_runtime.export.onnx.export import write_onnx
from vla_runtime.export.onnx.quantised import measured_ranges
from vla_runtime.export.onnx.quantised_products import Range
from vla_runtime.policy import Policy
from vla_runtime.types import Observation
from vla_tabletop.study.calibration import demo_observations

PACKAGES = ('torch', 'onnxruntime', 'numpy')
_DEMO = Path(__file__).parents[1] / 'engines' / 'demo'
_WARM_UP = 2
# Of the observations every second one is calibrated on, the others are compared on.
_MID_SIZE_LOOKS = 64


def load_policies(
    source: Path, observations: Sequence[Observation], folder: Path
) -> dict[str, Policy]:
    """Export in both forms to `folder`; load them and what they are compared with."""
    bundle = export_bundle(read_bundle(source), folder / 'float32', 'float32')
    cases = calibration_cases(bundle, observations).seen
    ranges = measured_ranges(bundle.folder, bundle.spec, cases)
    signed, unsigned = folder / 'signed', folder / 'unsigned'
    shutil.copytree(bundle.folder, signed)
    (signed / ONNX_FOLDER).rename(signed / 'others')
    write_onnx(signed, bundle.spec, 'int8', quantised=EightBits(ranges, 'float32'))
    # The bundle lists them.
    for path in (signed / 'others').iterdir():
        if not (signed / ONNX_FOLDER / path.name).exists():
            path.rename(signed / ONNX_FOLDER / path.name)
    shutil.rmtree(signed / 'others')
    shutil.copytree(signed, unsigned)
    for name in engine_graphs(ROWS):
        make_unsigned(unsigned / ONNX_FOLDER / name, ranges)
    placed = {'threads': 1, 'verify': False}
    return {
        'torch float32': Policy.load(bundle.folder, 'torch', precision='float32', **placed),
        'onnxruntime float32': Policy.load(
            bundle.folder, 'onnxruntime', precision='float32', **placed
        ),
        'unsigned': Policy.load(unsigned, 'onnxruntime', precision='int8', **placed),
        'signed': Policy.load(signed, 'onnxruntime', precision='int8', **placed),
    }


def make_unsigned(path: Path, ranges: Mapping[str, Range]) -> None:
    """Give the inputs of a graph's int8 products 256 unsigned steps over their own ranges."""
    model = onnx.load(path, load_external_data=False)
    made = {node.output[0]: node for node in model.graph.node}
    for product in model.graph.node:
        if product.op_type != 'MatMul':
            continue
        widening, matrix = (made.get(name) for name in product.input)
        if widening is None or matrix is None or matrix.op_type != 'DequantizeLinear':
            continue
        name = matrix.input[0].removesuffix('/int8')
        # Zero must be one of the steps.
        low, high = min(ranges[name][0], 0.0), max(ranges[name][1], 0.0)
        scale = np.float32((high - low) / 255 or 1.0)
        zero = np.uint8(np.clip(np.round(-low / scale), 0, 255))
        for index, value in ((1, scale), (2, zero)):
            constant = numpy_helper.from_array(np.array(value), f'unsigned/{index}/{name}')
            model.graph.initializer.append(constant)
            for node in (made[widening.input[0]], widening):
                node.input[index] = constant.name
    assert any(item.data_type == TensorProto.UINT8 for item in model.graph.initializer)
    onnx.save_model(model, path)


def measure(
    policies: Mapping[str, Policy], observations: Sequence[Observation], rounds: int
) -> dict[str, Any]:
    """Milliseconds and errors by kind, and the time of signed inputs as a part of the others'."""
    names = list(policies)
    times: dict[str, list[float]] = {name: [] for name in names}
    errors: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for round_ in range(rounds + _WARM_UP):
        seen = observations[round_ % len(observations)]
        chunks = {}
        for name in in_turn(names, round_):
            policies[name].reset()
            start = process_time()
            chunk, _ = policies[name].infer(seen, number=round_)
            if round_ >= _WARM_UP:
                times[name].append((process_time() - start) * 1e3)
            chunks[name] = chunk.normalised
        for name in names:
            errors[name].append(np.abs(chunks[name] - chunks['torch float32']))
    return {
        'rounds': rounds,
        'cpu_ms': {
            name: {**percentiles(values), 'min': min(values)} for name, values in times.items()
        },
        'signed_of_unsigned': median_ratio(times['signed'], times['unsigned']),
        'chunk_error': {
            name: {
                'mean': float(np.mean(errors[name])),
                'median_of_largest': float(np.median([one.max() for one in errors[name]])),
                'largest': float(np.max(errors[name])),
            }
            for name in names
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--rounds', type=int, default=40)
    parser.add_argument('--policies', nargs='+', default=['demo', 'mid_size'])
    parser.add_argument('--json', type=Path, help='write here instead of to benchmark/results/')
    arguments = parser.parse_args()
    figures = {}
    for name in arguments.policies:
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work)
            if name == 'demo':
                source, looks = _DEMO, demo_observations(_DEMO)
            else:
                source = mid_size.write_mid_size(folder / 'bundle')
                looks = [mid_size.look(seed) for seed in range(_MID_SIZE_LOOKS)]
            policies = load_policies(source, looks[::2], folder)
            figures[name] = measure(policies, looks[1::2], arguments.rounds)
            for policy in policies.values():
                policy.close()
        print(name, figures[name])
    print(write_result('int8_products', figures, PACKAGES, arguments.json))


if __name__ == '__main__':
    main()

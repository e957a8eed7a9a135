"""Builds and measures a pi0.5 with TensorRT on a GPU machine.

    python benchmark/gpu_tensorrt.py prepare KIT [--precision int8]   here: torch, onnxruntime
    python benchmark/gpu_tensorrt.py run KIT [--json OUT]             there: tensorrt, cuda-bindings

By default its widths are the published ones and it has two layers. `prepare --size full` makes the
published policy with three cameras, on the GPU machine itself, and times it in PyTorch there.

`prepare` writes our ONNX graphs, inputs and ONNX Runtime's outputs, a few megabytes (remove
KIT/onnx/weights.data before carrying it: the weights are drawn again there; those in int8 have to
travel). `run` needs tensorrt, cuda-bindings and numpy (on a terminal tqdm) and no install: it
builds the engines, compares each with ONNX Runtime's outputs, captures the graphs, compares whole
chunks of one and two prompt rows, and times them with and without graphs.

Exit code: 0, 1 where a check failed, 2 where it cannot run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'benchmark')]

from parts.tensorrt_kit import ROWS, SIZES, STEPS, Kit, expert_inputs, prepare, restore  # noqa: E402

from vla_convert.export.tensorrt.build import build_engines, plan_build  # noqa: E402
from vla_runtime.bundle.onnx_files import TEXT_INPUT  # noqa: E402
from vla_runtime.engines.cuda_driver import CudaError  # noqa: E402
from vla_runtime.engines.cuda_runtime import CudaRuntime  # noqa: E402
from vla_runtime.engines.preflight import check_backend  # noqa: E402
from vla_runtime.engines.tensorrt.adapter import Network, TensorRT, TensorRTError, import_tensorrt  # noqa: E402
from vla_runtime.engines.tensorrt.buffers import DeviceArray  # noqa: E402
from vla_runtime.engines.tensorrt.engine import TensorRTEngine  # noqa: E402
from vla_runtime.engines.tensorrt.loading import load_networks  # noqa: E402
from vla_runtime.engines.tensorrt.store import ENGINES, Metadata, network_name  # noqa: E402
from vla_runtime.engines.token_embedding import TokenEmbedding  # noqa: E402
from vla_runtime.family.listing import find_family  # noqa: E402

PACKAGES = ['tensorrt', 'cuda-python', 'cuda-bindings', 'numpy']
# Largest error as a share of the largest number of the reference. In float16 ONNX Runtime's CPU
# kernels and TensorRT's add in another order and round in other places. The reference of bfloat16
# is of float32 files, and the bound that of receipts; that of int8 has the same products in 8 bits
# and float32 where the engines have bfloat16, so its bound is that of bfloat16.
BOUNDS = {'float32': 1e-3, 'float16': 2e-2, 'bfloat16': 8e-2, 'int8': 8e-2}
REPEATS = 50


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare or run; see the module's docstring for the exit code."""
    arguments = _arguments(argv)
    try:
        if arguments.verb == 'prepare':
            prepare(arguments.kit, arguments.size, arguments.precision)
            print(f'wrote {arguments.kit}')
            return 0
        # The driver is asked first: TensorRT takes seconds to import.
        check_backend('tensorrt', 'cuda')
        adapter = import_tensorrt()
        runtime = CudaRuntime(0)
        figures = measure(restore(arguments.kit), adapter, runtime, arguments.repeats)
    except (ValueError, OSError, CudaError, TensorRTError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    show(figures)
    if arguments.json:
        from parts.measurement import write_result

        print('wrote', write_result('gpu_tensorrt', figures, PACKAGES, arguments.json))
    return 0 if all(check['passed'] for check in figures['checks'].values()) else 1


def measure(kit: Kit, adapter: TensorRT, runtime: CudaRuntime, repeats: int) -> dict[str, Any]:
    """Build, compare and time; everything in a table of plain numbers."""
    print(f'{runtime.info.name}, TensorRT {adapter.version}: building ...', flush=True)
    plan = plan_build(kit.folder, adapter, runtime, rows=max(ROWS), force=True)
    metadata = build_engines(
        plan,
        adapter,
        runtime,
        captures=3,
        report=lambda name, entry: print(f'  {name}: {entry.seconds:.0f} s', flush=True),
    )
    adapter.free_builder()
    networks = load_networks(adapter, runtime, plan.folder, metadata, max(ROWS), kit.folder)
    bound = BOUNDS[kit.precision]
    checks = {
        name: _check(error, bound) for name, error in compare_networks(kit, runtime, networks)
    }
    latency: dict[str, Any] = {}
    status: dict[str, Any] = {}
    for mode, captures in (('graphs', 3), ('plain', 0)):
        for network in networks.values():
            network.close()
        own = CudaRuntime(runtime.index, runtime.module)
        networks = load_networks(adapter, own, plan.folder, metadata, max(ROWS), kit.folder)
        engine = TensorRTEngine(
            find_family('pi05'),
            kit.dims,
            own,
            networks,
            PreparedTable(kit.reference['time_table']),
            max_rows=max(ROWS),
            captures=captures,
            token_embedding=PreparedText(kit.reference),
        )
        engine.prepare(STEPS)
        status[mode] = dict(engine.cuda_graph)
        for rows in ROWS:
            chunk = run_chunk(engine, kit, rows)
            error = _error(chunk, kit.reference[f'chunk_r{rows}'])
            checks[f'chunk of {rows} row(s), {mode}'] = _check(error, bound)
            latency[f'{mode}, {rows} row(s)'] = time_phases(engine, kit, rows, repeats)
        engine.close()
    captured = {'passed': set(status['graphs'].values()) == {'captured'}, 'error': 0.0, 'bound': 0}
    return {
        'device': {**vars(runtime.info), 'tensorrt': adapter.version},
        'precision': kit.precision,
        'engines': _engine_figures(metadata),
        'checks': {**checks, 'all graphs captured': captured},
        'cuda_graph': status,
        'latency_ms': latency,
        'pytorch': kit.pytorch,
    }


def compare_networks(
    kit: Kit, runtime: CudaRuntime, networks: Mapping[str, Network]
) -> list[tuple[str, float]]:
    """The error of every network alone, on ONNX Runtime's inputs."""
    reference, found = kit.reference, []
    for rows in ROWS:
        vision, prefix, expert = (network_name(name, rows) for name in ENGINES)
        past = {name: reference[f'{name}_r{rows}'] for name in ('past_key', 'past_value')}
        inputs = {
            'image_tokens': reference['image_tokens'],
            'image_mask': reference['image_mask'],
            TEXT_INPUT: reference[f'{TEXT_INPUT}_r{rows}'],
            'token_mask': reference[f'token_mask_r{rows}'],
        }
        images = kit.dims.cameras * kit.dims.vision.tokens
        valid = np.repeat(reference['image_mask'], images // kit.dims.cameras)[None]
        mask = np.concatenate(
            [np.repeat(valid, rows, axis=0), reference[f'token_mask_r{rows}']], axis=1
        )
        step = {**past, 'prefix_mask': mask, **expert_inputs(reference, rows)}
        if rows == ROWS[0]:
            tokens = [
                run_network(runtime, networks[vision], {'pixels': pixels[None]})['image_tokens']
                for pixels in reference['pixels']
            ]
            error = _error(np.concatenate(tokens), reference['image_tokens'])
            found.append(('vision: image_tokens', error))
        outputs = run_network(runtime, networks[prefix], inputs)
        for name, value in past.items():
            # Entries at padded places mean nothing.
            seen = mask[None, :, None, :, None]
            found.append((f'{prefix}: {name}', _error(outputs[name] * seen, value * seen)))
        outputs = run_network(runtime, networks[expert], step)
        error = _error(outputs['velocity'], reference[f'velocity_r{rows}'])
        found.append((f'{expert}: velocity', error))
    return found


def run_network(
    runtime: CudaRuntime, network: Network, inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Run one engine once on buffers of its own."""
    arrays = {name: DeviceArray.of(runtime, info) for name, info in network.tensors.items()}
    scratch = runtime.allocate(network.scratch_bytes)
    network.use_scratch(scratch, network.scratch_bytes)
    for name, value in inputs.items():
        arrays[name].write(value)
    network.bind({name: array.address for name, array in arrays.items()})
    network.enqueue(runtime.stream)
    outputs = {
        name: arrays[name].read() for name, info in network.tensors.items() if not info.is_input
    }
    for array in arrays.values():
        array.free()
    runtime.free(scratch)
    return outputs


class PreparedTable:
    """The kit's time table: its only schedule's, made where the weights were."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows
        self.width = int(rows.shape[1])

    def __call__(self, times: np.ndarray) -> np.ndarray:
        return self._rows


class PreparedText(TokenEmbedding):
    """The kit's rows of the text table, looked up where the weights were."""

    def __init__(self, reference: Mapping[str, np.ndarray]) -> None:
        self._reference = reference

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        return self._reference[f'{TEXT_INPUT}_r{len(tokens)}']


def encode(engine: TensorRTEngine, kit: Kit, rows: int) -> None:
    reference = kit.reference
    prompt = {name: reference[f'{name}_r{rows}'] for name in ('tokens', 'token_mask')}
    engine.encode_prefix(reference['image_mask'], prompt)


def run_chunk(engine: TensorRTEngine, kit: Kit, rows: int) -> np.ndarray:
    """One whole chunk."""
    for camera, pixels in enumerate(kit.reference['pixels']):
        engine.encode_image(camera, pixels)
    encode(engine, kit, rows)
    engine.use_prefix(rows)
    engine.load_step_inputs(kit.step_inputs(rows))
    engine.run_steps()
    return engine.read_x()


def time_phases(
    engine: TensorRTEngine, kit: Kit, rows: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Milliseconds from the call to the end of the work on the device."""
    from parts.measurement import percentiles

    phases: dict[str, Callable[[], object]] = {
        'vision': lambda: engine.encode_image(0, kit.reference['pixels'][0]),
        'prefix': lambda: encode(engine, kit, rows),
        f'{STEPS} steps': engine.run_steps,
        'whole chunk': lambda: run_chunk(engine, kit, rows),
    }
    engine.use_prefix(rows)
    times: dict[str, dict[str, float]] = {}
    for name, work in phases.items():
        samples = []
        for _ in range(repeats + 3):
            engine.synchronize()
            start = perf_counter()
            work()
            engine.synchronize()
            samples.append((perf_counter() - start) * 1e3)
        times[name] = percentiles(samples[3:])
    return times


def show(figures: Mapping[str, Any]) -> None:
    """The short table that is printed last."""
    print()
    for name, check in figures['checks'].items():
        verdict = 'ok    ' if check['passed'] else 'FAILED'
        print(f'  {verdict} {name}: error {check["error"]:.2e}, at most {check["bound"]:.0e}')
    print(f'\n  {"median ms":24}' + ''.join(f'{mode:>18}' for mode in figures['latency_ms']))
    for phase in next(iter(figures['latency_ms'].values())):
        values = [mode[phase]['median'] for mode in figures['latency_ms'].values()]
        print(f'  {phase:24}' + ''.join(f'{value:18.3f}' for value in values))
    for name, found in figures['pytorch'].items():
        times = {phase: value['median'] for phase, value in found['milliseconds'].items()}
        print(f'  PyTorch bfloat16, {name}: ' + ', '.join(f'{k} {v:.2f}' for k, v in times.items()))


def _engine_figures(metadata: Metadata) -> dict[str, Any]:
    return {name: vars(entry) for name, entry in metadata.engines.items()}


def _check(error: float, bound: float) -> dict[str, Any]:
    # Written so that NaN fails.
    return {'passed': bool(error <= bound), 'error': error, 'bound': bound}


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference as a share of the largest number expected."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
    verbs = parser.add_subparsers(dest='verb', required=True)
    make = verbs.add_parser('prepare', help='write graphs, inputs and reference outputs')
    make.add_argument('kit', type=Path, metavar='KIT', help='folder to make')
    make.add_argument('--size', choices=SIZES, default=SIZES[0])
    make.add_argument('--precision', choices=sorted(BOUNDS), default='bfloat16')
    run = verbs.add_parser('run', help='build, compare and time on this GPU')
    run.add_argument('kit', type=Path, metavar='KIT', help='folder from prepare')
    run.add_argument('--repeats', type=int, default=REPEATS, help='timed runs of each phase')
    run.add_argument('--json', type=Path, metavar='OUT', help='write the figures there')
    return parser.parse_args(argv)


if __name__ == '__main__':
    sys.exit(main())

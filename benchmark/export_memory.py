"""Peak memory of `vla_runtime export` or `build --target` at a family's published size.

    python benchmark/export_memory.py smolvla evo1 groot_n15 groot_n17 --work FOLDER
    python benchmark/export_memory.py openvla --tokenizer FILE --work FOLDER
    ./run setup tensorrt-rtx
    ./run exec python benchmark/export_memory.py pi05 --engines --work FOLDER

A bundle with random weights is written tensor by tensor and exported in a process of its own: the
weights are copied, ONNX files are written, and all of them are compared with PyTorch. That process
is watched: `anonymous` is memory that it asked for, `resident` also counts the pages of files that
it had mapped, which the system takes back when it needs them. One camera and one denoise step are
compared: neither changes the weights. With `--engines` ONNX files are written, and engines of
TensorRT for RTX are planned and built from them as `vla_runtime build --target` does it, watched in
the same way. FOLDER holds the weights three times; all of it is removed.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from parts import openvla_folder
from parts.measurement import write_result
from safetensors.numpy import load_file

from vla_convert.export.onnx.export import write_onnx
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.schema import STATISTICS_FILE, WEIGHTS_FILE, BundleSpec
from vla_runtime.bundle.writer import new_bundle, seal, write_statistics
from vla_runtime.families.flow_network import empty_network
from vla_runtime.family.listing import find_family
from vla_tools.selftest.policies import read_policy, unpack

FAMILIES = ('smolvla', 'evo1', 'groot_n15', 'groot_n17', 'act', 'pi0', 'pi05')
# A published folder of many shards, instead of a bundle: the networks are not compared.
OPENVLA = 'openvla'
PACKAGES = ('torch', 'onnx', 'onnxruntime', 'numpy')
_EXPORT = 'import sys; from vla_runtime.cli.main import main; sys.exit(main())'
_DRAWN = 1 << 22


def full_size(spec: BundleSpec) -> BundleSpec:
    """A tiny policy's description at its family's published size."""
    preset = find_family(spec.family).presets[spec.family]
    changes: dict[str, Any] = {'cameras': 1}
    if hasattr(preset, 'image_places'):
        # That of the tiny policy's own prompt.
        changes['image_places'] = spec.dims.image_places[:1]
    if hasattr(preset, 'real_actions'):
        changes['real_actions'] = len(spec.actions)
    if spec.family == 'act':
        changes |= {'action_dim': len(spec.actions), 'state_dim': len(spec.state)}
    return replace(
        spec,
        dims=replace(preset, **changes),
        cameras=spec.cameras[:1],
        denoise_steps=1,
        files={},
    )


def write_weights(path: Path, spec: BundleSpec, stored: str) -> int:
    """Draw and write all weights, a tensor at a time; returns their number."""
    network = empty_network(spec.family, spec.dims)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    drawn = np.random.default_rng(0).standard_normal(_DRAWN, dtype=np.float32)
    header, end = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape) * (2 if stored == 'BF16' else 4)
        header[name] = {'dtype': stored, 'shape': shape, 'data_offsets': [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    with path.open('wb') as file:
        file.write(struct.pack('<Q', len(text)) + text)
        for number, (name, shape) in enumerate(shapes.items()):
            left, scale = math.prod(shape), math.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.1
            mean = 1.0 if 'norm' in name and name.endswith('weight') else 0.0
            while left:
                block = np.roll(drawn, 7919 * (number + left) % _DRAWN)[:left] * scale + mean
                if name.endswith('running_var'):
                    block = np.abs(block) + 1.0
                left -= len(block)
                block = block.astype(np.float32)
                if stored == 'BF16':
                    block = (block.view(np.uint32) >> 16).astype(np.uint16)
                file.write(block.tobytes())
    return sum(math.prod(shape) for shape in shapes.values())


def write_policy(folder: Path, family: str, stored: str) -> int:
    """Write a bundle of published size; returns the number of its parameters."""
    with tempfile.TemporaryDirectory() as unpacked:
        unpack(Path(unpacked))
        tiny, _ = read_policy(Path(unpacked), family)
        spec = full_size(tiny.spec)
        with new_bundle(folder) as made:
            if spec.tokenizer is not None:
                shutil.copyfile(tiny.folder / spec.tokenizer, made / spec.tokenizer)
            others = tuple(f'images.{camera.name}.' for camera in tiny.spec.cameras[1:])
            statistics = load_file(tiny.folder / STATISTICS_FILE)
            kept = {k: v for k, v in statistics.items() if not k.startswith(others)}
            write_statistics(made, kept)
            count = write_weights(made / WEIGHTS_FILE, spec, stored)
            seal(made, spec)
    return count


def memory(pid: int) -> dict[str, int]:
    """Bytes of a process: `resident`, and `anonymous` of those."""
    lines = Path(f'/proc/{pid}/status').read_text().splitlines()
    fields = dict(line.split(':', 1) for line in lines)
    names = {'resident': 'VmRSS', 'anonymous': 'RssAnon'}
    return {name: int(fields[key].split()[0]) * 1024 for name, key in names.items()}


def watched(command: list[str]) -> dict[str, Any]:
    """Run a command; returns its peaks in bytes and its processor time in seconds.

    Raises:
        RuntimeError: it failed.
    """
    peaks = {'resident': 0, 'anonymous': 0}
    seconds = 0.0
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            try:
                found = memory(process.pid)
                fields = Path(f'/proc/{process.pid}/stat').read_text().rpartition(')')[2].split()
            except (OSError, KeyError):
                break  # It ends.
            peaks = {name: max(peaks[name], value) for name, value in found.items()}
            seconds = (int(fields[11]) + int(fields[12])) / 100
            time.sleep(0.05)
    if process.returncode:
        raise RuntimeError(f'{command[:5]} ended with {process.returncode}')
    return {**peaks, 'processor_s': round(seconds)}


def measure(family: str, precision: str, stored: str, work: Path) -> dict[str, Any]:
    """Export one family and remove what was written."""
    source, target = work / family, work / f'{family}_onnx'
    try:
        parameters = write_policy(source, family, stored)
        size = (source / WEIGHTS_FILE).stat().st_size
        command = [sys.executable, '-c', _EXPORT, 'export', str(source), '--out', str(target)]
        found = watched([*command, '--onnx-precision', precision])
    finally:
        for folder in (source, target):
            shutil.rmtree(folder, ignore_errors=True)
    return {
        'parameters': parameters,
        'stored': stored,
        'onnx_precision': precision,
        'weights_bytes': size,
        **found,
        'anonymous_of_float32_weights': round(found['anonymous'] / (4 * parameters), 3),
        'resident_of_float32_weights': round(found['resident'] / (4 * parameters), 3),
    }


TARGETS = ('sm86', 'sm89', 'sm120')
# Beside the environment, where ./run puts it.
_LIBRARY = Path(sys.prefix) / 'tensorrt_rtx'
# As the command builds, which imports no PyTorch. One digest stands for all files: hashing
# gigabytes is not what is measured.
_BUILD = """
import json, sys, time
from pathlib import Path
sys.path.append(sys.argv.pop(1))
from vla_runtime.engines.tensorrt.adapter import import_rtx
from vla_convert.export.tensorrt.build import build_engines, plan_build
bundle, rows, targets = Path(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:])
files = dict.fromkeys((f'onnx/{path.name}' for path in (bundle / 'onnx').iterdir()), '0')
adapter = import_rtx()
plan = plan_build(bundle, adapter, None, rows=rows, files=files, targets=targets)
start = time.monotonic()
built = build_engines(plan, adapter, None, captures=1)
engines = {
    name: {
        'bytes': entry.size,
        'weight_bytes': plan.graphs[name].weight_bytes,
        'seconds': entry.seconds,
    }
    for name, entry in built.engines.items()
}
found = {
    'seconds': round(time.monotonic() - start),
    'estimated_bytes': plan.estimate.host,
    'engines': engines,
}
bundle.with_suffix('.json').write_text(json.dumps(found))
"""


def measure_build(family: str, precision: str, rows: int, work: Path) -> dict[str, Any]:
    """Write, export and build one family; remove what was written."""
    bundle = work / family
    try:
        parameters = write_policy(bundle, family, 'BF16')
        write_onnx(bundle, read_bundle(bundle, verify=False).spec, precision)
        command = [sys.executable, '-c', _BUILD, str(_LIBRARY), str(bundle), str(rows), *TARGETS]
        peaks = watched(command)
        found = json.loads(bundle.with_suffix('.json').read_text())
    finally:
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.with_suffix('.json').unlink(missing_ok=True)
    return {
        'parameters': parameters,
        'onnx_precision': precision,
        'rows': rows,
        'targets': list(TARGETS),
        **peaks,
        **found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('families', nargs='+', choices=(*FAMILIES, OPENVLA))
    parser.add_argument('--work', type=Path, required=True, help='folder with room')
    parser.add_argument('--precision', help='of the ONNX files (float32; for engines bfloat16)')
    parser.add_argument('--stored', choices=('F32', 'BF16'), default='F32', help='in the bundle')
    parser.add_argument('--engines', action='store_true', help='build engines for RTX cards')
    parser.add_argument(
        '--rows', type=int, default=2, choices=(1, 2), help='prompt rows of engines'
    )
    parser.add_argument(
        '--tokenizer', type=Path, help="of openvla: a tokenizer.json in Llama's layout"
    )
    parser.add_argument('--json', type=Path, help='instead of benchmark/results')
    given = parser.parse_args()
    if OPENVLA in given.families and (given.tokenizer is None or given.engines):
        parser.error('openvla needs --tokenizer, and is exported alone')
    given.work.mkdir(parents=True, exist_ok=True)
    figures = {}
    for family in given.families:
        if family == OPENVLA:
            figures[family] = openvla_folder.measure(given.work, given.tokenizer, watched)
        elif given.engines:
            figures[family] = measure_build(
                family, given.precision or 'bfloat16', given.rows, given.work
            )
        else:
            figures[family] = measure(
                family, given.precision or 'float32', given.stored, given.work
            )
        print(family, json.dumps(figures[family]), flush=True)
    sys.argv[1:] = ['WORK' if word == str(given.work) else word for word in sys.argv[1:]]
    name = 'target_build' if given.engines else 'export_memory'
    print(write_result(name, figures, PACKAGES, given.json).name)
    return 0


if __name__ == '__main__':
    sys.exit(main())

"""A pi0.5 in TensorRT on a GPU machine: exported, built, compared and timed by the package's verbs.

    python benchmark/gpu_tensorrt.py WORK [--precision int8] [--size full] [--json OUT]

Writes a bundle of random weights and its ONNX files below WORK, unless they are there. `build`
compares each engine, and whole chunks of one and two prompt rows, with PyTorch's recorded numbers;
`bench` times phases, with captured graphs, and those of PyTorch on the same GPU. By default the
widths are the published ones and each stack has two layers.

Exit code: 0, 1 where engines compute something else, 2 where it cannot run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'benchmark')]

from parts.gpu_run import described_parser  # noqa: E402

from vla_runtime.bundle.folder import read_bundle  # noqa: E402
from vla_runtime.bundle.onnx_files import QUANTISED, Precision  # noqa: E402
from vla_runtime.bundle.schema import (  # noqa: E402
    WEIGHTS_FILE,
    ActionSpec,
    BundleSpec,
    CameraSpec,
    ImageSpec,
    NormalisationSpec,
    StateSpec,
)
from vla_runtime.bundle.writer import new_bundle, seal, write_statistics  # noqa: E402
from vla_runtime.cli.main import main as vla_runtime  # noqa: E402
from vla_runtime.engines.preflight import check_backend  # noqa: E402
from vla_runtime.families.pi.declaration import PiDims  # noqa: E402
from vla_runtime.processing.prompts import PromptFormat  # noqa: E402
from vla_runtime.types import Observation  # noqa: E402

PRECISIONS = ('float32', 'float16', 'bfloat16', 'int8')
PACKAGES = ['tensorrt', 'cuda-bindings', 'torch', 'numpy']
CAMERAS, JOINTS = 3, 7
# Range of every joint, radians.
ENDS = (('q01', -1.0), ('q99', 1.0))
# Observations that 8 bits are calibrated on.
LOOKS = 20
TOKENIZER = ROOT / 'test' / 'cases' / 'lerobot_pi05_tiny' / 'tokenizer.json'


def dims_of(size: str) -> PiDims:
    """pi0.5 as published, or with two layers in each stack."""
    from parts.random_policy import sized_dims

    # Rows of the text table are looked up on the host: a small one serves.
    full = replace(sized_dims('pi05', 'full', CAMERAS), vocabulary=4096)
    if size == 'full':
        return full
    stacks = {name: replace(getattr(full, name), depth=2) for name in ('vision', 'language')}
    return replace(full, **stacks, expert=replace(full.expert, depth=2))


def write_policy(folder: Path, dims: PiDims) -> Path:
    """Write a bundle of random weights for a robot of seven joints."""
    import torch
    from parts.random_policy import random_network
    from safetensors.torch import save_file

    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    network = random_network('pi05', dims, device, 'bfloat16')
    names = [f'joint_{number}' for number in range(JOINTS)]
    spec = BundleSpec(
        name='random pi05',
        family='pi05',
        dims=dims,
        cameras=tuple(CameraSpec(f'camera{number}') for number in range(dims.cameras)),
        images=ImageSpec(padding='centre', resample='bilinear'),
        state=tuple(StateSpec(name, 'rad') for name in names),
        actions=tuple(ActionSpec(name, 'rad', 'absolute') for name in names),
        step_time_s=0.02,
        denoise_steps=10,
        prompt=PromptFormat(template='pi05_state', cleaning='openpi', advantage='before_action'),
        normalisation=NormalisationSpec(state='quantiles_openpi', actions='quantiles_openpi'),
        tokenizer=TOKENIZER.name,
    )
    with new_bundle(folder) as made:
        weights = {name: value.cpu().contiguous() for name, value in network.state_dict().items()}
        save_file(weights, made / WEIGHTS_FILE)
        statistics = {
            f'{of}.{end}': np.full(JOINTS, value)
            for of in ('state', 'actions')
            for end, value in ENDS
        }
        write_statistics(made, statistics)
        shutil.copyfile(TOKENIZER, made / TOKENIZER.name)
        seal(made, spec)
    # A builder wants the memory.
    del network
    torch.cuda.empty_cache()
    return folder


def export(source: Path, target: Path, precision: Precision) -> Path:
    """Write the bundle's ONNX files and recorded cases in this precision."""
    from vla_convert.export.onnx.bundle import export_bundle

    if precision not in QUANTISED:
        export_bundle(read_bundle(source), target, precision)
        return target
    spec, random = read_bundle(source).spec, np.random.default_rng(0)
    looks = [
        Observation(
            {
                name: random.integers(0, 256, (480, 640, 3), dtype=np.uint8)
                for name in spec.camera_names
            },
            random.uniform(-1, 1, len(spec.state)),
            'put the cup on the shelf',
        )
        for _ in range(LOOKS)
    ]
    export_bundle(read_bundle(source), target, precision, observations=looks, beside='bfloat16')
    return target


def bench(bundle: Path, *options: str) -> dict[str, Any]:
    """Time the phases of one and of two prompt rows; RuntimeError: it cannot."""
    found = {}
    for rows in ('1', '2'):
        out = bundle.with_name('bench.json')
        words = ['bench', str(bundle), '--rows', rows, '--json', str(out), *options]
        if vla_runtime(words) != 0:
            raise RuntimeError(f'vla_runtime {" ".join(words)} failed; its reason is above')
        found[f'{rows} row(s)'] = json.loads(out.read_text())['figures']
    return found


def measure(bundle: Path, precision: str, repeats: int) -> dict[str, Any]:
    """Times in TensorRT, and in PyTorch where it reaches the GPU, beside the receipt of `build`."""
    import torch

    common = ('--repeats', str(repeats))
    figures = {
        'tensorrt': bench(bundle, '--backend', 'tensorrt', '--precision', precision, *common)
    }
    if torch.cuda.is_available():
        on_gpu = ('--backend', 'torch', '--device', 'cuda', '--precision', 'bfloat16')
        figures['pytorch'] = bench(bundle, *on_gpu, *common)
    (receipt,) = bundle.glob('engines/*/verification.json')
    return {**figures, 'precision': precision, 'receipt': json.loads(receipt.read_text())}


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; see the module's docstring for the exit code."""
    arguments = _arguments(argv)
    precision, work = arguments.precision, arguments.work
    try:
        check_backend('tensorrt', 'cuda')
        bundle = work / f'{arguments.size}_{precision}'
        if not bundle.exists():
            source = work / arguments.size
            if not source.exists():
                write_policy(source, dims_of(arguments.size))
            export(source, bundle, precision)
        if code := vla_runtime(['build', str(bundle), '--precision', precision]):
            return code
        figures = measure(bundle, precision, arguments.repeats)
    except (ValueError, OSError, RuntimeError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    if arguments.json:
        from parts.measurement import write_result

        print('wrote', write_result('gpu_tensorrt', figures, PACKAGES, arguments.json))
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument('work', type=Path, metavar='WORK', help='folder for bundle and engines')
    parser.add_argument('--size', choices=['reduced_depth', 'full'], default='reduced_depth')
    parser.add_argument('--precision', choices=PRECISIONS, default='bfloat16')
    parser.add_argument('--repeats', type=int, default=50, help='timed inferences of each kind')
    parser.add_argument('--json', type=Path, metavar='OUT', help='write the figures there')
    return parser.parse_args(argv)


if __name__ == '__main__':
    sys.exit(main())

"""An inference on a CPU by turns in every backend and precision: the demo policy, a mid-size one.

Each kind runs once a round on the same images, in one process, on one thread. Processor time is
written beside wall time: on a machine that others use too, it alone says what an inference costs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from unittest import mock

import numpy as np
import torch
from parts.measurement import in_turn, median_ratio, percentiles, write_result
from parts.random_policy import random_network

from vla_convert.export.onnx.bundle import export_bundle
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import Precision
from vla_runtime.engines.cpu import check_int8
from vla_runtime.families.blocks import fused_product
from vla_runtime.families.flow_network import FlowNetwork
from vla_runtime.families.pi.networks import PiNetwork
from vla_runtime.policy import Policy
from vla_runtime.types import Observation
from vla_tabletop.study.calibration import demo_observations
from vla_tools.performance.bench import look

sys.path.insert(0, str(Path(__file__).parents[1] / 'test'))
from written_bundle import write_bundle  # isort: skip

from vla_runtime.bundle.schema import (
    ActionSpec,
    BundleSpec,
    CameraSpec,
    ImageSpec,
    NormalisationSpec,
    StateSpec,
)
from vla_runtime.families.blocks.dimensions import DecoderDims, VisionDims
from vla_runtime.families.pi.declaration import PiDims
from vla_runtime.processing.prompts import PromptFormat

PACKAGES = ('torch', 'onnxruntime', 'numpy', 'opencv-python-headless')
REFERENCE = 'torch float32'
_DEMO = Path(__file__).parents[1] / 'engines' / 'demo'
_IMAGE = (480, 640, 3)
_WARM_UP = 2


def load_policies(
    bundle: Path, observations: Sequence[Observation], folder: Path, products: bool = False
) -> dict[str, Policy]:
    """The same policy in every way that it can run here; files are exported to `folder`.

    Args:
        bundle: folder of the policy.
        observations: observations of the policy at its task, for int8.
        folder: folder of the exported bundles.
        products: only PyTorch in float32, with this CPU's library of products and with the other.
    """

    def load(precision: str = 'float32') -> Policy:
        return Policy.load(bundle, 'torch', precision=precision, threads=1)

    policies = {REFERENCE: load()}
    other = not fused_product.is_faster(torch.float32)
    with mock.patch.object(fused_product, 'is_faster', lambda dtype: other):
        policies[f'torch float32, {"oneDNN" if other else "MKL"}'] = load()
    if products:
        return policies
    policies['torch bfloat16'] = load('bfloat16')
    with mock.patch.object(PiNetwork, 'fused', FlowNetwork.fused):
        policies['torch float32, plain modules'] = load()
    precisions: list[Precision] = ['float32', 'int8']
    try:
        check_int8()
    except ValueError as error:
        print(f'left out: {error}')
        precisions.remove('int8')
    for precision in precisions:
        made = export_bundle(
            read_bundle(bundle), folder / precision, precision, observations=observations
        )
        policies[f'onnxruntime {precision}'] = Policy.load(
            made, 'onnxruntime', precision=precision, threads=1
        )
    return policies


def measure(policies: dict[str, Policy], rounds: int) -> dict[str, Any]:
    """Milliseconds of a miss and of a hit by kind, as parts of the reference, and the chunks."""
    random = np.random.default_rng(0)
    spec = policies[REFERENCE].spec
    found: dict[str, dict[str, list[float]]] = {name: {} for name in policies}
    apart = dict.fromkeys(policies, 0.0)
    for round_ in range(rounds + _WARM_UP):
        images: dict[str, np.ndarray | None] = {
            name: random.integers(0, 256, _IMAGE, dtype=np.uint8) for name in spec.camera_names
        }
        chunks = {}
        for name in in_turn(list(policies), round_):
            policy = policies[name]
            for case in ('miss', 'hit'):
                wall, cpu = perf_counter(), process_time()
                chunk, _ = policy.infer(look(spec, images), number=round_)
                times = {'wall': perf_counter() - wall, 'cpu': process_time() - cpu}
                chunks[name] = chunk.normalised
                if round_ >= _WARM_UP:
                    for clock, seconds in times.items():
                        found[name].setdefault(f'{case}_{clock}', []).append(seconds * 1e3)
        for name, chunk in chunks.items():
            apart[name] = max(apart[name], float(np.abs(chunk - chunks[REFERENCE]).max()))
    return {
        name: {
            **{case: {**percentiles(values), 'min': min(values)} for case, values in cases.items()},
            'of_reference': {
                case: median_ratio(cases[f'{case}_cpu'], found[REFERENCE][f'{case}_cpu'])
                for case in ('miss', 'hit')
            },
            'largest_difference': apart[name],
        }
        for name, cases in found.items()
    }


CAMERAS = ('top', 'left_wrist', 'right_wrist')
JOINTS = tuple(f'joint_{i}' for i in range(7))
STEPS = 10
_TOKENIZER = Path(__file__).parents[1] / 'test' / 'cases' / 'lerobot_pi05_tiny' / 'tokenizer.json'
_HEADS = {'depth': 12, 'num_heads': 8, 'num_kv_heads': 1, 'head_dim': 64}
DIMS = PiDims(
    vision=VisionDims(
        width=384, depth=12, num_heads=6, mlp_dim=1536, patch_size=14, image_size=224
    ),
    language=DecoderDims(width=512, mlp_dim=2048, **_HEADS),
    expert=DecoderDims(width=256, mlp_dim=1024, **_HEADS),
    vocabulary=32000,
    cameras=len(CAMERAS),
    prompt_length=96,
    horizon=50,
    action_dim=32,
)


def write_mid_size(folder: Path) -> Path:
    """Write a pi0.5 bundle of 101 million seeded random weights to a new folder.

    Large enough for its networks to be what an inference costs, small enough for a CPU.
    """
    spec = BundleSpec(
        name='mid size',
        family='pi05',
        dims=DIMS,
        cameras=tuple(CameraSpec(name) for name in CAMERAS),
        images=ImageSpec(padding='centre', resample='bilinear'),
        state=tuple(StateSpec(name, 'rad') for name in JOINTS),
        actions=tuple(ActionSpec(name, 'rad', 'absolute') for name in JOINTS),
        step_time_s=0.02,
        denoise_steps=STEPS,
        prompt=PromptFormat(template='pi05_state', cleaning='openpi', advantage='before_action'),
        normalisation=NormalisationSpec(state='quantiles_openpi', actions='quantiles_openpi'),
        tokenizer='tokenizer.json',
    )
    network = random_network('pi05', DIMS, 'cpu', 'float32')
    limits = np.full(len(JOINTS), 1.5)
    statistics = {
        f'{group}.{name}': sign * limits
        for group in ('state', 'actions')
        for name, sign in (('q01', -1.0), ('q99', 1.0))
    }
    weights = {name: value.numpy() for name, value in network.state_dict().items()}
    write_bundle(folder, spec, weights=weights, statistics=statistics, tokenizer=_TOKENIZER)
    return folder


def mid_size_look(seed: int) -> Observation:
    """An observation of the mid-size policy, drawn from a seed."""
    return Observation(
        images={
            name: np.random.default_rng(seed * 100 + index).integers(0, 256, _IMAGE, dtype=np.uint8)
            for index, name in enumerate(CAMERAS)
        },
        state=np.random.default_rng(seed).uniform(-1, 1, len(JOINTS)).astype(np.float32),
        instruction='put the cup on the shelf',
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--rounds', type=int, default=30)
    parser.add_argument('--policies', nargs='+', default=['demo', 'mid_size'])
    parser.add_argument(
        '--products', action='store_true', help='only the two libraries that multiply in float32'
    )
    parser.add_argument('--json', type=Path, help='write here instead of to benchmark/results/')
    arguments = parser.parse_args()
    figures = {}
    for name in arguments.policies:
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work)
            if name == 'demo':
                looks = () if arguments.products else demo_observations(_DEMO)
                policies = load_policies(_DEMO, looks, folder, arguments.products)
            else:
                bundle = write_mid_size(folder / 'bundle')
                looks = [mid_size_look(seed) for seed in range(20)]
                policies = load_policies(bundle, looks, folder, arguments.products)
            figures[name] = measure(policies, arguments.rounds)
        for kind, cases in figures[name].items():
            parts = {
                case: f'{cases[f"{case}_cpu"]["median"]:.1f} ms, {part["median"]:.3f}'
                for case, part in cases['of_reference'].items()
            }
            print(name, kind, parts, f'{cases["largest_difference"]:.2g}')
    name = 'cpu_products' if arguments.products else 'cpu_paths'
    print(write_result(name, {'milliseconds': figures}, PACKAGES, arguments.json))


if __name__ == '__main__':
    main()

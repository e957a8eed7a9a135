"""A pi0.5 bundle of about 100 million seeded random weights: large enough for its networks to be
what an inference costs, small enough for a CPU. Three cameras, guidance, state in the prompt.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from random_policy import random_network

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
from vla_runtime.families.pi.dimensions import PiDims
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.processing.prompts import PromptFormat
from vla_runtime.types import Observation

CAMERAS = ('top', 'left_wrist', 'right_wrist')
JOINTS = tuple(f'joint_{i}' for i in range(7))
STEPS = 10
PACKAGES = ('torch', 'numpy', 'opencv-python-headless')
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
    """Write the bundle to `folder`, which must not exist yet."""
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


@contextmanager
def mid_size_policy(threads: int, settings: PolicySettings | None = None) -> Iterator[Policy]:
    """The policy, warm, on so many CPU threads."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = write_mid_size(Path(folder) / 'bundle')
        policy = Policy.load(bundle, settings=settings, threads=threads, verify=False)
        policy.warm_up()
        yield policy
        policy.close()


def look(seed: int, images: Sequence[int] | None = None) -> Observation:
    """An observation whose state and images are drawn from a seed, or each image from its own."""
    seeds = images or [seed * 100 + camera for camera in range(len(CAMERAS))]
    return Observation(
        images={
            name: np.random.default_rng(s).integers(0, 256, (480, 640, 3), dtype=np.uint8)
            for name, s in zip(CAMERAS, seeds, strict=True)
        },
        state=np.random.default_rng(seed).uniform(-1, 1, len(JOINTS)).astype(np.float32),
        instruction='put the cup on the shelf',
    )


def parse_arguments(description: str, rounds: int) -> argparse.Namespace:
    """The options that every mid-size benchmark has."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument('--rounds', type=int, default=rounds, help=f'default: {rounds}')
    parser.add_argument('--threads', type=int, default=1, help='of PyTorch (default: 1)')
    parser.add_argument('--json', type=Path, help='write here instead of to benchmark/results/')
    return parser.parse_args()

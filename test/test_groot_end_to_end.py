"""From a GR00T folder through `vla_runtime export` to chunks in robot units, on two backends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from groot_folders import CAMERAS, JOINTS, write_groot_folder
from network_cases import relative_error
from recorded_numbers import recorded
from safetensors.torch import load_file

from vla_runtime.cli.main import main
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

pytestmark = pytest.mark.cases

ARGUMENTS = (
    *('--state-names', ','.join(JOINTS), '--action-names', ','.join(JOINTS[:7])),
    *('--units', 'rad', '--rate-hz', '30', '--horizon', '8', '--prompt-length', '220'),
    *('--vision-heads', '4', '--heads', 'context=4,dit=4', '--embodiment', 'so100'),
)
TASK = "put the cup's lid on"


@pytest.fixture(scope='module')
def bundle(tmp_path_factory):
    folder = write_groot_folder(tmp_path_factory.mktemp('groot') / 'policy')
    target = folder.parent / 'bundle'
    assert main(['export', str(folder), '--out', str(target), *ARGUMENTS]) == 0
    return target


@pytest.fixture(scope='module', params=['torch', 'onnxruntime'])
def policy(request, bundle):
    return Policy.load(bundle, backend=request.param)


def observation(seed: int = 0) -> Observation:
    random = np.random.default_rng(seed)
    return Observation(
        images={name: random.integers(0, 256, (60, 84, 3), dtype=np.uint8) for name in CAMERAS},
        state=random.uniform(-1, 1, len(JOINTS)).astype(np.float32),
        instruction=TASK,
    )


def test_a_chunk_equals_that_of_inputs_made_by_hand(bundle, policy):
    seen = observation()
    noise = np.random.default_rng(3).normal(size=(8, 16)).astype(np.float32)
    chunk, _ = policy.infer(seen, noise=noise)
    expected = recorded('groot', 'n15', torch.from_numpy(chunk.normalised))
    assert relative_error(chunk.normalised, expected) <= 1e-4
    statistics = load_file(bundle / 'statistics.safetensors')
    low, high = (statistics[f'actions.{name}'] for name in ('min', 'max'))
    robot = (expected[:, :7] + 1) / 2 * (high - low) + low
    assert relative_error(chunk.actions, robot) <= 1e-4


def test_a_tokenizer_that_puts_images_elsewhere_is_refused(bundle, tmp_path):
    from vla_runtime.bundle.folder import read_bundle
    from vla_runtime.inference.codec import PolicyCodec

    whole = read_bundle(bundle)
    first, second = whole.spec.dims.image_places
    dims = replace(whole.spec.dims, image_places=(first, second + 1))
    with pytest.raises(ValueError, match='image_places'):
        PolicyCodec(replace(whole, spec=replace(whole.spec, dims=dims)))

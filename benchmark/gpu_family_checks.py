"""Chunks of every family on the device against those of the CPU in float32.

The policies are the tiny ones that the self-test ships, with random weights; their inputs are drawn
from what the families declare. pi0.5 in bfloat16 has heads as wide as real ones, which is what
kernels that attend by lengths ask for.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gpu_findings import Finding, keeps_bounds, relative_error, worst_in_words
from random_policy import ChunkInputs, infer

from vla_runtime.bundle.folder import Bundle, read_bundle
from vla_runtime.bundle.schema import SPEC_FILE
from vla_runtime.engines.protocol import StepInputs
from vla_runtime.engines.tolerances import BOUNDS
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.engines.torch.weights import load_network
from vla_runtime.family.declaration import (
    PolicyDims,
    RowInput,
    image_places,
    image_sizes,
    language_dims,
)
from vla_runtime.family.listing import find_family

# ACT makes a change of its inputs six times as large: in bfloat16 its chunks are off by 0.05 on a
# CPU already. A wrong mask is seen in float32.
FAMILY_BOUNDS = {'float32': 2e-4, 'bfloat16': BOUNDS['bfloat16'].ceiling}
POLICIES = Path(__file__).parents[1] / 'vla_runtime' / 'selftest' / 'policies.tar.xz'


def family_inputs(bundle: Bundle, rows: int, seed: int) -> ChunkInputs:
    """Draw inputs for a bundle's networks; of two rows the prompts differ in length."""
    spec, random = bundle.spec, np.random.default_rng(seed)
    family, dims = find_family(spec.family), bundle.spec.dims
    chunk, single = (dims.horizon, dims.action_dim), family.head == 'single'
    noise = random.standard_normal(chunk).astype(np.float32)
    plan_weight = np.zeros((spec.denoise_steps, dims.horizon), dtype=np.float32)
    if not single:
        plan_weight[:, : dims.horizon // 4] = 0.5
    return ChunkInputs(
        pixels=[random.uniform(-1, 1, (3, *size)).astype(np.float32) for size in image_sizes(dims)],
        image_mask=np.ones(dims.cameras, dtype=bool),
        prefix_inputs=_draw(family.prefix_inputs(dims), dims, rows, random),
        step_inputs=StepInputs(
            # A head that runs once gets zeros for noise.
            x=np.zeros_like(noise) if single else noise,
            row_weight=np.array([2.0, -1.0] if rows == 2 else [1.0], dtype=np.float32),
            plan=random.uniform(-1, 1, chunk).astype(np.float32),
            plan_weight=plan_weight,
            rows=_draw(family.head_inputs(dims), dims, rows, random),
        ),
    )


def _draw(
    inputs: Mapping[str, RowInput], dims: PolicyDims, rows: int, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Draw a family's inputs; integers are tokens, and booleans mask prompts."""
    drawn: dict[str, np.ndarray] = {}
    for name, given in inputs.items():
        shape = (rows, *given.shape)
        if given.kind == 'int64':
            drawn[name] = random.integers(0, language_dims(dims).vocabulary, shape)
        elif given.kind == 'bool':
            # Text up to the last image is in every prompt.
            least = (image_places(dims) or (0,))[-1]
            lengths = least + (shape[-1] - least) * np.array([3, 2])[:rows] // 4
            drawn[name] = np.arange(shape[-1]) < lengths[:, None]
        else:
            drawn[name] = random.uniform(-1, 1, shape).astype(np.float32)
    return drawn


def families(device: str, size: str) -> Finding:
    """Chunks of every family's tiny policy, for one prompt row and two, in two precisions.

    On CUDA every network must have been captured. The size does not matter.
    """
    figures: dict[str, float] = {}
    worst = dict.fromkeys(FAMILY_BOUNDS, 0.0)
    names: dict[str, None] = {}
    failures = []
    with tempfile.TemporaryDirectory(prefix='vla_runtime_gpu_') as temporary:
        shutil.unpack_archive(POLICIES, temporary)
        for path in sorted(Path(temporary).glob(f'*/{SPEC_FILE}')):
            bundle = read_bundle(path.parent, verify=False)
            names[bundle.spec.family] = None
            for precision in worst:
                errors, fault = _errors(bundle, device, precision)
                figures |= {f'{path.parent.name} {name}': error for name, error in errors.items()}
                worst[precision] = max(worst[precision], *errors.values())
                failures += [f'{path.parent.name} {precision}: {fault}'] if fault else []
    said = worst_in_words(worst, FAMILY_BOUNDS)
    note = f'{", ".join(names)}: largest difference from the CPU in float32: {said}'
    passed = not failures and keeps_bounds(worst, FAMILY_BOUNDS)
    return Finding(passed, '; '.join([note, *failures]), figures)


def _errors(bundle: Bundle, device: str, precision: str) -> tuple[dict[str, float], str]:
    """Return errors by rows, and which network was not captured where it should have been."""
    family, dims = bundle.spec.family, bundle.spec.dims
    network = load_network(family, dims, bundle.weights_path, device=device, precision=precision)
    # The weights as rounded, so that what differs is the computation alone.
    rounded = load_network(family, dims, bundle.weights_path, device='cpu', precision=precision)
    engine = TorchEngine(network, use_cuda_graphs=True)
    truth = TorchEngine(rounded.float(), use_cuda_graphs=False)
    errors = {}
    for rows in (1, 2):
        inputs = family_inputs(bundle, rows, seed=rows)
        found, expected = infer(engine, inputs), infer(truth, inputs)
        errors[f'{precision} rows={rows}'] = relative_error(found, expected)
    status = engine.cuda_graph
    engine.close()
    truth.close()
    wanted = 'captured' if device.startswith('cuda') else 'eager'
    fault = ', '.join(f'{name} {how}' for name, how in status.items() if how != wanted)
    return errors, fault

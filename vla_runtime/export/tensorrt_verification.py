"""The receipt of built engines: the loaded engine against PyTorch in float32.

The same seeded inputs and bounds as for the ONNX files (`onnx_cases`, `onnx_verification`), through
the engine as the policy uses it: what vision and prefix leave in their buffers, each fed with what
the one before it gave; every step alone, from PyTorch's x; x from the noise on (its growth), and
the chunk of the captured loop, whose bound grows with the gain of its case as for the ONNX files.
Needs PyTorch, onnx and onnxruntime beside TensorRT; without them there is no receipt.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_runtime.bundle_schema import WEIGHTS_FILE, BundleSpec
from vla_runtime.engines.engine import StepInputs
from vla_runtime.engines.onnx_files import Precision
from vla_runtime.engines.tensorrt_engine import TensorRTEngine
from vla_runtime.engines.tensorrt_store import Metadata
from vla_runtime.export.onnx_cases import Case, Reference, seeded_cases
from vla_runtime.export.onnx_verification import BOUNDS, ChunkComparison, Comparison, Receipt
from vla_runtime.export.onnx_weights import BundleWeights
from vla_runtime.inference.denoise import flow_times


def verify_engines(
    folder: Path,
    spec: BundleSpec,
    engine: TensorRTEngine,
    precision: Precision,
    *,
    advance: Callable[[int], object] = lambda count: None,
) -> Receipt:
    """Compare loaded engines with the PyTorch modules.

    Args:
        folder: of the bundle.
        spec: its policy.yaml.
        engine: loaded; cases of more rows than it has are left out.
        precision: of the engines, which sets the bounds.
        advance: told 1 for each of the cases.

    Returns:
        The receipt; ask it for `failures`.
    """
    cases = [case for case in seeded_cases(spec) if case.rows <= engine.max_rows]
    reference = Reference(spec, BundleWeights(folder / WEIGHTS_FILE))
    reference.image_tokens(cases)
    reference.prefixes(cases)
    reference.chunks(cases)
    errors: dict[tuple[str, str], list[tuple[float, float]]] = {}
    chunks = []
    bounds = BOUNDS[precision]
    for number, case in enumerate(cases):
        for place, error in _networks(engine, case).items():
            errors.setdefault(place, []).append(error)
        for name, error in _single_steps(engine, case).items():
            errors.setdefault((f'expert, {case.rows} row(s)', name), []).append(error)
        growth = _growth(engine, case)
        engine.load_step_inputs(_inputs(case))
        engine.run_steps()
        largest, mean = _error(engine.read_x(), case.reference['trace'][-1][0])
        gain = float(case.reference['gain'])
        chunks.append(
            ChunkComparison(
                graphs='engines',
                case=number,
                gain=gain,
                max_error=largest,
                mean_error=mean,
                bound=bounds.chunk * max(1.0, gain),
                growth=growth,
            )
        )
        advance(1)
    tensors = [
        Comparison(
            network,
            tensor,
            float(np.max([largest for largest, _ in found])),
            float(np.mean([mean for _, mean in found])),
            bounds.tensor,
        )
        for (network, tensor), found in errors.items()
    ]
    words = [case.words for case in cases]
    status = ', '.join(f'{name} {state}' for name, state in engine.cuda_graph.items())
    return Receipt(precision, 'TensorRT', words, tensors, chunks, [f'CUDA graphs: {status}'])


def receipt_dict(receipt: Receipt, metadata: Metadata) -> dict[str, Any]:
    """What the engines' verification.json holds."""
    return {
        'what': 'the built engines against the PyTorch modules in float32, on seeded inputs, each '
        'network fed with what the one before it gave',
        'precision': receipt.precision,
        'gpu': metadata.gpu,
        'versions': {
            'python': platform.python_version(),
            'tensorrt': metadata.tensorrt,
            'torch': str(torch.__version__),
            'numpy': np.__version__,
        },
        **receipt.figures(),
    }


def _networks(engine: TensorRTEngine, case: Case) -> dict[tuple[str, str], tuple[float, float]]:
    """Encode, and compare what vision and prefix left in their buffers."""
    for camera, pixels in enumerate(case.pixels):
        engine.encode_image(camera, pixels)
    engine.encode_prefix(case.image_mask, case.tokens, case.token_mask)
    engine.use_prefix(case.rows)
    reference, found = case.reference, engine.read_prefix()
    network = f'prefix, {case.rows} row(s)'
    # What stands at padded places is never seen.
    seen = reference['prefix_mask']
    errors = {
        ('vision', 'image_tokens'): _error(engine.read_image_tokens(), reference['image_tokens']),
        (network, 'prefix_mask'): _error(found['prefix_mask'], seen),
    }
    for name in ('past_key', 'past_value'):
        pair = [each[name].swapaxes(0, 1).swapaxes(1, 3)[seen] for each in (found, reference)]
        errors[network, name] = _error(*pair)
    return errors


def _single_steps(engine: TensorRTEngine, case: Case) -> dict[str, tuple[float, float]]:
    """Every step alone, from PyTorch's x before it."""
    trace, steps = case.reference['trace'], len(case.plan_weight)
    engine.set_schedule(flow_times(steps), -1.0 / steps)
    engine.load_step_inputs(_inputs(case))
    following, velocities = [], []
    for index in range(steps):
        engine.write_x(trace[index][0])
        engine.step(index)
        following.append(engine.read_x()[None])
        velocities.append(engine.read_velocity())
    return {
        'x_next': _error(np.stack(following), trace[1:]),
        'velocity': _error(np.stack(velocities), case.reference['velocity']),
    }


def _growth(engine: TensorRTEngine, case: Case) -> list[float]:
    """The largest error of x after each step, from the noise on."""
    engine.load_step_inputs(_inputs(case))
    growth = []
    for index in range(len(case.plan_weight)):
        engine.step(index)
        growth.append(_error(engine.read_x(), case.reference['trace'][index + 1][0])[0])
    return growth


def _inputs(case: Case) -> StepInputs:
    return StepInputs(
        x=case.x[0],
        row_weight=case.row_weight,
        plan=case.plan[0],
        plan_weight=case.plan_weight[:, 0, :, 0],
        state=case.state,
    )


def _error(found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Largest and mean difference, in units of the reference's largest number where above 1."""
    difference = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    scale = max(1.0, float(np.abs(expected).max()))
    return float(difference.max()) / scale, float(difference.mean()) / scale

"""Kernels of an inference in PyTorch: what a GPU would launch, for plain and for fused modules.

Counted are the operations that PyTorch dispatches and that are no views, in a policy with the
depths of the published pi0.5 and narrow layers: the number does not depend on widths. A CUDA graph
replays the same kernels; what it saves is their launch by the processor.

The predicted time is the roofline of the published size plus 4 µs a kernel, about what one takes
that is too small to fill a GPU. It is a prediction: nothing here was run on a GPU.

    python benchmark/kernels.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from measurement import write_result
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1] / 'test'))
from tiny_policy import tiny_spec, write_tiny_policy  # isort: skip

from vla_runtime.families import preset
from vla_runtime.families.flow_network import FlowNetwork
from vla_runtime.families.pi.flow_policy import PiNetwork
from vla_runtime.performance.bench import look
from vla_runtime.performance.devices import DEVICES
from vla_runtime.performance.operation_counts import count_operations
from vla_runtime.performance.roofline import phase_floors, published_rates
from vla_runtime.policy import Policy

SECONDS_A_KERNEL = 4e-6
STEPS = 10
PREDICTED_ON = ('h200', 'agx-orin', 'thor')
PACKAGES = ('torch', 'numpy')


class Kernels(TorchDispatchMode):
    """Count operations that are no views and do not only allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += not (func.is_view or name.startswith(('empty', 'detach', '_local_scalar')))
        return func(*args, **(kwargs or {}))


def kernels_of(policy: Policy) -> dict[str, int]:
    """Kernels of a miss (every view new) and of a hit."""
    random = np.random.default_rng(0)
    found = {}
    # Twice: buffers that are made once are not counted.
    for _ in range(2):
        images = {
            name: random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            for name in policy.spec.camera_names
        }
        for kind in ('miss', 'hit'):
            with Kernels() as counted:
                policy.infer(look(policy.spec, dict(images)))
            found[kind] = counted.count
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--json', type=Path, help='write here instead of to benchmark/results/')
    arguments = parser.parse_args()
    family, published = preset('pi05')
    narrow = tiny_spec(family)
    dims = narrow.dims
    deep = replace(
        dims,
        vision=replace(dims.vision, depth=published.vision.depth),
        language=replace(dims.language, depth=published.language.depth),
        expert=replace(dims.expert, depth=published.expert.depth),
    )
    with tempfile.TemporaryDirectory() as work:
        bundle = write_tiny_policy(
            Path(work) / 'deep', replace(narrow, dims=deep, denoise_steps=STEPS)
        )
        fused = kernels_of(Policy.load(bundle, 'torch', precision='float32', threads=1))
        with mock.patch.object(PiNetwork, 'fused', FlowNetwork.fused):
            plain = kernels_of(Policy.load(bundle, 'torch', precision='float32', threads=1))
    counts = count_operations(family, published)
    predicted = {}
    for key in PREDICTED_ON:
        floors = phase_floors(
            counts,
            published_rates(DEVICES[key], 'bfloat16'),
            precision='bfloat16',
            rows=1,
            steps=STEPS,
            views=deep.cameras,
        )
        predicted[key] = {
            name: {
                kind: floors[kind].milliseconds + 1e3 * SECONDS_A_KERNEL * kernels[kind]
                for kind in ('miss', 'hit')
            }
            for name, kernels in (('plain', plain), ('fused', fused))
        } | {'floor': {kind: floors[kind].milliseconds for kind in ('miss', 'hit')}}
    print('kernels, plain', plain, 'fused', fused)
    for key, times in predicted.items():
        print(key, {n: {k: round(v, 2) for k, v in of.items()} for n, of in times.items()})
    figures = {
        'views': deep.cameras,
        'denoise_steps': STEPS,
        'kernels': {'plain': plain, 'fused': fused},
        'predicted_ms': predicted,
        'seconds_a_kernel': SECONDS_A_KERNEL,
    }
    print(write_result('kernels', figures, PACKAGES, arguments.json))


if __name__ == '__main__':
    main()

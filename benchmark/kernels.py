"""Kernels of an inference in PyTorch: what a GPU would launch, layer by layer and joined.

Joined layers are those that run on CUDA, in shapes that depend on no numbers; plain are the same
layers one by one. Packed are the joined ones where the kernel is usable that takes lengths instead
of a mask (`key_lengths`), products take GELU or the residual stream along (`epilogues`), and a norm
is one kernel: those run on a GPU of today in bfloat16. In Triton are the packed ones with the
expert's layers in Triton kernels, which are counted instead of launched.

Counted are the operations that PyTorch dispatches and that are no views, casts among them, in
bfloat16 policies with the depths of the published pi0.5 and SmolVLA and narrow layers: the number
does not depend on widths. A CUDA graph replays the same kernels; what it saves is their launch by
the processor. A shorter prompt launches as many, and each computes less.

The predicted time, of pi0.5, is the roofline of the published size plus 4 µs a kernel, about what
one takes that is too small to fill a GPU. That attention with a mask fills few multiprocessors, and
takes longer than that, is no part of it. It is a prediction; `gpu.py` measures.

    python benchmark/kernels.py

Needs Triton, installed or beside the environment, where `./run test` puts it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partialmethod
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from parts.measurement import write_result
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1] / 'test'))
from plain_lengths import attend_by_lengths  # isort: skip
from tiny_policy import tiny_spec, write_tiny_policy  # isort: skip
from triton_package import Launches, make_importable  # isort: skip

from vla_runtime.engines.torch import engine
from vla_runtime.engines.torch.engine import LENGTHS
from vla_runtime.family.declaration import with_cameras
from vla_runtime.family.listing import performance_figures, preset
from vla_runtime.family.performance_figures import Kernels
from vla_runtime.models.base.expert_network import ExpertNetwork
from vla_runtime.models.base.flow_network import empty_network
from vla_runtime.models.blocks import epilogues, layers, products
from vla_runtime.models.blocks.expert import JoinedExpert
from vla_runtime.models.shapes.operation_counts import count_operations
from vla_runtime.policy import Policy
from vla_tools.performance.bench import look
from vla_tools.performance.devices import DEVICES
from vla_tools.performance.roofline import (
    SECONDS_A_KERNEL,
    Floor,
    phase_floors,
    predicted_ms,
    published_rates,
)

STEPS = 10
KINDS = ('miss', 'hit')
FAMILIES = ('pi05', 'smolvla')
# A graph would replay what it captured; what is counted runs eagerly.
AS_ON_CUDA: dict[str, Any] = {'precision': 'bfloat16', 'threads': 1, 'use_cuda_graphs': False}
PREDICTED_ON = ('h200', 'agx-orin', 'orin-nx', 'orin-nano', 'thor')
PACKAGES = ('torch', 'numpy')


# Counted as one operation, as on a GPU.
attend = torch.library.custom_op('kernels::attend', attend_by_lengths, mutates_args=())


@torch.library.custom_op('kernels::gelu', mutates_args=())
def gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Stand for a product that takes bias and GELU along."""
    return epilogues.plain_gelu(x, weight, bias)


@torch.library.custom_op('kernels::add', mutates_args={'stream'})
def add(x: Tensor, weight: Tensor, stream: Tensor) -> None:
    """Stand for a product that is added to a residual stream."""
    stream.copy_(epilogues.plain_add(x, weight, stream))


@torch.library.custom_op('kernels::rms_norm', mutates_args=())
def rms_norm(x: Tensor, scale: Tensor | None, epsilon: float) -> Tensor:
    """Stand for a GPU's own norm, which is one kernel."""
    return functional.rms_norm(x, x.shape[-1:], scale, epsilon)


EPILOGUES: dict[Any, Any] = {epilogues.gelu: gelu, epilogues.add: add}


@torch.library.custom_op('kernels::launch', mutates_args={'tensor'})
def launch_on(tensor: Tensor) -> None:
    """Stand for one launch of a Triton kernel; the result is finite."""
    tensor.zero_()


def launch(kernel: Any, args: tuple[Any, ...], options: Any) -> None:
    """Count one launch of a Triton kernel."""
    names = kernel.arg_names
    launch_on(args[names.index('result') if 'result' in names else 0])


class KernelCounter(TorchDispatchMode):
    """Count operations that compute or copy; views and allocations do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            # A cast or a reshape is a view only where nothing has to move.
            self.count += not _memory(result) <= _memory(args)
        else:
            name = func.overloadpacket.__name__
            self.count += not name.startswith(('empty', 'detach', '_local_scalar'))
            # Of a single token a second kernel adds up what parts of the keys gave.
            self.count += name == 'attend' and args[5] == 1
        return result


def _memory(tree: Any) -> set[int]:
    """Addresses of the storages behind all tensors of some arguments or results."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def kernels_of(policy: Policy) -> dict[str, int]:
    """Kernels of a miss (every view new) and of a hit."""
    random = np.random.default_rng(0)
    found = {}
    # Twice: buffers allocated once are not counted.
    for _ in range(2):
        images = {
            name: random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            for name in policy.spec.camera_names
        }
        for kind in KINDS:
            with KernelCounter() as counted:
                policy.infer(look(policy.spec, dict(images)))
            found[kind] = counted.count
    return found


def phases_of(policy: Policy) -> Kernels:
    """Kernels of each phase of an all-new inference; RuntimeError: views or steps differ."""
    names = ('encode_image', 'encode_prefix', 'run_steps', '_run_step')
    parts: dict[str, list[int]] = {name: [] for name in names}
    with ExitStack() as patches:
        for name, counts in parts.items():
            counting = partialmethod(_counted, getattr(engine.TorchEngine, name), counts)
            patches.enter_context(mock.patch.object(engine.TorchEngine, name, counting))
        kernels = kernels_of(policy)
    views, steps = policy.spec.dims.cameras, policy.spec.denoise_steps
    vision, step = (
        set(parts[name][-count:]) for name, count in ((names[0], views), (names[3], steps))
    )
    if len(vision) != 1 or len(step) != 1:
        raise RuntimeError(f'kernels of single views {vision}, of single denoise steps {step}')
    found = Kernels(
        vision=vision.pop(),
        # Keys and values are laid out for the steps where a new prefix was computed.
        prefix=parts['encode_prefix'][-1] + parts['run_steps'][-2] - parts['run_steps'][-1],
        step=min(step),
        inputs=kernels['hit'] - steps * min(step),
    )
    phases = found.phases(views=views, steps=steps)
    if {kind: phases[kind] for kind in KINDS} != kernels:
        raise RuntimeError(f'{found} are not the {kernels} of a chunk')
    return found


def _counted(self: Any, whole: Any, counts: list[int], *args: Any, **options: Any) -> Any:
    with KernelCounter() as counted:
        result = whole(self, *args, **options)
    counts.append(counted.count)
    return result


def write_deep(name: str, folder: Path) -> Path:
    """Write a narrow policy with the depths of a published one."""
    family, published = preset(name)
    narrow = tiny_spec(family)
    dims, of_size = narrow.dims, cast(Any, published)
    parts = {
        part: replace(getattr(dims, part), depth=getattr(of_size, part).depth)
        for part in ('vision', 'language', 'expert')
    }
    deep = cast(Any, replace(dims, **parts))
    return write_tiny_policy(folder, replace(narrow, dims=deep, denoise_steps=STEPS))


def packed_kernels(bundle: Path, expert_type: type = JoinedExpert) -> Kernels:
    """Kernels of joined layers with attention by lengths and epilogues."""
    with (
        mock.patch.object(engine, 'captures_graphs', lambda device: True),
        mock.patch.object(ExpertNetwork, 'lengths_kernel', staticmethod(attend)),
        mock.patch.object(products, 'usable', lambda wanted, *of: EPILOGUES[wanted]),
        mock.patch.object(layers, 'norms_at_once', lambda x: True),
        mock.patch.object(layers, 'normalise_rms', rms_norm),
        mock.patch.object(ExpertNetwork, 'expert_type', expert_type),
    ):
        return phases_of(Policy.load(bundle, 'torch', **AS_ON_CUDA))


def triton_kernels(bundle: Path) -> Kernels:
    """As `packed_kernels`, the expert's layers in Triton kernels."""
    from vla_runtime.models.triton import expert as triton_expert
    from vla_runtime.models.triton import step as triton_step

    with ExitStack() as patches:
        for module in (triton_expert, triton_step):
            counted = Launches(module.kernels, launch)
            patches.enter_context(mock.patch.object(module, 'kernels', counted))
        return packed_kernels(bundle, triton_expert.TritonExpert)


def kernels_of_layers(name: str) -> tuple[int, dict[str, Kernels]]:
    """Views of a policy, and its kernels with plain, joined and packed layers, and in Triton."""
    with tempfile.TemporaryDirectory() as work:
        bundle = write_deep(name, Path(work) / 'deep')
        network = type(empty_network(*cast(Any, preset(name))))
        with mock.patch.object(network, 'join', lambda network, static_shapes: None):
            policy = Policy.load(bundle, 'torch', **AS_ON_CUDA)
            found = {'plain': phases_of(policy)}
        with mock.patch.object(engine, 'captures_graphs', lambda device: True):
            found['joined'] = phases_of(Policy.load(bundle, 'torch', **AS_ON_CUDA))
        found['packed'] = packed_kernels(bundle)
        found['triton'] = triton_kernels(bundle)
    return policy.spec.dims.cameras, found


def prediction(
    device: str, views: int, kernels: Mapping[str, Kernels]
) -> dict[str, dict[str, float]]:
    """Roofline of pi0.5's published size in bfloat16, and the prediction for each kind of layers.

    Milliseconds of each phase: floor, each kind, and a packed miss with each shorter prompt.
    """
    family, dims = preset('pi05')
    published = with_cameras(dims, views)
    rates = published_rates(DEVICES[device], 'bfloat16')

    def floors(prompt_length: int) -> dict[str, Floor]:
        counts = count_operations(family, replace(published, prompt_length=prompt_length))
        return phase_floors(counts, rates, precision='bfloat16', rows=1, steps=STEPS, views=views)

    whole = floors(published.prompt_length)
    found = {'floor': {phase: one.milliseconds for phase, one in whole.items()}}
    for name, one in kernels.items():
        found[name] = predicted_ms(whole, one, views=views, steps=STEPS)
    for length in LENGTHS:
        if length < published.prompt_length:
            # The head keeps its length.
            saved = whole['prefix'].milliseconds - floors(length)['prefix'].milliseconds
            shorter = f'packed, prompt of at most {length} tokens'
            found[shorter] = {'miss': found['packed']['miss'] - saved}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--json', type=Path, help='write here instead of to benchmark/results/')
    arguments = parser.parse_args()
    make_importable()
    of_family = {family: kernels_of_layers(family) for family in FAMILIES}
    for family, (_, kernels) in of_family.items():
        found = {'torch': kernels['packed'], 'triton': kernels['triton']}
        if found != performance_figures(family).kernels:
            print(f'kernels in the declaration.py of {family} are out of date: {found}')
    counted = {
        family: {
            'views': views,
            'kernels': {
                name: {**asdict(one), **{k: one.phases(views=views, steps=STEPS)[k] for k in KINDS}}
                for name, one in kernels.items()
            },
        }
        for family, (views, kernels) in of_family.items()
    }
    views, kernels = of_family['pi05']
    predicted = {key: prediction(key, views, kernels) for key in PREDICTED_ON}
    print('kernels', counted)
    for key, times in predicted.items():
        print(key, {n: {k: round(v, 2) for k, v in of.items()} for n, of in times.items()})
    figures = {
        'denoise_steps': STEPS,
        **counted['pi05'],
        'smolvla': counted['smolvla'],
        'predicted_ms': predicted,
        'seconds_a_kernel': SECONDS_A_KERNEL,
    }
    print(write_result('kernels', figures, PACKAGES, arguments.json))


if __name__ == '__main__':
    main()

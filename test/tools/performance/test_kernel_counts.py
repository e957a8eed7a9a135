"""Kernels that `roofline` predicts with are those of today's modules.

Counted are the operations that PyTorch dispatches and that are no views, casts among them, in
bfloat16 policies with the depths of the published pi0.5 and SmolVLA and narrow layers: the number
does not depend on widths. Packed are the fused modules where the kernel is usable that takes
lengths instead of a mask, products take GELU or the residual stream along, and a norm is one
kernel: those run on a GPU of today in bfloat16. In Triton are the packed ones with the expert's
layers in Triton kernels, which are counted instead of launched. A CUDA graph replays the same
kernels.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from plain_lengths import attend_by_lengths
from tiny_policy import tiny_spec, write_tiny_policy
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton_package import Launches, interpreted, needs_triton  # noqa: F401

from vla_runtime.engines.torch import engine
from vla_runtime.families.blocks import epilogues, fused, fused_product
from vla_runtime.families.blocks.fused_expert import FusedExpert
from vla_runtime.families.flow_network import FlowNetwork
from vla_runtime.families.pi.networks import FusedPi
from vla_runtime.families.smolvla.networks import FusedSmolVla
from vla_runtime.family.listing import performance_figures, preset, preset_names
from vla_runtime.family.performance_figures import Kernels
from vla_runtime.policy import Policy
from vla_tools.performance.bench import look

STEPS = 10
KINDS = ('miss', 'hit')
NETWORKS: dict[str, type[FlowNetwork]] = {'pi05': FusedPi, 'smolvla': FusedSmolVla}
# A graph would replay what it captured; what is counted runs eagerly.
AS_ON_CUDA: dict[str, Any] = {'precision': 'bfloat16', 'threads': 1, 'use_cuda_graphs': False}
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


def packed_kernels(name: str, bundle: Path, expert_type: type = FusedExpert) -> Kernels:
    """Kernels of the fused modules with attention by lengths and epilogues."""
    network = NETWORKS[name]
    packed = partialmethod(network.__init__, kernel=attend)
    with (
        mock.patch.object(engine, 'captures_graphs', lambda device: True),
        mock.patch.object(network, '__init__', packed),
        mock.patch.object(fused_product, 'usable', lambda wanted, *of: EPILOGUES[wanted]),
        mock.patch.object(fused, 'norms_at_once', lambda x: True),
        mock.patch.object(fused, 'normalise_rms', rms_norm),
        mock.patch.object(network, 'expert_type', expert_type),
    ):
        return phases_of(Policy.load(bundle, 'torch', **AS_ON_CUDA))


def triton_kernels(name: str, bundle: Path) -> Kernels:
    """As `packed_kernels`, the expert's layers in Triton kernels."""
    from vla_runtime.families.blocks import triton_expert, triton_step

    with ExitStack() as patches:
        for module in (triton_expert, triton_step):
            counted = Launches(module.kernels, launch)
            patches.enter_context(mock.patch.object(module, 'kernels', counted))
        return packed_kernels(name, bundle, triton_expert.TritonExpert)


COUNTED = {
    name: counted for name in preset_names() if (counted := performance_figures(name).kernels)
}


@pytest.mark.thorough
@pytest.mark.parametrize('name', list(COUNTED))
def test_counts_of_the_roofline_are_those_of_todays_modules(name, tmp_path):
    bundle = write_deep(name, tmp_path / 'deep')
    assert packed_kernels(name, bundle) == COUNTED[name]['torch']


@needs_triton
@pytest.mark.usefixtures('interpreted')
@pytest.mark.parametrize('name', list(COUNTED))
def test_counts_in_triton_kernels_are_those_of_todays_modules(name, tmp_path):
    bundle = write_deep(name, tmp_path / 'deep')
    assert triton_kernels(name, bundle) == COUNTED[name]['triton']

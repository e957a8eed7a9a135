"""Compile the kernels of an expert's layers for NVIDIA's GPUs, without having one.

    compile_triton.py FAMILY CAPABILITY DTYPE

FAMILY at its published size, two prompt rows; CAPABILITY as 90 for an H100; DTYPE as bfloat16. The
steps are those with one flow time and those with one for each action (`rtc_mode: hard_prefix`).
Prints a JSON object a kernel: its name, the memory that its programs share and may share (bytes),
the columns of tensor memory, and what its threads spill from registers (bytes).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[3]))
from triton_package import Launches  # isort: skip

from vla_runtime.family.listing import preset
from vla_runtime.models.base.flow_network import empty_network
from vla_runtime.models.base.flow_step import DenoiseStep
from vla_runtime.models.triton import expert as triton_expert
from vla_runtime.models.triton import step as triton_step

TYPES = {
    torch.float32: '*fp32',
    torch.bfloat16: '*bf16',
    torch.uint8: '*u8',
    torch.int32: '*i32',
}
# Bytes that a program may share, as CUDA's programming guide has them by compute capability: A100,
# Orin, H100, B200, Thor, RTX 50.
SHARED = {
    80: 163 * 1024,
    87: 163 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    110: 227 * 1024,
    120: 99 * 1024,
}
TOOLS = Path(triton.__file__).parent / 'backends' / 'nvidia' / 'bin'


Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


@torch.inference_mode()
def launches_of(family: str, dtype: torch.dtype) -> list[list[Launch]]:
    """The launches of each form of a step over a prefix, on PyTorch's device without numbers."""
    dims = preset(family)[1]
    network = empty_network(preset(family)[0], dims).to(dtype)
    # As in every precision.
    for projection in (
        network.action_in,
        network.action_out,
        getattr(network, 'state_projection', None),
    ):
        if projection is not None:
            projection.float()
    network.join(static_shapes=True)
    network.expert_type = triton_expert.TritonExpert
    rows, like = 2, {'device': 'meta', 'dtype': dtype}
    expert, length = dims.expert, dims.prefix_length
    shape = (rows, expert.num_kv_heads, length, expert.head_dim)
    kinds = {'past': expert.depth}
    if family == 'smolvla':
        kinds = {'self': len(dims.self_layers), 'cross': len(dims.cross_layers)}
    past = {
        f'{kind}_{part}': torch.empty(layers, *shape, **like)
        for kind, layers in kinds.items()
        for part in ('key', 'value')
    }
    past['prefix_mask'] = torch.ones(rows, length, dtype=torch.bool, device='meta')
    made: list[list[Launch]] = []
    for module in (triton_expert, triton_step):
        module.kernels = Launches(module.kernels, lambda *launch: made[-1].append(launch))
    x = torch.empty(1, dims.horizon, dims.action_dim, device='meta')
    one = network.time_conditioning(torch.empty(1, device='meta'))
    for conditioning in (one, one.expand(1, dims.horizon, -1)):
        made.append([])
        number, state = (
            torch.empty(shape, device='meta') for shape in ((), (rows, dims.state_dim))
        )
        DenoiseStep(network)(
            x,
            network.prepare_prefix(past),
            network.split_conditioning(conditioning),
            number,
            number,
            torch.empty(rows, device='meta'),
            torch.empty_like(x),
            torch.empty(1, dims.horizon, 1, device='meta'),
            {'state': state},
        )
    return made


def compiled(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], capability: int) -> Any:
    """Compile a launch as Triton would when it is made: with what it knows of the arguments."""
    given = dict(zip(kernel.arg_names, args, strict=False))
    constants = {name: options[name] for name in kernel.arg_names if name in options}
    signature, known = {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = given.get(name)
        if name in constants:
            signature[name] = 'constexpr'
        elif isinstance(value, Tensor):
            signature[name] = TYPES[value.dtype]
        elif value == 1 and isinstance(value, int):
            signature[name], constants[name] = 'constexpr', 1
        else:
            signature[name] = 'fp32' if isinstance(value, float) else 'i32'
        aligned = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
        if aligned and signature[name] != 'constexpr':
            known[place,] = [['tt.divisibility', 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=known)
    chosen = {name: options[name] for name in ('num_warps', 'num_stages') if name in options}
    return triton.compile(source, target=GPUTarget('cuda', capability, 32), options=chosen)


def spilled(cubin: bytes) -> int:
    """Bytes of stack that a thread needs, of NVIDIA's own tool."""
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(cubin)
        file.flush()
        tool = [str(TOOLS / 'cuobjdump'), '-res-usage', file.name]
        text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r'STACK:(\d+)', text)[-1])


def main() -> None:
    family, capability, dtype = sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3])
    forms = launches_of(family, dtype)
    seen = set()
    for kernel, args, options in (launch for form in forms for launch in form):
        key = (
            kernel.fn.__name__,
            *options.items(),
            *(a for a in args if not isinstance(a, Tensor)),
        )
        if key in seen:
            continue
        seen.add(key)
        binary = compiled(kernel, args, options, capability)
        found = {
            'kernel': kernel.fn.__name__,
            'shared': binary.metadata.shared,
            'may_share': SHARED[capability],
            'tensor_columns': getattr(binary.metadata, 'tmem_size', None) or 0,
            'spilled': spilled(binary.asm['cubin']),
        }
        print(json.dumps(found), flush=True)
    print(json.dumps({'launches': [len(form) for form in forms]}))


if __name__ == '__main__':
    main()

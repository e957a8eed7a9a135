"""Time and memory of BitVLA's ternary weights on a CPU, beside the same network in bfloat16.

    python benchmark/ternary.py [--blocks 2] [--rounds 3]

Weights are random, at the published widths; --blocks says how many blocks of language model and
tower are timed. In bfloat16
every ternary layer is a plain linear layer of the same weights times their scale: oneDNN's products
of two bfloat16 numbers, attention in bfloat16, nothing rounded to 8 bits. An inference is two
images, prompt and action head. Memory is that of a process which loads one of the two, at the
published depth. Times are those of the CPU, both by turns in one process with one thread, so that
other work on the machine matters little.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from parts.measurement import in_turn, median_ratio, write_result
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.bitvla import networks
from vla_runtime.families.bitvla.declaration import BITVLA, BitVlaDims
from vla_runtime.families.blocks.layers import matrix_names
from vla_runtime.families.blocks.ternary import (
    TernaryLinear,
    apply_together,
    multiplies_bytes,
    unpack,
)
from vla_runtime.families.flow_network import FlowNetwork, empty_network

KINDS = ('ternary', 'bfloat16')
PACKAGES = ('torch', 'numpy')
_SEED, _PROMPT, _DRAWN = 0, 70, (1 << 20) + 7


class Dense(nn.Module):
    """A ternary layer as a linear layer in bfloat16."""

    def __init__(self, layer: TernaryLinear) -> None:
        super().__init__()
        weights = unpack(layer.packed, layer.in_features)
        self.weight = weights.to(torch.bfloat16).mul_(layer.weight_scale.to(torch.bfloat16))
        self.bias = None if layer.bias is None else layer.bias.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(torch.bfloat16), self.weight, self.bias)


def make(kind: str, dims: BitVlaDims) -> FlowNetwork:
    """A network with random weights; both kinds have the same, up to bfloat16."""
    # The same numbers again and again: to draw all takes longer than what is measured.
    normal = np.random.default_rng(_SEED).normal(0.0, 0.02, _DRAWN).astype(np.float32)
    pairs = np.random.default_rng(_SEED).integers(0, 256, _DRAWN).astype(np.uint8)
    # Pairs of bits that stand for a weight: 0, 1 and 3.
    pairs = (pairs & 0b01010101) | (pairs & (pairs << 1) & 0b10101010)
    network = empty_network('bitvla', dims).eval().requires_grad_(False)
    matrices = matrix_names(network)
    state = {}
    for name, like in network.state_dict().items():
        if not like.is_floating_point():
            state[name] = torch.from_numpy(np.resize(pairs, like.shape))
        elif name.endswith('weight_scale'):
            state[name] = torch.tensor(0.03)
        else:
            dtype = torch.bfloat16 if name in matrices else torch.float32
            state[name] = torch.from_numpy(np.resize(normal, like.shape)).to(dtype)
            if 'norm' in name and name.endswith('weight'):
                state[name] += 1.0
    network.load_state_dict(state, assign=True)
    if kind == 'bfloat16':
        for module in list(network.modules()):
            for name, layer in list(module.named_children()):
                if isinstance(layer, TernaryLinear):
                    setattr(module, name, Dense(layer))
    return network


def together(layers: Any, x: Tensor) -> list[Tensor]:
    """`apply_together` of either kind."""
    if isinstance(layers[0], TernaryLinear):
        return apply_together(layers, x)
    rounded = x.to(torch.bfloat16)
    return [layer(rounded) for layer in layers]


def inputs(dims: BitVlaDims) -> Mapping[str, Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    size = dims.image_size
    return {
        'pixels': torch.rand(dims.cameras, 3, size, size, generator=generator) * 2 - 1,
        'tokens': torch.randint(0, 1000, (1, dims.prompt_length), generator=generator),
        'token_mask': torch.arange(dims.prompt_length)[None] < _PROMPT,
        'state': torch.rand(1, dims.state_dim, generator=generator) * 2 - 1,
    }


def runner(network: FlowNetwork, dims: BitVlaDims) -> Callable[[], dict[str, float]]:
    """An inference that returns the seconds of its phases."""
    given = dict(inputs(dims))
    pixels, seen = given.pop('pixels'), torch.ones(dims.cameras, dtype=torch.bool)

    def run() -> dict[str, float]:
        times = [time.process_time()]
        with torch.inference_mode():
            tokens = torch.cat([network.vision(image[None]) for image in pixels])
            times.append(time.process_time())
            past = network.prefix(tokens, seen, **given)
            times.append(time.process_time())
            actions = network.actions(past)
            times.append(time.process_time())
        assert actions.isfinite().all()
        phases = np.diff(times)
        return dict(zip(('vision', 'prefix', 'head'), map(float, phases), strict=True)) | {
            'all': float(phases.sum())
        }

    return run


def held_bytes(network: FlowNetwork) -> int:
    """Bytes of a network's weights in memory."""
    tensors = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for module in network.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values(), *_plain(module))
        if tensor is not None
    }
    return sum(tensors.values())


def _plain(module: nn.Module) -> list[Tensor | None]:
    return [module.weight, module.bias] if isinstance(module, Dense) else []


def memory(kind: str) -> dict[str, int]:
    """Memory of one kind at the published depth, in this process."""
    bare = resident()
    network = make(kind, BITVLA)
    return {'weights': held_bytes(network), 'loaded': resident() - bare}


def resident() -> int:
    """Bytes of this process in memory."""
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--blocks', type=int, default=2)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--only', choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    dims = replace(
        BITVLA,
        language=replace(BITVLA.language, depth=arguments.blocks),
        vision=replace(BITVLA.vision, depth=min(arguments.blocks, BITVLA.vision.depth)),
    )
    networks.apply_together = networks.apply_together = together
    if arguments.only:
        print(json.dumps(memory(arguments.only)))
        return
    torch.set_num_threads(1)
    words = [sys.executable, __file__, '--only']
    held = {
        kind: json.loads(subprocess.run([*words, kind], check=True, capture_output=True).stdout)
        for kind in KINDS
    }
    runs = {kind: runner(make(kind, dims), dims) for kind in KINDS}
    times: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for round_ in range(-1, arguments.rounds):
        for kind in in_turn(KINDS, round_ + 1):
            found = runs[kind]()
            # The first of each is not counted.
            print(kind, found, flush=True)
            if round_ >= 0:
                times[kind].append(found)
    figures: dict[str, Any] = {
        'blocks': arguments.blocks,
        'products_of_bytes': multiplies_bytes(),
        'memory_bytes': held,
        'memory_ratio': {
            name: held['ternary'][name] / held['bfloat16'][name] for name in held['ternary']
        },
        'seconds': {
            kind: {name: float(np.median([one[name] for one in found])) for name in found[0]}
            for kind, found in times.items()
        },
        'time_ratio': {
            name: median_ratio(*([one[name] for one in times[kind]] for kind in KINDS))
            for name in times['ternary'][0]
        },
    }
    print(json.dumps(figures, indent=1))
    write_result('ternary', figures, PACKAGES)


if __name__ == '__main__':
    main()

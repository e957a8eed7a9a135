"""A folder of OpenVLA at its published size, in shards, for `export_memory.py openvla`.

A folder as openvla/openvla-7b has it, in bfloat16, with the published names of all tensors: random
numbers at the beginning of each, zeros behind them, which take no room on the disk.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from parts.measurement import Target

from vla_runtime.families.blocks.dimensions import VisionDims
from vla_runtime.families.openvla.declaration import OPENVLA

# As many bytes of each tensor are random.
_DRAWN = 4096
_SHARD_BYTES = 7 << 30
_MOST_GIB = 3.0
_EXPORT = 'import sys; from vla_runtime.cli.main import main; sys.exit(main())'
_ACTIONS = ('dx', 'dy', 'dz', 'drx', 'dry', 'drz', 'grip')
Shape = tuple[int, ...]


def tower(prefix: str, dims: VisionDims, registers: int | None) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of a tower in timm's words, with the last block, which nothing reads."""
    width = dims.width
    if registers is not None:
        yield f'{prefix}cls_token', (1, 1, width)
        yield f'{prefix}reg_token', (1, registers, width)
    yield f'{prefix}pos_embed', (1, dims.tokens, width)
    yield f'{prefix}patch_embed.proj.weight', (width, 3, dims.patch_size, dims.patch_size)
    yield f'{prefix}patch_embed.proj.bias', (width,)
    layers = {
        'attn.qkv': (3 * width, width),
        'attn.proj': (width, width),
        'mlp.fc1': (dims.mlp_dim, width),
        'mlp.fc2': (width, dims.mlp_dim),
    }
    for number in range(dims.depth + 1):
        block = f'{prefix}blocks.{number}.'
        for name, shape in layers.items():
            yield f'{block}{name}.weight', shape
            yield f'{block}{name}.bias', shape[:1]
        for name in ('norm1', 'norm2'):
            yield f'{block}{name}.weight', (width,)
            yield f'{block}{name}.bias', (width,)
        if registers is not None:
            yield f'{block}ls1.scale_factor', (width,)
            yield f'{block}ls2.scale_factor', (width,)
    yield f'{prefix}norm.weight', (width,)
    yield f'{prefix}norm.bias', (width,)


def tensors() -> dict[str, Shape]:
    """Names and shapes of all tensors of the published folder."""
    d = OPENVLA
    joint, language = d.dino.width + d.siglip.width, d.language
    width, found = language.width, dict[str, Shape]()
    found |= dict(tower('vision_backbone.featurizer.', d.dino, d.dino_registers))
    found |= dict(tower('vision_backbone.fused_featurizer.', d.siglip, None))
    hidden = d.projector_dim
    for name, shape in (('fc1', (hidden, joint)), ('fc2', (width, hidden)), ('fc3', (width,) * 2)):
        found |= {f'projector.{name}.weight': shape, f'projector.{name}.bias': shape[:1]}
    found['language_model.model.embed_tokens.weight'] = (d.vocabulary, width)
    for number in range(language.depth):
        layer = f'language_model.model.layers.{number}.'
        for name in ('q', 'k', 'v', 'o'):
            found[f'{layer}self_attn.{name}_proj.weight'] = (width, width)
        found[f'{layer}mlp.gate_proj.weight'] = (language.mlp_dim, width)
        found[f'{layer}mlp.up_proj.weight'] = (language.mlp_dim, width)
        found[f'{layer}mlp.down_proj.weight'] = (width, language.mlp_dim)
        found[f'{layer}input_layernorm.weight'] = (width,)
        found[f'{layer}post_attention_layernorm.weight'] = (width,)
    found['language_model.model.norm.weight'] = (width,)
    found['language_model.lm_head.weight'] = (d.vocabulary, width)
    return found


def write_shards(folder: Path) -> tuple[int, int]:
    """Write the weights and their index; return how many numbers and shards there are."""
    shards: list[dict[str, Shape]] = [{}]
    filled = 0
    for name, shape in tensors().items():
        size = 2 * math.prod(shape)
        if filled + size > _SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    random = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f'model-{number:05}-of-{len(shards):05}.safetensors'
        header, end = {}, 0
        for name, shape in shard.items():
            size = 2 * math.prod(shape)
            header[name] = {'dtype': 'BF16', 'shape': shape, 'data_offsets': [end, end + size]}
            end += size
            weight_map[name] = file
        text = json.dumps(header).encode()
        text += b' ' * (-len(text) % 8)
        with (folder / file).open('wb') as out:
            out.write(struct.pack('<Q', len(text)) + text)
            start = out.tell()
            for one in header.values():
                low, high = one['data_offsets']
                count = min(_DRAWN, high - low) // 2
                drawn = random.standard_normal(count, dtype=np.float32) * np.float32(0.02)
                out.seek(start + low)
                out.write((drawn.view(np.uint32) >> 16).astype(np.uint16).tobytes())
            out.truncate(start + end)
    index = {'metadata': {'total_size': 0}, 'weight_map': weight_map}
    (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
    return sum(map(math.prod, tensors().values())), len(shards)


def write_folder(folder: Path, tokenizer: Path) -> tuple[int, int]:
    """Write the whole folder."""
    folder.mkdir(parents=True)
    counts = write_shards(folder)
    shutil.copyfile(tokenizer, folder / 'tokenizer.json')
    action = {'q01': [-1.0] * 7, 'q99': [1.0] * 7, 'mask': [True] * 6 + [False]}
    config = {
        'arch_specifier': 'no-align+fused-gelu-mlp',
        'image_resize_strategy': 'resize-naive',
        'model_type': 'openvla',
        'n_action_bins': OPENVLA.action_bins,
        'norm_stats': {'bridge_orig': {'action': action}},
        'pad_to_multiple_of': 64,
        'text_config': {'model_type': 'llama', 'vocab_size': OPENVLA.vocabulary},
        'timm_override_act_layers': [None, None],
        'use_fused_vision_backbone': True,
    }
    (folder / 'config.json').write_text(json.dumps(config))
    edge = OPENVLA.image_size
    preprocessor = {
        'image_resize_strategy': 'resize-naive',
        'input_sizes': [[3, edge, edge]] * 2,
        'interpolations': ['bicubic', 'bicubic'],
        'means': [OPENVLA.dino_mean, OPENVLA.siglip_mean],
        'stds': [OPENVLA.dino_std, OPENVLA.siglip_std],
        'use_fused_vision_backbone': True,
    }
    (folder / 'preprocessor_config.json').write_text(json.dumps(preprocessor))
    return counts


def measure(
    work: Path, tokenizer: Path, watched: Callable[[list[str]], dict[str, Any]]
) -> dict[str, Any]:
    """Export the folder in a process that is watched, and remove what was written.

    Args:
        work: folder with 16 GB of room.
        tokenizer: a tokenizer.json in Llama's layout.
        watched: runs a command and returns its peaks.
    """
    folder, bundle = work / 'openvla-7b', work / 'openvla_bundle'
    try:
        numbers, shards = write_folder(folder, tokenizer)
        command = [sys.executable, '-c', _EXPORT, 'export', str(folder), '--out', str(bundle)]
        command += ['--onnx-precision', 'none', '--rate-hz', '5', '--absolute', '--units', '1']
        command += ['--state-names', 'x,y,z', '--action-names', ','.join(_ACTIONS)]
        found = watched(command)
        written = (bundle / 'weights.safetensors').stat().st_size
    finally:
        for made in (folder, bundle):
            shutil.rmtree(made, ignore_errors=True)
    print(Target('memory asked for, GiB', _MOST_GIB, found['anonymous'] / 2**30).line)
    return {'parameters': numbers, 'shards': shards, 'bundle_bytes': written, **found}

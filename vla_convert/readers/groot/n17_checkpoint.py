"""Sizes of GR00T N1.7, read off its tensors, its backbone's config.json and the options.

Its backbone is nvidia/Cosmos-Reason2-2B, a Qwen3-VL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_convert.checkpoints.folder_facts import FolderFacts
from vla_convert.checkpoints.reader import MakeDims, Source
from vla_convert.checkpoints.tensors import CheckpointError
from vla_convert.readers.block_sizes import Shapes
from vla_convert.readers.groot.n17_folder import network_image
from vla_convert.readers.groot.sizes import (
    BackboneModel,
    alternating_sizes,
    rope_base,
    stack_dims,
    whole_numbers,
)
from vla_runtime.families.groot.declaration import N17_PROMPT
from vla_runtime.families.groot.n17_dimensions import (
    FRAMES,
    GROOT_N17,
    GrootN17Dims,
    QwenVisionDims,
)
from vla_runtime.files.json_file import JsonMapping, read_json

# How the backbone's images are resized, beside its config.json, and what the published file says.
_PREPROCESSOR_FILE = 'preprocessor_config.json'
_LEAST_PIXELS = 65536


@dataclass(frozen=True)
class _Backbone:
    """Settings of the backbone that no tensor shows."""

    vision_heads: int
    deepstack: tuple[int, ...]
    rope_sections: tuple[int, int, int]
    rope_base: float
    rms_epsilon: float
    least_pixels: int


def n17_sizes(source: Source) -> MakeDims | None:
    """As `CheckpointReader.sizes`."""
    return alternating_sizes(source, _MODEL, _dims)


def _stated_backbone(config: JsonMapping) -> _Backbone:
    text, vision = config.mapping('text_config'), config.mapping('vision_config')
    rope = text.mapping('rope_parameters', optional=True)
    if not rope.values:
        rope = text.mapping('rope_scaling')
    sections = whole_numbers(rope, 'mrope_section')
    deepstack = whole_numbers(vision, 'deepstack_visual_indexes')
    if len(sections) != 3:
        raise rope.error('mrope_section', f'{sections} where three numbers are expected')
    return _Backbone(
        vision_heads=vision.count('num_heads'),
        # Ours count from 1.
        deepstack=tuple(index + 1 for index in deepstack),
        rope_sections=(sections[0], sections[1], sections[2]),
        rope_base=rope_base(text),
        rms_epsilon=float(text.get('rms_norm_eps', float)),
        least_pixels=_least_pixels(config.path.with_name(_PREPROCESSOR_FILE)),
    )


def _least_pixels(path: Path) -> int:
    """Pixels that smaller images are enlarged to, from the file where there is one."""
    if not path.is_file():
        return _LEAST_PIXELS
    settings = read_json(path)
    size = settings.mapping('size', optional=True)
    return int(settings.get('min_pixels', int, size.get('shortest_edge', int, _LEAST_PIXELS)))


_MODEL = BackboneModel(
    policies='GR00T N1.7',
    prompt=N17_PROMPT,
    published=GROOT_N17,
    settings=_Backbone(
        GROOT_N17.vision.num_heads,
        GROOT_N17.vision.deepstack,
        GROOT_N17.rope_sections,
        GROOT_N17.rope_base,
        GROOT_N17.rms_epsilon,
        _LEAST_PIXELS,
    ),
    patch_axes=5,
    stated=_stated_backbone,
    wanted='tokenizer.json of nvidia/Cosmos-Reason2-2B, from the Hugging Face Hub, with its '
    'config.json beside it',
)


def _dims(
    shape: Shapes,
    backbone: _Backbone,
    heads: Mapping[str, int],
    facts: FolderFacts,
    common: dict[str, Any],
) -> GrootN17Dims:
    vision = _vision(shape, backbone)
    return GrootN17Dims(
        vision=vision,
        image=network_image(facts, vision.patch_size * vision.merge, backbone.least_pixels),
        rope_sections=backbone.rope_sections,
        context=stack_dims(shape, 'context', heads['context']) if 'context' in heads else None,
        rope_base=backbone.rope_base,
        rms_epsilon=backbone.rms_epsilon,
        **common,
    )


def _vision(shape: Shapes, backbone: _Backbone) -> QwenVisionDims:
    width, channels, frames, patch, across = shape('vision.patch_embedding.weight', 5)
    positions, _ = shape('vision.position_embedding', 2)
    side = math.isqrt(positions)
    _, joined = shape('vision.merger.fc1.weight', 2)
    merge = math.isqrt(joined // width)
    if (channels, frames, across, side**2, width * merge**2) != (
        3,
        FRAMES,
        patch,
        positions,
        joined,
    ):
        raise CheckpointError(
            f'the vision tower has {channels} channels, {frames} frames, patches of '
            f'{patch}x{across}, {positions} positions and joins {joined} numbers; expected 3 '
            f'channels, {FRAMES} frames, square patches, a square of positions, and squares of '
            f'patches of {width} numbers each'
        )
    mergers = 0
    while f'vision.deepstack.{mergers}.fc1.weight' in shape:
        mergers += 1
    if mergers != len(backbone.deepstack):
        raise CheckpointError(
            f'the checkpoint has {mergers} deepstack mergers, but its backbone '
            f'{len(backbone.deepstack)} (deepstack_visual_indexes): it is another backbone'
        )
    return QwenVisionDims(
        width=width,
        depth=shape.depth('vision.blocks'),
        num_heads=backbone.vision_heads,
        mlp_dim=shape('vision.blocks.0.mlp.fc1.weight', 2)[0],
        patch_size=patch,
        merge=merge,
        positions=side,
        deepstack=backbone.deepstack,
    )

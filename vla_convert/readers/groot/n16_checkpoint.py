"""Sizes of GR00T N1.6, read off its tensors, its backbone's config.json and the options.

Its backbone is Eagle-Block2A-2B-v2 in Isaac-GR00T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vla_convert.checkpoints.folder_facts import FolderFacts, expect
from vla_convert.checkpoints.reader import MakeDims, Source
from vla_convert.checkpoints.tensors import CheckpointError
from vla_convert.readers.block_sizes import Shapes, square_edge
from vla_convert.readers.groot.n17_folder import network_image
from vla_convert.readers.groot.sizes import (
    BackboneModel,
    alternating_sizes,
    rope_base,
    whole_numbers,
)
from vla_runtime.families.groot.declaration import N16_PROMPT
from vla_runtime.families.groot.n16_dimensions import GROOT_N16, GrootN16Dims, Siglip2Dims
from vla_runtime.files.json_file import JsonMapping

# Image tokens that a smaller image is enlarged to, and the class's defaults.
_LEAST_TOKENS = 4
_WINDOW, _FULL_ATTENTION = 14, (7, 14, 21, 26)


@dataclass(frozen=True)
class _Backbone:
    """Settings of the backbone that no tensor shows; the tower's as in `Siglip2Dims`."""

    vision_heads: int
    vision_rope_base: float | None
    window: int | None
    full_attention: tuple[int, ...]
    rope_base: float
    rms_epsilon: float


def n16_sizes(source: Source) -> MakeDims | None:
    """As `CheckpointReader.sizes`."""
    return alternating_sizes(source, _MODEL, _dims)


def _stated_backbone(config: JsonMapping) -> _Backbone:
    text, vision = config.mapping('text_config'), config.mapping('vision_config')
    # The tower's last block, and squares of patches, are what the connector reads.
    expect(config, 'select_layer', -1)
    expect(config, 'use_pixel_shuffle', True)
    window = vision.count('window_size', _WINDOW)
    full = whole_numbers(vision, 'full_attention_indexes', list(_FULL_ATTENTION))
    windows = vision.get('use_windows_attn', bool, True)
    return _Backbone(
        vision_heads=vision.count('num_attention_heads'),
        # NVIDIA's code passes the window's edge where the base is expected.
        vision_rope_base=float(window) if vision.get('use_rope', bool, True) else None,
        window=window if windows else None,
        # Ours count from 1.
        full_attention=tuple(index + 1 for index in full) if windows else (),
        rope_base=rope_base(text),
        rms_epsilon=float(text.get('rms_norm_eps', float)),
    )


_MODEL = BackboneModel(
    policies='GR00T N1.6',
    prompt=N16_PROMPT,
    published=GROOT_N16,
    settings=_Backbone(
        GROOT_N16.vision.num_heads, None, None, (), GROOT_N16.rope_base, GROOT_N16.rms_epsilon
    ),
    patch_axes=2,
    stated=_stated_backbone,
    wanted='tokenizer.json of the backbone, gr00t/model/modules/nvidia/Eagle-Block2A-2B-v2 in '
    'Isaac-GR00T, with its config.json beside it',
)


def _dims(
    shape: Shapes,
    backbone: _Backbone,
    heads: Mapping[str, int],
    facts: FolderFacts,
    common: dict[str, Any],
) -> GrootN16Dims:
    vision = _vision(shape, backbone)
    block = vision.patch_size * vision.merge
    return GrootN16Dims(
        vision=vision,
        image=network_image(facts, block, _LEAST_TOKENS * block**2),
        rope_base=backbone.rope_base,
        rms_epsilon=backbone.rms_epsilon,
        **common,
    )


def _vision(shape: Shapes, backbone: _Backbone) -> Siglip2Dims:
    width, inputs = shape('vision.patch_embedding.weight', 2)
    positions, _ = shape('vision.position_embedding', 2)
    side, patch = math.isqrt(positions), math.isqrt(inputs // 3)
    if (side**2, 3 * patch**2) != (positions, inputs):
        raise CheckpointError(
            f'the vision tower has {positions} positions and patches of {inputs} numbers; expected '
            'a square of positions, and square patches of 3 channels'
        )
    _, joined = shape('vision.connector.1.weight', 2)
    full = backbone.full_attention
    depth = shape.depth('vision.blocks')
    return Siglip2Dims(
        width=width,
        depth=depth,
        num_heads=backbone.vision_heads,
        mlp_dim=shape('vision.blocks.0.mlp.fc1.weight', 2)[0],
        patch_size=patch,
        merge=square_edge(joined, width, 'connector'),
        positions=side,
        rope_base=backbone.vision_rope_base,
        window=backbone.window,
        # The class's default names blocks that a shallower tower lacks.
        full_attention=tuple(number for number in full if number <= depth),
    )

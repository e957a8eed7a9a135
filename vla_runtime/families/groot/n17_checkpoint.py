"""Sizes of GR00T N1.7, read off its tensors, its backbone's config.json and the options.

A checkpoint does not hold what its backbone (nvidia/Cosmos-Reason2-2B, a Qwen3-VL) was built with:
heads, rotary positions, the blocks whose outputs go to the language model. They are read from the
backbone's config.json where it lies beside the tokenizer, and known for the published model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vla_runtime.checkpoints.folder_facts import CONFIG_FILE, FolderFacts
from vla_runtime.checkpoints.image_places import count_image_places
from vla_runtime.checkpoints.missing_facts import MissingFacts
from vla_runtime.checkpoints.reader import MakeDims, Source
from vla_runtime.checkpoints.tensors import CheckpointError
from vla_runtime.families.blocks.block_sizes import Shapes, checked_dims
from vla_runtime.families.groot.declaration import N17_PROMPT
from vla_runtime.families.groot.n17_dimensions import (
    FRAMES,
    GROOT_N17,
    GrootN17Dims,
    QwenVisionDims,
)
from vla_runtime.families.groot.n17_images import network_image
from vla_runtime.families.groot.stack_sizes import alternating_sizes, settle_stack_heads, stack_dims
from vla_runtime.files.json_file import JsonMapping, read_json

_WANTED = (
    'tokenizer.json of nvidia/Cosmos-Reason2-2B, from the Hugging Face Hub, with its config.json '
    'beside it'
)
_POLICIES = 'GR00T N1.7'
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
    folder, tensors, facts, options, missing = source
    shape = Shapes(tensors, _POLICIES)
    tokenizer = options.tokenizer or facts.tokenizer
    backbone = _backbone(shape, tokenizer, missing)
    parts = ('context', 'dit') if 'context.0.attention.q.weight' in shape else ('dit',)
    heads = settle_stack_heads(shape, parts, options, missing)
    if tokenizer is None or not tokenizer.is_file() or backbone is None or heads is None:
        return None
    if not facts.image_sizes:
        return None
    text_interval = text_every(folder)
    return lambda cameras, prompt_length, horizon: checked_dims(
        lambda: _dims(
            shape,
            backbone,
            heads,
            facts,
            text_interval,
            count_image_places(tokenizer, N17_PROMPT, cameras, prompt_length),
            prompt_length,
            horizon,
        )
    )


def text_every(folder: Path) -> int:
    """Interval of cross-attention blocks that read text; LeRobot's folders do not give it.

    Raises:
        CheckpointError: a DiT whose blocks all see everything.
    """
    config = read_json(folder / CONFIG_FILE)
    if not config.get('use_alternate_vl_dit', bool, True):
        raise CheckpointError(
            f'{folder / CONFIG_FILE}: use_alternate_vl_dit is false; only a DiT whose blocks take '
            'turns between text and images is supported'
        )
    return int(config.count('attend_text_every_n_blocks', GROOT_N17.text_every))


def backbone_config(tokenizer: Path | None) -> JsonMapping | None:
    """Read the backbone's config.json, where it lies beside the tokenizer."""
    beside = None if tokenizer is None else tokenizer.parent / CONFIG_FILE
    if beside is None or not beside.is_file():
        return None
    config = read_json(beside)
    return config if 'vision_config' in config and 'text_config' in config else None


def rope_settings(text: JsonMapping) -> JsonMapping:
    """Where a language model's config.json has the base of its rotary positions."""
    # transformers 5 calls it rope_parameters and puts the base inside.
    rope = text.mapping('rope_parameters', optional=True)
    return rope if 'rope_theta' in rope else text


def _backbone(shape: Shapes, tokenizer: Path | None, missing: MissingFacts) -> _Backbone | None:
    """The backbone's settings from its config.json, else the published ones; None once asked."""
    config = backbone_config(tokenizer)
    if config is not None:
        return _stated_backbone(config)
    published = GROOT_N17.vision
    width, depth = shape('vision.patch_embedding.weight', 5)[0], shape.depth('vision.blocks')
    (head_dim,) = shape('language.blocks.0.attention.k_norm.weight', 1)
    if (width, depth, head_dim) == (published.width, published.depth, GROOT_N17.language.head_dim):
        return _Backbone(
            published.num_heads,
            published.deepstack,
            GROOT_N17.rope_sections,
            GROOT_N17.rope_base,
            GROOT_N17.rms_epsilon,
            _LEAST_PIXELS,
        )
    missing.ask('--tokenizer', f'{_WANTED}: the backbone is not the published one')
    return None


def _stated_backbone(config: JsonMapping) -> _Backbone:
    """Read the backbone's settings from its config.json.

    Raises:
        JsonError: a value that is missing or of another kind.
    """
    text, vision = config.mapping('text_config'), config.mapping('vision_config')
    rope = text.mapping('rope_parameters', optional=True)
    if not rope.values:
        rope = text.mapping('rope_scaling')
    sections = rope.get('mrope_section', list)
    deepstack = vision.get('deepstack_visual_indexes', list)
    for where, key, values in (
        (rope, 'mrope_section', sections),
        (vision, 'deepstack_visual_indexes', deepstack),
    ):
        if any(type(value) is not int for value in values):
            raise where.error(key, f'{values} where whole numbers are expected')
    if len(sections) != 3:
        raise rope.error('mrope_section', f'{sections} where three numbers are expected')
    return _Backbone(
        vision_heads=vision.count('num_heads'),
        # Ours count from 1.
        deepstack=tuple(index + 1 for index in deepstack),
        rope_sections=(sections[0], sections[1], sections[2]),
        rope_base=float(rope_settings(text).get('rope_theta', (int, float))),
        rms_epsilon=float(text.get('rms_norm_eps', float)),
        least_pixels=_least_pixels(config.path.with_name(_PREPROCESSOR_FILE)),
    )


def _least_pixels(path: Path) -> int:
    """Pixels that a smaller image is enlarged to, of the file where there is one."""
    if not path.is_file():
        return _LEAST_PIXELS
    settings = read_json(path)
    size = settings.mapping('size', optional=True)
    return int(settings.get('min_pixels', int, size.get('shortest_edge', int, _LEAST_PIXELS)))


def _dims(
    shape: Shapes,
    backbone: _Backbone,
    heads: Mapping[str, int],
    facts: FolderFacts,
    text_interval: int,
    places: tuple[int, ...],
    prompt_length: int,
    horizon: int,
) -> GrootN17Dims:
    vision = _vision(shape, backbone)
    return GrootN17Dims(
        vision=vision,
        image=network_image(facts, vision.patch_size * vision.merge, backbone.least_pixels),
        rope_sections=backbone.rope_sections,
        context=stack_dims(shape, 'context', heads['context']) if 'context' in heads else None,
        rope_base=backbone.rope_base,
        rms_epsilon=backbone.rms_epsilon,
        **alternating_sizes(
            shape, heads, text_interval, places, prompt_length, horizon, facts.real_horizon
        ),
    )


def _vision(shape: Shapes, backbone: _Backbone) -> QwenVisionDims:
    """Return the sizes of the vision tower.

    Raises:
        CheckpointError: patches, positions or squares of patches that do not fit.
    """
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

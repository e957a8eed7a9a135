"""What readers of policies on Qwen3-VL (arXiv 2511.21631) with a DiT as their head share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from vla_convert.checkpoints.dims import Shapes
from vla_convert.checkpoints.tensor_names import DECODER, Rows, under
from vla_convert.checkpoints.tensors import CheckpointError
from vla_runtime.files.json_file import JsonMapping, read_json

# --- Tensor names

DIFFUSERS_BLOCK: Rows = {
    'attn1.to_{q|k|v}.*': 'attention.{q|k|v}.*',
    'attn1.to_out.0.*': 'attention.out.*',
    'ff.net.0.proj.*': 'mlp.fc1.*',
    'ff.net.2.*': 'mlp.fc2.*',
}
DIT_HEAD: Rows = {
    'position_embedding.weight': 'positions',
    'future_tokens.weight': 'future_tokens',
    **under(
        'model.transformer_blocks.{i}.',
        'dit.{i}.',
        {'norm1.linear.*': 'modulation.*', **DIFFUSERS_BLOCK},
    ),
    'model.timestep_encoder.timestep_embedder.linear_1.*': 'time_in.*',
    'model.timestep_encoder.timestep_embedder.linear_2.*': 'time_out.*',
    'model.proj_out_1.*': 'out_modulation.*',
    'model.proj_out_2.*': 'out.*',
}
QWEN3: Rows = {
    **DECODER,
    'layers.{i}.self_attn.{q|k}_norm.*': 'blocks.{i}.attention.{q|k}_norm.*',
}
_MERGER = {'norm.*': 'norm.*', 'linear_fc{1|2}.*': 'fc{1|2}.*'}
QWEN_TOWER: Rows = {
    'pos_embed.weight': 'position_embedding',
    'patch_embed.proj.*': 'patch_embedding.*',
    'blocks.{i}.norm{1|2}.*': 'blocks.{i}.norm{1|2}.*',
    'blocks.{i}.attn.qkv.{weight|bias}': 'blocks.{i}.attention.{q,k,v}.{weight|bias}',
    'blocks.{i}.attn.proj.*': 'blocks.{i}.attention.out.*',
    'blocks.{i}.mlp.linear_fc{1|2}.*': 'blocks.{i}.mlp.fc{1|2}.*',
    **under('merger.', 'merger.', _MERGER),
    **under('deepstack_merger_list.{i}.', 'deepstack.{i}.', _MERGER),
}

# --- Settings of its config.json, and the size of its images


# How its images are resized: files of transformers 4, and of 5.
_PROCESSOR_FILES = ('preprocessor_config.json', 'processor_config.json')
# Pixels that the published models enlarge smaller images to.
_LEAST_PIXELS = 65536


def read_qwen(config: JsonMapping) -> dict[str, Any]:
    """Read what no tensor shows of its config.json (JsonError: missing, or of another kind)."""
    text, vision = config.mapping('text_config'), config.mapping('vision_config')
    rope = text.mapping('rope_parameters', optional=True)
    if not rope.values:
        rope = text.mapping('rope_scaling')
    sections = whole_numbers(rope, 'mrope_section')
    if len(sections) != 3:
        raise rope.error('mrope_section', f'{sections} where three numbers are expected')
    return {
        'vision.num_heads': vision.count('num_heads'),
        # Ours count from 1.
        'vision.deepstack': tuple(
            index + 1 for index in whole_numbers(vision, 'deepstack_visual_indexes')
        ),
        'rope_sections': tuple(sections),
        'rope_base': rope_base(text),
        'rms_epsilon': float(text.get('rms_norm_eps', float)),
    }


def check_mergers(shape: Shapes, deepstack: tuple[int, ...]) -> None:
    mergers = 0
    while f'vision.deepstack.{mergers}.fc1.weight' in shape:
        mergers += 1
    if mergers != len(deepstack):
        raise CheckpointError(
            f'the checkpoint has {mergers} deepstack mergers, but its backbone {len(deepstack)} '
            '(deepstack_visual_indexes): it is another backbone'
        )


def rope_base(text: JsonMapping) -> float:
    """Base of the rotary positions in a language model's config.json."""
    # transformers 5 calls it rope_parameters and puts the base inside.
    rope = text.mapping('rope_parameters', optional=True)
    return float((rope if 'rope_theta' in rope else text).get('rope_theta', (int, float)))


def whole_numbers(where: JsonMapping, key: str, *default: list[int]) -> list[int]:
    """Read a list of whole numbers (JsonError for anything else)."""
    values: list[int] = where.get(key, list, *default)
    if any(type(value) is not int for value in values):
        raise where.error(key, f'{values} where whole numbers are expected')
    return values


def processor_beside(file: Path) -> Path | None:
    """Settings of the image processor beside a file; None: there are none."""
    paths = (file.with_name(name) for name in _PROCESSOR_FILES)
    return next((path for path in paths if path.is_file()), None)


def pixel_limits(beside: Path | None) -> tuple[int, int | None]:
    """Return the least and the most pixels of an image, of the processor beside a file.

    Without one those of the published models, which have no use for the most.
    """
    path = None if beside is None else processor_beside(beside)
    if path is None:
        return _LEAST_PIXELS, None
    settings = read_json(path)
    settings = settings.mapping('image_processor') if 'image_processor' in settings else settings
    size = settings.mapping('size', optional=True)
    least = settings.get('min_pixels', int, size.get('shortest_edge', int, _LEAST_PIXELS))
    return least, settings.get('max_pixels', int, size.get('longest_edge', int, None))


def smart_size(
    size: tuple[int, int], block: int, least: int, most: int | None = None
) -> tuple[int, int]:
    """Return height and width of an image of this size after Qwen's `smart_resize`.

    `block`: edge of an image token in pixels; `least`, `most`: pixels that smaller images are
    enlarged to and larger ones shrunk to.
    """
    # Python's round, to even.
    height, width = (block * round(edge / block) for edge in size)
    if most is not None and height * width > most:
        scale = math.sqrt(size[0] * size[1] / most)
        height, width = (max(block, block * math.floor(edge / scale / block)) for edge in size)
    elif height * width < least:
        scale = math.sqrt(least / (size[0] * size[1]))
        height, width = (block * math.ceil(edge * scale / block) for edge in size)
    return height, width

"""Dimensions of GR00T N1.6 and N1.7 that no tensor shows: settings of their backbones.

N1.6 stands on Eagle-Block2A-2B-v2 of Isaac-GR00T, N1.7 on nvidia/Cosmos-Reason2-2B, a Qwen3-VL.
Heads, rotary positions and windows come from the backbone's config.json beside the tokenizer, or
from the published model.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from vla_convert.checkpoints.dims import Shapes
from vla_convert.checkpoints.folder_facts import CONFIG_FILE, expect
from vla_convert.checkpoints.reader import Source
from vla_convert.checkpoints.tensors import CheckpointError
from vla_convert.readers.qwen3_vl import (
    check_mergers,
    pixel_limits,
    read_qwen,
    rope_base,
    smart_size,
    whole_numbers,
)
from vla_runtime.declarations.groot import GROOT_N16, GROOT_N17, AlternatingDims
from vla_runtime.files.json_file import JsonMapping, read_json

# N1.6: image tokens that a smaller image is enlarged to, and the tower's defaults.
_LEAST_TOKENS = 4
_WINDOW, _FULL_ATTENTION = 14, (7, 14, 21, 26)


class _Backbone(NamedTuple):
    """Backbone of a version.

    Attributes:
        published: dimensions of the published policy.
        settings: those fields of them that no tensor shows.
        read: reads these fields in a backbone's config.json.
        least: pixels that smaller images are enlarged to, from that file, by the edge of an image
            token in pixels.
        wanted: source of the tokenizer, for the user.
    """

    published: AlternatingDims
    settings: tuple[str, ...]
    read: Callable[[JsonMapping], dict[str, Any]]
    least: Callable[[JsonMapping | None, int], int]
    wanted: str


def later_settings(source: Source, family: str) -> dict[str, Any] | None:
    """Return the fields of the dimensions that no tensor shows; None once one is asked for.

    Raises CheckpointError or JsonError: another backbone, or settings that are not supported.
    """
    folder, facts, shape = source.folder, source.facts, Shapes(source.tensors)
    backbone = _BACKBONES[family]
    tokenizer = source.options.tokenizer or facts.tokenizer
    beside = None if tokenizer is None else tokenizer.with_name(CONFIG_FILE)
    config = read_json(beside) if beside is not None and beside.is_file() else None
    if config is not None and 'vision_config' in config and 'text_config' in config:
        found = backbone.read(config)
    elif _is_published(shape, backbone.published):
        config = None
        found = {place: attrgetter(place)(backbone.published) for place in backbone.settings}
    else:
        wanted = f'{backbone.wanted}: the backbone is not the published one'
        source.missing.ask('--tokenizer', wanted)
        return None
    if 'vision.deepstack' in found:
        check_mergers(shape, found['vision.deepstack'])

    def image(values: dict[str, Any]) -> tuple[int, int]:
        block = values['vision.patch_size'] * values['vision.merge']
        (cut,) = facts.image_sizes
        return smart_size(cut, block, backbone.least(config, block))

    return {
        **found,
        'image': image,
        'text_every': _text_every(folder),
        'real_horizon': lambda values: facts.real_horizon or values['horizon'],
    }


def _is_published(shape: Shapes, published: AlternatingDims) -> bool:
    vision: Any = published.vision
    sizes = (
        shape('vision.patch_embedding.weight', 2, 5)[0],
        shape.depth('vision.blocks'),
        shape('language.blocks.0.attention.k_norm.weight', 1)[0],
    )
    return sizes == (vision.width, vision.depth, published.language.head_dim)


def _text_every(folder: Path) -> int:
    """Interval of cross-attention blocks that read text; LeRobot's folders do not give it."""
    config = read_json(folder / CONFIG_FILE)
    if not config.get('use_alternate_vl_dit', bool, True):
        raise CheckpointError(
            f'{folder / CONFIG_FILE}: use_alternate_vl_dit is false; only a DiT whose blocks take '
            'turns between text and images is supported'
        )
    return int(config.count('attend_text_every_n_blocks', GROOT_N17.text_every))


def _read_eagle(config: JsonMapping) -> dict[str, Any]:
    text, vision = config.mapping('text_config'), config.mapping('vision_config')
    # The tower's last block, and squares of patches, are what the connector reads.
    expect(config, 'select_layer', -1)
    expect(config, 'use_pixel_shuffle', True)
    window = vision.count('window_size', _WINDOW)
    full = whole_numbers(vision, 'full_attention_indexes', list(_FULL_ATTENTION))
    windows = vision.get('use_windows_attn', bool, True)

    def full_attention(values: dict[str, Any]) -> tuple[int, ...]:
        # Ours count from 1. The class's default names blocks that a shallower tower lacks.
        return tuple(index + 1 for index in full if windows and index < values['vision.depth'])

    return {
        'vision.num_heads': vision.count('num_attention_heads'),
        # NVIDIA's code passes the window's edge where the base is expected.
        'vision.rope_base': float(window) if vision.get('use_rope', bool, True) else None,
        'vision.window': window if windows else None,
        'vision.full_attention': full_attention,
        'rope_base': rope_base(text),
        'rms_epsilon': float(text.get('rms_norm_eps', float)),
    }


_COMMON = ('vision.num_heads', 'rope_base', 'rms_epsilon')
_BACKBONES = {
    'groot_n16': _Backbone(
        GROOT_N16,
        _COMMON,
        _read_eagle,
        lambda config, block: _LEAST_TOKENS * block**2,
        'tokenizer.json of the backbone, gr00t/model/modules/nvidia/Eagle-Block2A-2B-v2 in '
        'Isaac-GR00T, with its config.json beside it',
    ),
    'groot_n17': _Backbone(
        GROOT_N17,
        (*_COMMON, 'vision.deepstack', 'rope_sections'),
        read_qwen,
        lambda config, block: pixel_limits(None if config is None else config.path)[0],
        'tokenizer.json of nvidia/Cosmos-Reason2-2B, from the Hugging Face Hub, with its '
        'config.json beside it',
    ),
}

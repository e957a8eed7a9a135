"""OpenVLA's folders, as transformers' `save_pretrained` writes them; nothing in them is executed.

- `config.json`: what is not a shape; `norm_stats`, the statistics of the data sets.
- `preprocessor_config.json`: resize and colour statistics of the images.
- `dataset_statistics.json`: statistics of a fine-tuned policy, in place of `norm_stats`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from vla_runtime.bundle.schema import CameraSpec, ImageSpec, NormalisationSpec
from vla_runtime.checkpoints.errors import ExportError
from vla_runtime.checkpoints.folder_facts import (
    CONFIG_FILE,
    FolderFacts,
    expect,
    find_tokenizer,
)
from vla_runtime.checkpoints.norm_stats import finite_numbers, read_bounds, read_data_set
from vla_runtime.families.openvla.dimensions import Channels
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.files.quotes import join_truncated, quoted

PREPROCESSOR_FILE = 'preprocessor_config.json'
# Settings of config.json that the networks are written for.
_FIXED = {
    'model_type': 'openvla',
    'use_fused_vision_backbone': True,
    'arch_specifier': 'no-align+fused-gelu-mlp',
}
_LANGUAGE_FIXED = {
    'model_type': 'llama',
    'hidden_act': 'silu',
    'attention_bias': False,
    'mlp_bias': False,
    'tie_word_embeddings': False,
}
# Most tokens of a prompt: 17 around the instruction.
PROMPT_LENGTH = 64


@dataclass(frozen=True)
class LanguageFacts:
    """Facts of the language model that no shape shows, where config.json has them.

    Attributes:
        kv_heads: key and value heads; None: it has no number.
        rope_base: base of the rotary positions.
        rms_epsilon: epsilon of the norms.
        bins: edges of the bins of an action.
        padding: tokens of the text table that no text has.
    """

    kv_heads: int | None
    rope_base: float
    rms_epsilon: float
    bins: int
    padding: int


@dataclass(frozen=True)
class ImageFacts:
    """Facts of preprocessor_config.json.

    Attributes:
        images: resize of the image.
        means, stds: of the colour channels from [0, 1], DINOv2's and SigLIP's.
        image_size: edge of the square image in pixels.
        notes: where the file's stored transforms say something else.
    """

    images: ImageSpec
    means: tuple[Channels, Channels]
    stds: tuple[Channels, Channels]
    image_size: int
    notes: tuple[str, ...]


def read_openvla_folder(folder: Path, unnorm_key: str | None) -> FolderFacts:
    """Read all facts in a folder.

    Args:
        folder: folder of the checkpoint.
        unnorm_key: data set whose statistics the actions are in; needed where the folder has those
            of several.

    Raises:
        ExportError, JsonError: missing or damaged files, or settings that are not served.
    """
    images = read_images(folder)
    path, key, data_set, questions = read_data_set(folder, unnorm_key)
    statistics = None
    if data_set is not None:
        low, high = read_bounds(data_set.mapping('action'))
        statistics = {'actions.q01': low, 'actions.q99': high}
    return FolderFacts(
        kind='OpenVLA',
        family='openvla',
        cameras=(CameraSpec('image'),),
        cameras_stated=False,
        images=images.images,
        normalisation=NormalisationSpec(state='identity', actions='quantiles_lerobot'),
        statistics=statistics,
        statistics_file=path,
        cleaning='lower',
        action_length=None if statistics is None else len(statistics['actions.q01']),
        template='openvla',
        usual_prompt_length=PROMPT_LENGTH,
        horizon=1,
        denoise_steps=1,
        image_size=images.image_size,
        image_size_key='input_sizes',
        tokenizer=find_tokenizer(folder),
        source={'checkpoint': 'OpenVLA', **({} if key is None else {'unnorm_key': key})},
        questions=questions,
        notes=images.notes,
    )


def read_language(folder: Path) -> LanguageFacts:
    """Read what config.json says of language model and bins.

    What transformers leaves out there has Llama's default value.

    Raises:
        JsonError: settings that the networks are not written for.
    """
    config = read_json(folder / CONFIG_FILE)
    for key, value in _FIXED.items():
        expect(config, key, value)
    overridden = config.get('timm_override_act_layers', list, [])
    if any(word is not None for word in overridden):
        raise config.error(
            'timm_override_act_layers', f'{quoted(overridden)} is not supported; both are null'
        )
    text = config.mapping('text_config', optional=True)
    for key, value in _LANGUAGE_FIXED.items():
        expect(text, key, value)
    if text.value('rope_scaling') is not None:
        raise text.error('rope_scaling', 'is not supported; expected null')
    padding = config.get('pad_to_multiple_of', int, 64)
    if padding < 0:
        raise config.error(
            'pad_to_multiple_of', f'{padding} where 0 or more is expected (OpenVLA has 64)'
        )
    heads = text.count('num_key_value_heads', text.count('num_attention_heads', None))
    return LanguageFacts(
        kv_heads=heads,
        rope_base=float(text.get('rope_theta', (int, float), 1e4)),
        rms_epsilon=float(text.get('rms_norm_eps', (int, float), 1e-6)),
        bins=config.count('n_action_bins', 256),
        padding=padding,
    )


def read_images(folder: Path) -> ImageFacts:
    """Read resize and colour statistics of the images.

    Raises:
        ExportError, JsonError: a missing or damaged file, or another preprocessing.
    """
    path = folder / PREPROCESSOR_FILE
    if not os.path.lexists(path):
        raise ExportError(
            f'{path}: is missing; copy it from the output folder of the training, or from the '
            'folder of the policy that the training began with'
        )
    config = read_json(path)
    expect(config, 'use_fused_vision_backbone', True)
    means, stds = (_by_tower(config, key) for key in ('means', 'stds'))
    if min(map(min, stds)) <= 0:
        raise config.error('stds', f'{quoted(stds)} where numbers above 0 are expected')
    for resample in config.get('interpolations', list, ['bicubic']):
        if resample != 'bicubic':
            raise config.error(
                'interpolations', f"{quoted(resample)} is not supported; expected 'bicubic'"
            )
    sizes = config.get('input_sizes', list)
    edges = {tuple(size) if isinstance(size, list) else size for size in sizes}
    edge = sizes[0][-1] if sizes and isinstance(sizes[0], list) and sizes[0] else 0
    if edges != {(3, edge, edge)} or type(edge) is not int or edge < 1:
        raise config.error('input_sizes', f'{quoted(sizes)} where two of [3, S, S] are expected')
    # The class's own default is the other one.
    strategy = config.get('image_resize_strategy', str, 'letterbox')
    stated = read_json(folder / CONFIG_FILE).get('image_resize_strategy', str, strategy)
    if stated != strategy:
        raise config.error(
            'image_resize_strategy', f"'{strategy}', but {CONFIG_FILE} says '{stated}'"
        )
    if strategy == 'letterbox':
        red, green, blue = (int(255 * value) for value in means[-1])
        images = ImageSpec('letterbox', 'bicubic_pillow', fill=(red, green, blue))
    elif strategy == 'resize-naive':
        images = ImageSpec('stretch', 'bicubic_pillow')
    else:
        raise config.error(
            'image_resize_strategy',
            f"'{strategy}' is not supported; expected resize-naive or letterbox",
        )
    notes = _transform_notes(config, images, means, stds, edge)
    return ImageFacts(images, means, stds, edge, notes)


def _transform_notes(
    config: JsonMapping,
    images: ImageSpec,
    means: tuple[Channels, Channels],
    stds: tuple[Channels, Channels],
    edge: int,
) -> tuple[str, ...]:
    """Return a note where the stored transforms are not those that the other settings make.

    The training's processor makes them of strategy, means and stds, saves them as `tvf_*`, and
    takes the saved ones where it is loaded.
    """
    letterbox = images.padding == 'letterbox'
    numbers = [{'mean': [*mean], 'std': [*std]} for mean, std in zip(means, stds, strict=True)]
    resized = [edge, edge] if images.padding == 'stretch' else edge
    made: dict[str, object] = {
        'tvf_do_letterbox': letterbox,
        'tvf_letterbox_fill': None if images.fill is None else [*images.fill],
        'tvf_resize_params': [{'size': resized, 'max_size': None, 'antialias': True}] * 2,
        'tvf_crop_params': [{'output_size': [edge, edge]}] * 2,
        'tvf_normalize_params': numbers,
    }
    differ = [
        f'{key}: {json.dumps(found)}'
        for key, expected in made.items()
        if (found := config.value(key)) is not None and not _says(found, expected)
    ]
    if not differ:
        return ()
    return (
        f'{PREPROCESSOR_FILE} has {join_truncated(differ, ", ")}, where image_resize_strategy, '
        "input_sizes, means and stds of the same file make others. These are taken; the training's "
        "code takes the stored ones, so the bundle's images may not be the policy's",
    )


def _says(found: object, expected: object) -> bool:
    """Return whether a stored value has what is expected; numbers were rounded to float32."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(
            _says(found[key], value) for key, value in expected.items() if key in found
        )
    if isinstance(expected, list):
        return (
            isinstance(found, list)
            and len(found) == len(expected)
            and all(map(_says, found, expected))
        )
    if isinstance(expected, float):
        return isinstance(found, (int, float)) and abs(found - expected) < 1e-5
    return found == expected


def _by_tower(config: JsonMapping, key: str) -> tuple[Channels, Channels]:
    """Three numbers for each of the two towers."""
    towers = config.get(key, list)
    found = [finite_numbers(tower, 3) for tower in towers]
    if len(found) != 2 or None in found:
        raise config.error(key, f'{quoted(towers)} where two lists of three numbers are expected')
    return found[0], found[1]  # type: ignore[return-value]

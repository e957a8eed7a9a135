"""Checkpoints of OpenVLA and OpenVLA-OFT: folders as published on the Hugging Face Hub."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from vla_convert.checkpoints.adapters import ADAPTER_CONFIG, ADAPTER_TENSORS, is_adapter
from vla_convert.checkpoints.folder_facts import (
    CONFIG_FILE,
    ExportError,
    FolderFacts,
    expect,
    find_tokenizer,
)
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.norm_stats import (
    STATISTICS_JSON,
    DataSet,
    finite_numbers,
    read_bounds,
    read_data_set,
)
from vla_convert.checkpoints.oft_folder import (
    ACTION_HEAD,
    HEAD_NAMES,
    STATE_PROJECTION,
    files_of,
    oft_facts,
    read_heads,
)
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.reader import CheckpointReader, MakeDims, Source
from vla_convert.checkpoints.tensor_names import DECODER, TensorNames, row, rows_under
from vla_convert.checkpoints.tensors import CheckpointError
from vla_convert.checkpoints.unread_keys import TRANSFORMERS_KEYS
from vla_convert.readers.block_sizes import Shapes, check_stated, checked_dims, decoder_dims
from vla_runtime.bundle.schema import CameraSpec, ImageSpec, NormalisationSpec
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.families.blocks.dimensions import VisionDims
from vla_runtime.families.openvla.declaration import Channels, OpenVlaDims, OpenVlaOftDims
from vla_runtime.files.checkpoint_folders import has_tensors
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.files.quotes import join_truncated, quoted

# timm's names of a vision transformer.
_BLOCK = r'blocks\.(?P<i>\d+)\.'
_TOWER = (
    (r'patch_embed\.proj', 'patch_embedding'),
    (rf'{_BLOCK}norm(?P<n>[12])', r'blocks.\g<i>.norm\g<n>'),
    (rf'{_BLOCK}attn\.proj', r'blocks.\g<i>.attention.out'),
    (rf'{_BLOCK}mlp\.(?P<n>fc[12])', r'blocks.\g<i>.mlp.\g<n>'),
)
_BACKBONE = r'vision_backbone\.'
_TOWERS = {
    'vision.dino': rf'{_BACKBONE}featurizer\.',
    'vision.siglip': rf'{_BACKBONE}fused_featurizer\.',
}
_DINO = _TOWERS['vision.dino']
_LANGUAGE = r'language_model\.'
NAMES = TensorNames(
    rows=(
        *(
            rows
            for ours, theirs in _TOWERS.items()
            for rows in rows_under(theirs, f'{ours}.', _TOWER)
        ),
        *(
            row(rf'{theirs}pos_embed', f'{ours}.position_embedding')
            for ours, theirs in _TOWERS.items()
        ),
        row(rf'{_DINO}cls_token', 'vision.dino.class_token'),
        row(rf'{_DINO}reg_token', 'vision.dino.registers'),
        # transformers renames timm's `gamma`, and so do the published files.
        row(
            rf'{_DINO}{_BLOCK}ls(?P<n>[12])\.(?:scale_factor|gamma)',
            r'vision.dino.blocks.\g<i>.scale\g<n>',
        ),
        *rows_under('', 'vision.', ((r'projector\.(?P<n>fc[123])', r'projector.\g<n>'),)),
        *rows_under(rf'{_LANGUAGE}model\.', 'language.', DECODER),
        row(rf'{_LANGUAGE}lm_head\.weight', 'token_head.weight'),
        *HEAD_NAMES,
    ),
    packed=tuple(
        (
            re.compile(rf'{theirs}{_BLOCK}attn\.qkv\.(?P<leaf>weight|bias)'),
            tuple(rf'{ours}.blocks.\g<i>.attention.{part}.\g<leaf>' for part in ('q', 'k', 'v')),
        )
        for ours, theirs in _TOWERS.items()
    ),
    # The features are those of a block before it.
    unused=(
        re.compile(rf'{_BACKBONE}(?:fused_)?featurizer\.(?:norm|attn_pool|fc_norm|head)\..*'),
        re.compile(rf'{_DINO}mask_token'),
        re.compile(rf'{_LANGUAGE}model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq'),
    ),
)


def without_last_blocks(names: set[str]) -> set[str]:
    """Leave out the last block of each tower, which nothing reads."""
    kept = set(names)
    for tower in _TOWERS:
        prefix = f'{tower}.blocks.'
        numbers = {
            name: int(name.removeprefix(prefix).partition('.')[0])
            for name in names
            if name.startswith(prefix)
        }
        last = max(numbers.values(), default=-1)
        kept -= {name for name, number in numbers.items() if number == last}
    return kept


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
    """Facts of the language model that no shape shows; `kv_heads` is None where not stated.

    `bins`: edges of an action's bins; `padding`: rows of the text table that no text has.
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
        means, stds: of the channels in [0, 1], DINOv2's and SigLIP's.
        image_size: edge of the square image in pixels.
        notes: differences of the file's stored transforms.
    """

    images: ImageSpec
    means: tuple[Channels, Channels]
    stds: tuple[Channels, Channels]
    image_size: int
    notes: tuple[str, ...]


def read_openvla_folder(folder: Path, unnorm_key: str | None) -> FolderFacts:
    """Read all facts in a folder; `unnorm_key` is needed where it has several data sets.

    Raises ExportError or JsonError: missing or damaged files, or unsupported settings.
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
    """Read language model and bins, with Llama's defaults; JsonError: unsupported settings."""
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

    Raises ExportError or JsonError: a missing or damaged file, or unsupported preprocessing.
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

    The training's processor saves them as `tvf_*` and uses the saved ones when it is loaded.
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


_ADAPTER_FOLDER = 'lora_adapter'


class _Platform(NamedTuple):
    """Constants of the training on one robot's data, which no file of a folder has.

    `by_range`: -1 and 1 are the least and greatest value, not q01 and q99.
    """

    horizon: int
    action_dim: int
    state_dim: int
    by_range: bool = False


# By a word in the name of the data set, in the order in which the training looks for it.
_PLATFORMS = {
    'libero': _Platform(8, 7, 8),
    'aloha': _Platform(25, 14, 14, by_range=True),
    'bridge': _Platform(5, 7, 7),
}


def is_oft(folder: Path) -> bool:
    """Return whether a folder of OpenVLA's has an action head beside it."""
    return bool(files_of(folder, ACTION_HEAD))


def refuse_unserved_oft(folder: Path) -> None:
    """Refuse forms of OpenVLA-OFT that are not served (ExportError); other folders pass."""
    if (folder / ADAPTER_CONFIG).is_file() and folder.name == _ADAPTER_FOLDER:
        above = folder.absolute().parent
        if is_oft(above):
            raise _unmerged(above)
    head, state = files_of(folder, ACTION_HEAD), files_of(folder, STATE_PROJECTION)
    if not (head or state) or not _is_openvla(folder):
        return
    if film := files_of(folder, 'vision_backbone'):
        raise ExportError(
            f'{film[0]}: is a vision backbone with FiLM (use_film of the training), which is not '
            'served: fine-tune the policy without --use_film'
        )
    if noisy := files_of(folder, 'noisy_action_projector'):
        raise ExportError(
            f'{noisy[0]}: is of an action head that denoises (use_diffusion of the training), '
            'which is not served; served are heads that were trained with L1 (use_l1_regression)'
        )
    if not head:
        raise ExportError(
            f'{folder}: has {state[0].name} but no {ACTION_HEAD}--*_checkpoint.pt: policies of '
            'OpenVLA-OFT that write tokens are not served. If the training used use_l1_regression, '
            'copy its action head into the folder'
        )
    adapted = (folder / _ADAPTER_FOLDER).is_dir() or (folder / ADAPTER_TENSORS).is_file()
    if adapted and not has_tensors(folder):
        raise _unmerged(folder)


def _unmerged(folder: Path) -> ExportError:
    return ExportError(
        f'{folder}: has an adapter (LoRA) that is not merged into OpenVLA, and --base '
        'merges none beside an action head. Merge it with '
        "OpenVLA-OFT's vla-scripts/merge_lora_weights_and_save.py, which writes the merged weights "
        'into this folder, and export the folder again'
    )


def _is_openvla(folder: Path) -> bool:
    """Return False for a folder of another project, whose files may have the same names."""
    path = folder / CONFIG_FILE
    return not path.is_file() or read_json(path).values.get('model_type') in (None, 'openvla')


def read_oft_folder(folder: Path, unnorm_key: str | None) -> FolderFacts:
    """Read all facts in an OFT folder; `unnorm_key` is needed where it has several data sets.

    Raises ExportError or JsonError: missing or damaged files, or unsupported settings.
    """
    data_set = read_data_set(folder, unnorm_key)
    platform = _platform_of(data_set)
    images = read_images(folder)
    notes = images.notes
    if platform is None and data_set.name is not None:
        notes += (
            f"the data set {data_set.name} is none that OpenVLA-OFT's training has constants for: "
            "state and actions are taken to be scaled by q01 and q99, as LIBERO's are",
        )
    if (folder / _ADAPTER_FOLDER).is_dir():
        notes += (
            f'{_ADAPTER_FOLDER}/ lies beside the weights, and nothing says whether it is merged '
            'into them: the training does so (merge_lora_during_training), or '
            'vla-scripts/merge_lora_weights_and_save.py. If neither did, these are the weights '
            "before the fine-tuning, and the bundle's actions are not the policy's",
        )
    return oft_facts(
        folder,
        data_set,
        kind='OpenVLA-OFT',
        family='openvla_oft',
        image_size=images.image_size,
        image_size_key='input_sizes',
        template='openvla',
        prompt_length=PROMPT_LENGTH,
        bounds=('min', 'max') if platform and platform.by_range else ('q01', 'q99'),
        usual_horizon=platform.horizon if platform else None,
        notes=notes,
    )


def _platform_of(data_set: DataSet) -> _Platform | None:
    """Return the constants that the training had; None where it must have been given others."""
    if data_set.name is None or data_set.statistics is None:
        return None
    name = data_set.name.lower()
    found = next((platform for word, platform in _PLATFORMS.items() if word in name), None)
    if found is None:
        return None
    groups = (data_set.statistics.mapping(key) for key in ('action', 'proprio'))
    counts = [len(group.get('q01', list)) for group in groups]
    return found if counts == [found.action_dim, found.state_dim] else None


_OFT = 'openvla_oft'
# Heads of the published towers by width: DINOv2 ViT-S, ViT-B and ViT-L; SigLIP base and So400m.
_VISION_HEADS = {
    'dino': {384: 6, 768: 12, 1024: 16},
    'siglip': {768: 12, 1152: 16},
}
# Heads of Llama 2 7B and 13B by width.
_LANGUAGE_HEADS = {4096: 32, 5120: 40}


class OpenVlaReader(CheckpointReader):
    names = NAMES
    known = (
        *TRANSFORMERS_KEYS,
        'vision_backbone_id|llm_(backbone_id|max_length)|hf_llm_id|image_sizes|timm_model_ids',
        r'norm_stats(\..*)?',
    )
    projects = ('OpenVLA', 'OpenVLA-OFT')
    beside_adapter = (
        'of OpenVLA dataset_statistics.json of the run folder (run_root_dir), and config.json, '
        'preprocessor_config.json and the tokenizer of the policy below; its training also merges '
        'the adapter into that run folder, which is exported without --base'
    )
    wanted: ClassVar[Mapping[str, str]] = {
        '--horizon': 'actions of a chunk (NUM_ACTIONS_CHUNK of the training)',
        '--tokenizer': (
            'tokenizer.json or tokenizer.model of the policy, from its folder on the Hugging Face '
            'Hub'
        ),
    }

    def recognises(self, names: Collection[str]) -> bool:
        return any(name.startswith('vision_backbone.featurizer.') for name in names)

    def refuse_unserved(self, folder: Path) -> None:
        if folder.is_dir():
            refuse_unserved_oft(folder)

    def family(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> str:
        return _OFT if is_oft(folder) else 'openvla'

    def read_folder(self, folder: Path, family: str, options: ExportOptions) -> FolderFacts:
        if is_adapter(folder) and not (folder / STATISTICS_JSON).is_file():
            # Those in config.json are of the policy below.
            raise ExportError(
                f'{folder}: is an adapter (LoRA) without {STATISTICS_JSON}, which its training '
                'wrote into the run folder (run_root_dir): copy it from there'
            )
        read = read_oft_folder if family == _OFT else read_openvla_folder
        return read(folder, options.unnorm_key)

    def select(self, source: Source) -> dict[str, StoredTensor]:
        """Leave out what nothing reads, and add OFT's heads."""
        tensors = super().select(source)
        if source.facts.family == _OFT:
            tensors.pop('token_head.weight', None)
            for theirs, stored in read_heads(source.folder).items():
                tensors[NAMES.ours(theirs) or theirs] = stored
        kept = without_last_blocks(set(tensors))
        return {name: one for name, one in tensors.items() if name in kept}

    def sizes(self, source: Source) -> MakeDims | None:
        folder, tensors, facts, options, missing = source
        shape, of_oft = Shapes(tensors, facts.kind), facts.family == _OFT
        if options.unnorm_key is not None:
            stated = facts.source['unnorm_key']
            missing.pick('--unnorm-key', options.unnorm_key, stated, 'name of the data set')
        towers = {name: _tower(shape, name, options, missing) for name in ('dino', 'siglip')}
        vocabulary, width = shape('language.embedding.weight', 2)
        language = read_language(folder)
        kv_heads = missing.pick(
            '--kv-heads',
            options.kv_heads,
            language.kv_heads or _LANGUAGE_HEADS.get(width),
            "the language model's key/value heads (Llama 2 7B has 32)",
        )
        dino, siglip = towers['dino'], towers['siglip']
        if kv_heads is None or dino is None or siglip is None or facts.action_length is None:
            return None
        check_stated(missing, (facts.image_size_key, facts.image_size, dino.image_size))
        images = read_images(folder)
        backbone: dict[str, Any] = {
            'dino': dino,
            'siglip': siglip,
            'dino_registers': shape('vision.dino.registers', 3)[1],
            'projector_dim': shape('vision.projector.fc1.weight', 2)[0],
            'language': decoder_dims(shape, 'language', kv_heads),
            'vocabulary': vocabulary,
            'dino_mean': images.means[0],
            'dino_std': images.stds[0],
            'siglip_mean': images.means[1],
            'siglip_std': images.stds[1],
            'rope_base': language.rope_base,
            'rms_epsilon': language.rms_epsilon,
        }
        if of_oft:
            return _oft_dims(shape, facts, missing, backbone)
        if options.cameras is not None and len(options.cameras) != 1:
            missing.conflict(
                f'--cameras names {len(options.cameras)} cameras, but the policy reads one image'
            )
        actions = facts.action_length
        return lambda cameras, prompt_length, horizon: checked_dims(
            lambda: OpenVlaDims(
                **backbone,
                used_vocabulary=vocabulary - language.padding,
                action_bins=language.bins,
                prompt_length=prompt_length,
                action_dim=actions,
                cameras=cameras,
            )
        )


def _oft_dims(
    shape: Shapes, facts: FolderFacts, missing: MissingFacts, backbone: Mapping[str, Any]
) -> MakeDims:
    action_dim, head_width = shape('head.fc2.weight', 2)
    state_dim = shape('state_projection.fc1.weight', 2)[1]
    check_stated(
        missing,
        ('action dimensions', facts.action_length, action_dim),
        ('state dimensions', facts.state_length, state_dim),
    )
    return lambda cameras, prompt_length, horizon: checked_dims(
        lambda: OpenVlaOftDims(
            **backbone,
            prompt_length=prompt_length,
            action_dim=action_dim,
            cameras=cameras,
            horizon=horizon,
            state_dim=state_dim,
            head_width=head_width,
            head_blocks=shape.depth('head.blocks') if 'head.blocks.0.norm.weight' in shape else 0,
        )
    )


def _tower(
    shape: Shapes, name: str, options: ExportOptions, missing: MissingFacts
) -> VisionDims | None:
    """Sizes of a tower, with the blocks that are run; None once its heads are asked for."""
    tower = f'vision.{name}'
    width, channels, patch, patch_width = shape(f'{tower}.patch_embedding.weight', 4)
    tokens = shape(f'{tower}.position_embedding', 3)[1]
    side = math.isqrt(tokens)
    if channels != 3 or patch != patch_width or side * side != tokens:
        raise CheckpointError(
            f'the tower {name} has {channels} channels, patches of {patch}x{patch_width} and '
            f'{tokens} positions; expected 3 channels, square patches and a square of them'
        )
    heads = missing.pick(
        f'--heads {name}=N',
        options.heads.get(name),
        _VISION_HEADS[name].get(width),
        f"attention heads of '{name}', {width} numbers wide",
    )
    if heads is None:
        return None
    return VisionDims(
        width=width,
        depth=shape.depth(f'{tower}.blocks'),
        num_heads=heads,
        mlp_dim=shape(f'{tower}.blocks.0.mlp.fc1.weight', 2)[0],
        patch_size=patch,
        image_size=side * patch,
    )


READER = OpenVlaReader()

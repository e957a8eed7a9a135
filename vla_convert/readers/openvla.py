"""Checkpoints of OpenVLA and OpenVLA-OFT: folders as published on the Hugging Face Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from vla_convert.checkpoints.adapters import ADAPTER_CONFIG, ADAPTER_TENSORS, is_adapter
from vla_convert.checkpoints.dims import Heads, MakeDims
from vla_convert.checkpoints.draft import USUAL, Draft
from vla_convert.checkpoints.folder_facts import (
    CONFIG_FILE,
    ExportError,
    expect,
)
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
    fill_oft,
    read_heads,
)
from vla_convert.checkpoints.reader import CheckpointReader, Source
from vla_convert.checkpoints.tensor_names import DECODER, TensorNames, under
from vla_convert.checkpoints.unread_keys import TRANSFORMERS_KEYS
from vla_runtime.bundle.schema import CameraSpec, ImageSpec, NormalisationSpec
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.declarations.openvla import Channels
from vla_runtime.files.checkpoint_folders import has_tensors
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.files.quotes import join_truncated, quoted

# timm's names of a vision transformer.
_TOWER = {
    'patch_embed.proj.*': 'patch_embedding.*',
    'pos_embed': 'position_embedding',
    'blocks.{i}.norm{1|2}.*': 'blocks.{i}.norm{1|2}.*',
    'blocks.{i}.attn.qkv.{weight|bias}': 'blocks.{i}.attention.{q,k,v}.{weight|bias}',
    'blocks.{i}.attn.proj.*': 'blocks.{i}.attention.out.*',
    'blocks.{i}.mlp.{fc1|fc2}.*': 'blocks.{i}.mlp.{fc1|fc2}.*',
}
_DINO = {
    **_TOWER,
    'cls_token': 'class_token',
    'reg_token': 'registers',
    # transformers renames timm's `gamma`, and so do the published files.
    'blocks.{i}.ls{1|2}.{scale_factor|gamma}': 'blocks.{i}.scale{1|2}',
}
NAMES = TensorNames(
    rows={
        **under('vision_backbone.featurizer.', 'vision.dino.', _DINO),
        **under('vision_backbone.fused_featurizer.', 'vision.siglip.', _TOWER),
        'projector.{fc1|fc2|fc3}.*': 'vision.projector.{fc1|fc2|fc3}.*',
        **under('language_model.model.', 'language.', DECODER),
        'language_model.lm_head.weight': 'token_head.weight',
        **HEAD_NAMES,
    },
    # The features are those of a block before it.
    unused=(
        'vision_backbone.(fused_)featurizer.{norm|attn_pool|fc_norm|head}.*',
        'vision_backbone.featurizer.mask_token',
        'language_model.model.layers.{i}.self_attn.rotary_emb.inv_freq',
    ),
)


def without_last_blocks(names: set[str]) -> set[str]:
    """Leave out the last block of each tower, which nothing reads."""
    kept = set(names)
    for tower in ('vision.dino', 'vision.siglip'):
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


def fill_openvla(draft: Draft) -> None:
    """Fill a draft from a folder of OpenVLA's.

    Raises ExportError or JsonError: missing or damaged files, or unsupported settings.
    """
    draft.is_of('OpenVLA', 'openvla')
    draft.source = {'checkpoint': draft.kind}
    images = _fill_common(draft)
    data_set = read_data_set(draft)
    if data_set.statistics is not None:
        low, high = read_bounds(data_set.statistics.mapping('action'))
        bounds = {'actions.q01': low, 'actions.q99': high}
        draft.write(data_set.statistics.place('action'), statistics=bounds)
        draft.action_length = len(low)
    draft.write(f'{PREPROCESSOR_FILE}, image_resize_strategy', images=images.images)
    draft.write(
        'OpenVLA itself',
        normalisation=NormalisationSpec(state='identity', actions='quantiles_lerobot'),
        prompt_cleaning='lower',
        horizon=1,
        denoise_steps=1,
    )
    draft.assume('OpenVLA itself', cameras=(CameraSpec('image'),))
    draft.write_tokenizer()


def _fill_common(draft: Draft) -> ImageFacts:
    """Write what folders of OpenVLA and of OFT say alike."""
    images = read_images(draft.folder)
    draft.image_size_key = 'input_sizes'
    draft.write(f'{PREPROCESSOR_FILE}, input_sizes', image_size=images.image_size)
    draft.write(f'{draft.kind} itself', prompt_template='openvla')
    draft.assume(USUAL, prompt_length=PROMPT_LENGTH)
    draft.notes += images.notes
    return images


def read_language(folder: Path) -> dict[str, Any]:
    """Read the dimensions of language model and bins that no shape shows, with Llama's defaults.

    Raises JsonError: unsupported settings.
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
    return {
        'language.num_kv_heads': heads,
        'rope_base': float(text.get('rope_theta', (int, float), 1e4)),
        'rms_epsilon': float(text.get('rms_norm_eps', (int, float), 1e-6)),
        'action_bins': config.count('n_action_bins', 256),
        # Without the rows of the text table that no text has.
        'used_vocabulary': lambda values: values['vocabulary'] - padding,
    }


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


def fill_openvla_oft(draft: Draft) -> None:
    """Fill a draft from an OFT folder.

    Raises ExportError or JsonError: missing or damaged files, or unsupported settings.
    """
    draft.is_of('OpenVLA-OFT', _OFT)
    draft.source = {'checkpoint': draft.kind}
    data_set = read_data_set(draft)
    platform = _platform_of(data_set)
    _fill_common(draft)
    if platform is not None:
        draft.assume(f'{draft.kind}, by the name of its data set', horizon=platform.horizon)
    elif data_set.name is not None:
        draft.notes.append(
            f"the data set {data_set.name} is none that OpenVLA-OFT's training has constants for: "
            "state and actions are taken to be scaled by q01 and q99, as LIBERO's are"
        )
    if (draft.folder / _ADAPTER_FOLDER).is_dir():
        draft.notes.append(
            f'{_ADAPTER_FOLDER}/ lies beside the weights, and nothing says whether it is merged '
            'into them: the training does so (merge_lora_during_training), or '
            'vla-scripts/merge_lora_weights_and_save.py. If neither did, these are the weights '
            "before the fine-tuning, and the bundle's actions are not the policy's"
        )
    by_range = platform is not None and platform.by_range
    fill_oft(draft, data_set, ('min', 'max') if by_range else ('q01', 'q99'))


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


class OpenVlaReader(CheckpointReader):
    names = NAMES
    # DINOv2 ViT-S, ViT-B and ViT-L; SigLIP base and So400m; Llama 2 7B and 13B.
    heads: ClassVar[Mapping[str, Heads]] = {
        'dino.num_heads': Heads({384: 6, 768: 12, 1024: 16}),
        'siglip.num_heads': Heads({768: 12, 1152: 16}),
        'language.num_kv_heads': Heads({4096: 32, 5120: 40}, 'Llama 2 7B has 32'),
    }
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

    def read(self, draft: Draft) -> None:
        folder = draft.folder
        if is_adapter(folder) and not (folder / STATISTICS_JSON).is_file():
            # Those in config.json are of the policy below.
            raise ExportError(
                f'{folder}: is an adapter (LoRA) without {STATISTICS_JSON}, which its training '
                'wrote into the run folder (run_root_dir): copy it from there'
            )
        fill = fill_openvla_oft if draft.family == _OFT else fill_openvla
        fill(draft)

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
        facts, options, missing = source.facts, source.options, source.missing
        if options.unnorm_key is not None:
            stated = facts.source['unnorm_key']
            missing.pick('--unnorm-key', options.unnorm_key, stated, 'name of the data set')
        images = read_images(source.folder)
        given = {
            **read_language(source.folder),
            'dino_mean': images.means[0],
            'dino_std': images.stds[0],
            'siglip_mean': images.means[1],
            'siglip_std': images.stds[1],
        }
        if facts.family != _OFT:
            given['action_dim'] = facts.action_length
            if options.cameras is not None and len(options.cameras) != 1:
                missing.conflict(
                    f'--cameras names {len(options.cameras)} cameras, but the policy reads one '
                    'image'
                )
        make = self.dims(source, given)
        return None if facts.action_length is None else make


READER = OpenVlaReader()

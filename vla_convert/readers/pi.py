"""Checkpoints of pi0 and pi0.5: LeRobot's folders, and openpi's in PyTorch."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from vla_convert.checkpoints.folder_facts import (
    CONFIG_FILE,
    ExportError,
    FolderFacts,
    Question,
    find_tokenizer,
)
from vla_convert.checkpoints.lerobot_folder import LeRobotPolicy
from vla_convert.checkpoints.options import ExportOptions, read_dataset_info
from vla_convert.checkpoints.reader import CheckpointReader, MakeDims, Source
from vla_convert.checkpoints.tensor_names import DECODER, SIGLIP, TensorNames, row, rows_under
from vla_convert.checkpoints.tensors import CheckpointError
from vla_convert.checkpoints.unread_keys import LEROBOT_KEYS
from vla_convert.readers.block_sizes import (
    HeadCounts,
    KnownHeads,
    Shapes,
    check_shown,
    checked_dims,
    decoder_dims,
    image_size_of,
    resolve_heads,
    vision_dims,
)
from vla_runtime.bundle.schema import STATISTICS, CameraSpec, ImageSpec, NormalisationSpec
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.families.pi.declaration import PiDims
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.types import NormaliserKind

# The output table of the language model: tied to its input table, which may be absent.
_TEXT_HEAD = 'language.head.weight'
_TEXT_TABLE = 'language.embedding.weight'

_PALIGEMMA = r'paligemma_with_expert\.paligemma\.'
_VISION = rf'{_PALIGEMMA}(?:model\.)?vision_tower\.(?:vision_model\.)?'
_LANGUAGE = rf'{_PALIGEMMA}(?:model\.)?language_model\.(?:model\.)?'
_EXPERT = r'paligemma_with_expert\.gemma_expert\.model\.'
_MODULATIONS = (
    (r'layers\.(?P<i>\d+)\.input_layernorm\.dense', r'blocks.\g<i>.input_norm.modulation'),
    (r'layers\.(?P<i>\d+)\.post_attention_layernorm\.dense', r'blocks.\g<i>.post_norm.modulation'),
    (r'norm\.dense', 'norm.modulation'),
)
_TOP = (
    (r'action_in_proj', 'action_in'),
    (r'action_out_proj', 'action_out'),
    (r'time_mlp_in', 'time_in'),
    (r'time_mlp_out', 'time_out'),
    (r'action_time_mlp_in', 'action_time_in'),
    (r'action_time_mlp_out', 'action_time_out'),
    (r'state_proj', 'state_projection'),
)

NAMES = TensorNames(
    rows=(
        row(rf'{_VISION}embeddings\.position_embedding\.weight', 'vision.position_embedding'),
        row(rf'{_PALIGEMMA}(?:language_model\.)?lm_head\.weight', _TEXT_HEAD),
        *rows_under(
            rf'{_PALIGEMMA}(?:model\.)?multi_modal_projector\.',
            'vision.',
            [('linear', 'projector')],
        ),
        *rows_under(_VISION, 'vision.', SIGLIP),
        *rows_under(_LANGUAGE, 'language.', DECODER),
        *rows_under(_EXPERT, 'expert.', (*DECODER, *_MODULATIONS)),
        *rows_under('', '', _TOP),
    ),
    # The expert never emits text; both projects store its unused vocabulary head.
    unused=(re.compile(r'paligemma_with_expert\.gemma_expert\.lm_head\.weight'),),
    tied={_TEXT_HEAD: _TEXT_TABLE},
)


# The one published vision tower (SigLIP So400m); other widths do not determine the heads.
_VISION_HEADS = {1152: 16}
# Gemma's published key/value heads, by the variant names that both projects write in config.json.
_KV_HEADS = {'gemma_2b': 1, 'gemma_300m': 1}
_GEMMA_2B_WIDTH = 2048


def pi_shapes(tensors: Mapping[str, StoredTensor]) -> Shapes:
    """Shapes of a pi0 or pi0.5 checkpoint."""
    return Shapes(tensors, 'pi0 or pi0.5')


def family_of(tensors: Mapping[str, StoredTensor]) -> str:
    """Find the family from the layers of the flow time; CheckpointError: neither, or both."""
    pi05, pi0 = 'time_in.weight' in tensors, 'action_time_in.weight' in tensors
    if pi05 == pi0:
        raise CheckpointError(
            f"the checkpoint has {'both' if pi05 else 'neither'} of 'time_mlp_in' (pi0.5) and "
            "'action_time_mlp_in' (pi0); a pi0.5 or pi0 policy has exactly one of them"
        )
    return 'pi05' if pi05 else 'pi0'


def known_heads(shape: Shapes, variant: str | None) -> KnownHeads:
    """Return the head counts of the published tower and of Gemma, by variant or by width."""
    if variant is None:
        width = shape('language.embedding.weight', 2)[1]
        variant = 'gemma_2b' if width == _GEMMA_2B_WIDTH else ''
    return KnownHeads(
        vision=_VISION_HEADS.get(shape('vision.patch_embedding.weight', 4)[0]),
        kv=_KV_HEADS.get(variant),
        vision_example='SigLIP So400m has 16',
        kv_example='Gemma 2B has 1',
    )


def dims_of(
    tensors: Mapping[str, StoredTensor],
    heads: HeadCounts,
    *,
    cameras: int,
    prompt_length: int,
    horizon: int,
) -> PiDims:
    """Return all sizes of a policy.

    Args:
        cameras: camera inputs, masked ones included.
        prompt_length: tokens of the padded prompt.

    Raises CheckpointError: a tensor is missing or contradicts another or the head counts.
    """
    shape = pi_shapes(tensors)
    has_state_token = family_of(tensors) == 'pi0'
    return checked_dims(
        lambda: PiDims(
            vision=vision_dims(shape, heads.vision, image_size_of(shape)),
            language=decoder_dims(shape, 'language', heads.kv),
            expert=decoder_dims(shape, 'expert', heads.kv),
            vocabulary=shape('language.embedding.weight', 2)[0],
            cameras=cameras,
            prompt_length=prompt_length,
            horizon=horizon,
            action_dim=shape('action_in.weight', 2)[1],
            state_dim=shape('state_projection.weight', 2)[1] if has_state_token else 0,
        )
    )


STATISTICS_JSON = 'norm_stats.json'
# The camera slots that every openpi pi0 and pi0.5 policy is trained with, in their order.
CAMERAS = ('base_0_rgb', 'left_wrist_0_rgb', 'right_wrist_0_rgb')
# `max_token_len` where a training configuration does not set another.
_PROMPT_LENGTH: Mapping[str, int] = {'pi05': 200, 'pi0': 48}
# ALOHA's two arms of six joints and a gripper, and perhaps a base after them.
_ALOHA_COLUMNS = 14
_ADAPT_TO_PI = Question(
    '--adapt-to-pi',
    'yes for ALOHA as openpi trains it (LeRobotAlohaDataConfig) unless told otherwise: joints turn '
    'the other way, and grippers are motor angles; no for another robot, or for one trained with '
    'adapt_to_pi=False',
)
_NORMALISER: Mapping[str, NormaliserKind] = {
    'pi05': 'quantiles_openpi',
    'pi0': 'mean_std_openpi',
}


def read_openpi_folder(
    folder: Path,
    family: str,
    *,
    asset_id: str | None = None,
    statistics_file: Path | None = None,
    adapt_to_pi: bool | None = None,
    actions: int | None = None,
) -> FolderFacts:
    """Read all facts in an openpi folder.

    Args:
        asset_id: needed where the folder has several statistics.
        statistics_file: a norm_stats.json, where the folder has none.
        adapt_to_pi: ALOHA's joints are in pi's own convention.
        actions: action dimensions, if known.

    Raises ExportError: missing, ambiguous or damaged statistics or configuration.
    """
    path = folder / CONFIG_FILE
    config = read_json(path) if os.path.lexists(path) else JsonMapping(path, {})
    for key in ('paligemma_variant', 'action_expert_variant'):
        if config.get(key, str, '').endswith('_lora'):
            raise config.error(
                key,
                "openpi's converter leaves LoRA weights out, so these are not the trained ones; "
                'merge them before converting',
            )
    statistics_path, questions = _find_statistics(folder, asset_id, statistics_file)
    statistics = _statistics(statistics_path) if statistics_path else None
    if adapt_to_pi is None and _may_be_aloha(actions, statistics):
        questions = (*questions, _ADAPT_TO_PI)
    return FolderFacts(
        kind='openpi',
        family=family,
        cameras=tuple(CameraSpec(name) for name in CAMERAS),
        cameras_stated=False,
        images=ImageSpec(padding='centre', resample='antialias'),
        normalisation=NormalisationSpec(_NORMALISER[family], _NORMALISER[family]),
        statistics=statistics,
        statistics_file=statistics_path,
        cleaning='openpi',
        joint_space='openpi_aloha' if adapt_to_pi else None,
        template='pi0' if family == 'pi0' else None,
        usual_prompt_length=_PROMPT_LENGTH[family],
        horizon=config.count('action_horizon', None),
        action_dim=config.count('action_dim', None),
        variant=config.get('paligemma_variant', str, None),
        tokenizer=find_tokenizer(folder),
        source=_source(folder, family, statistics_path),
        questions=questions,
    )


def _find_statistics(
    folder: Path, asset_id: str | None, given: Path | None
) -> tuple[Path | None, tuple[Question, ...]]:
    assets = folder / 'assets'
    found = {
        path.parent.relative_to(assets).as_posix(): path
        for path in sorted(assets.rglob(STATISTICS_JSON))
    }
    if given is not None:
        if found:
            raise ExportError(
                f'--statistics says {given} but the folder has its own ({", ".join(found)} under '
                f'{assets}); choose among those with --asset-id'
            )
        return given, ()
    if asset_id is not None:
        if asset_id not in found:
            raise ExportError(
                f"--asset-id says '{asset_id}' but {assets} has {', '.join(found) or 'none'}"
            )
        return found[asset_id], ()
    if len(found) > 1:
        wanted = f'which statistics under {assets} are meant: one of {", ".join(found)}'
        return None, (Question('--asset-id', wanted),)
    if not found:
        wanted = f'a {STATISTICS_JSON}; openpi writes one to assets/<id>/ beside the weights'
        return None, (Question('--statistics', wanted),)
    return next(iter(found.values())), ()


def _statistics(path: Path) -> dict[str, np.ndarray]:
    document = read_json(path)
    # openpi writes the outer key; hand-made files are seen without it.
    groups = document.mapping('norm_stats') if 'norm_stats' in document else document
    statistics: dict[str, np.ndarray] = {}
    for group in ('state', 'actions'):
        numbers = groups.mapping(group)
        for name in STATISTICS:
            values = numbers.get(name, list, None)
            if values is None:
                continue
            try:
                array = np.asarray(values, dtype=np.float64)
            except (TypeError, ValueError):
                raise numbers.error(name, 'is not a list of numbers') from None
            if array.ndim != 1 or not array.size:
                raise numbers.error(name, 'is not a list of numbers')
            statistics[f'{group}.{name}'] = array
    return statistics


def _may_be_aloha(actions: int | None, statistics: Mapping[str, np.ndarray] | None) -> bool:
    """Return whether there are as many actions as ALOHA has, or more.

    Where the number is not known, it is that of the columns before the padding, whose statistics
    are all zero, like those of a gripper that never moved.
    """
    if actions is not None:
        return actions >= _ALOHA_COLUMNS
    if statistics is None:
        return False
    of_actions = [values for key, values in statistics.items() if key.startswith('actions.')]
    used = [np.flatnonzero(values) for values in of_actions]
    columns = max((int(found[-1]) + 1 for found in used if found.size), default=0)
    return columns >= _ALOHA_COLUMNS - 1


def _source(folder: Path, family: str, statistics_path: Path | None) -> dict[str, str]:
    source = {'checkpoint': f'openpi {family}'}
    assets = folder / 'assets'
    if statistics_path is not None and assets in statistics_path.parents:
        source['asset_id'] = statistics_path.parent.relative_to(assets).as_posix()
    return source


_FIXED = {
    'use_visual_memory': False,
    'use_proprioceptive_memory': False,
    'min_period': 0.004,
    'max_period': 4.0,
    # From earlier LeRobot releases.
    'adapt_to_pi_aloha': False,
    'use_delta_joint_actions_aloha': False,
}
_PI05 = LeRobotPolicy(
    type='pi05',
    template='pi05_state',
    images=ImageSpec(padding='centre', resample='bilinear'),
    steps=('pi05_prepare_state_tokenizer_processor_step', 'pi0_new_line_processor'),
    fixed=_FIXED,
    state_in_prompt=True,
    image_size_key='image_resolution',
    denoise_steps_key='num_inference_steps',
    variant_key='paligemma_variant',
    absent_cameras='masked',
    padded_release=True,
    summed_times=True,
)
_PI0 = replace(
    _PI05,
    type='pi0',
    template='pi0',
    state_in_prompt=False,
    has_state_token=True,
    # A port of its own, from before openpi's in PyTorch.
    early=LeRobotPolicy(
        type='pi0',
        template='pi0',
        images=ImageSpec(padding='left_top', resample='bilinear'),
        steps=(),
        fixed=_FIXED,
        # It denoises no more actions than it executes.
        horizon_key='n_action_steps',
        image_size_key='resize_imgs_with_padding',
        denoise_steps_key='num_steps',
        has_state_token=True,
        absent_cameras='masked',
        summed_times=True,
    ),
)


class PiReader(CheckpointReader):
    names = NAMES
    # PaliGemma's.
    marks = ('<loc0000>', '<seg000>')
    known = (
        *LEROBOT_KEYS,
        'action_expert_variant|time_sampling_(beta_alpha|beta_beta|scale|offset)',
        # Of use_visual_memory and use_proprioceptive_memory, which are refused.
        'memory_(frames|stride|temporal_attention_every)|relative_exclude_joints',
        'precision|chunk_size|proj_width|use_cache|attention_implementation',
    )
    lerobot = (_PI05, _PI0)
    projects = ("openpi's pi0 and pi0.5",)
    wanted: ClassVar[Mapping[str, str]] = {
        '--horizon': 'actions of a chunk (openpi: action_horizon)',
        '--prompt-template': (
            'pi05_state, or pi0 for a policy trained without state in the prompt '
            '(openpi: discrete_state_input=False, e.g. pi05_libero)'
        ),
        '--tokenizer': (
            "PaliGemma's tokenizer.json or tokenizer.model: openpi takes it from "
            'https://storage.googleapis.com/big_vision/paligemma_tokenizer.model, LeRobot from '
            'google/paligemma-3b-pt-224 on the Hugging Face Hub'
        ),
    }

    def recognises(self, names: Collection[str]) -> bool:
        return any(name.startswith('paligemma_with_expert.') for name in names)

    def family(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> str:
        return family_of(tensors)

    def read_folder(self, folder: Path, family: str, options: ExportOptions) -> FolderFacts:
        names = options.action_names
        if names is None and options.dataset is not None:
            names = read_dataset_info(options.dataset).action_names
        return read_openpi_folder(
            folder,
            family,
            asset_id=options.asset_id,
            statistics_file=options.statistics,
            adapt_to_pi=options.adapt_to_pi,
            actions=None if names is None else len(names),
        )

    def sizes(self, source: Source) -> MakeDims | None:
        _, tensors, facts, options, missing = source
        shape = pi_shapes(tensors)
        check_shown(shape, facts, missing)
        heads = resolve_heads(shape, known_heads(shape, facts.variant), options, missing)
        if heads is None:
            return None
        return lambda cameras, prompt_length, horizon: dims_of(
            tensors, heads, cameras=cameras, prompt_length=prompt_length, horizon=horizon
        )


READER = PiReader()

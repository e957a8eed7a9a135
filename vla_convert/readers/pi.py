"""Checkpoints of pi0 and pi0.5: LeRobot's folders, and openpi's in PyTorch."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from vla_convert.checkpoints.dims import MakeDims
from vla_convert.checkpoints.draft import USUAL, Draft
from vla_convert.checkpoints.folder_facts import CONFIG_FILE, ExportError, expect
from vla_convert.checkpoints.lerobot_early import has_processors
from vla_convert.checkpoints.lerobot_folder import (
    LeRobotPolicy,
    is_lerobot_folder,
    padded_release,
    summed_times,
)
from vla_convert.checkpoints.lerobot_processors import PREPROCESSOR_FILE
from vla_convert.checkpoints.reader import CheckpointReader, Source
from vla_convert.checkpoints.tensor_names import DECODER, Rows, TensorNames, under
from vla_convert.checkpoints.tensors import CheckpointError
from vla_convert.readers import paligemma
from vla_runtime.bundle.schema import STATISTICS, CameraSpec, ImageSpec, NormalisationSpec
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.types import NormaliserKind

# The output table of the language model: tied to its input table, which may be absent.
_TEXT_HEAD = 'language.head.weight'
_TEXT_TABLE = 'language.embedding.weight'

_EXPERT: Rows = {
    **DECODER,
    'layers.{i}.input_layernorm.dense.*': 'blocks.{i}.input_norm.modulation.*',
    'layers.{i}.post_attention_layernorm.dense.*': 'blocks.{i}.post_norm.modulation.*',
    'norm.dense.*': 'norm.modulation.*',
}
NAMES = TensorNames(
    rows={
        **paligemma.NAMES,
        'paligemma_with_expert.paligemma.(language_model.)lm_head.weight': _TEXT_HEAD,
        **under('paligemma_with_expert.gemma_expert.model.', 'expert.', _EXPERT),
        'action_in_proj.*': 'action_in.*',
        'action_out_proj.*': 'action_out.*',
        'time_mlp_{in|out}.*': 'time_{in|out}.*',
        'action_time_mlp_{in|out}.*': 'action_time_{in|out}.*',
        'state_proj.*': 'state_projection.*',
    },
    # The expert never emits text; both projects store its unused vocabulary head.
    unused=('paligemma_with_expert.gemma_expert.lm_head.weight',),
    tied={_TEXT_HEAD: _TEXT_TABLE},
)


# Gemma's key/value heads, by the variant names that both projects write in config.json.
_KV_HEADS = {'gemma_2b': 1, 'gemma_300m': 1}


def family_of(tensors: Mapping[str, StoredTensor]) -> str:
    """Find the family from the layers of the flow time; CheckpointError: neither, or both."""
    pi05, pi0 = 'time_in.weight' in tensors, 'action_time_in.weight' in tensors
    if pi05 == pi0:
        raise CheckpointError(
            f"the checkpoint has {'both' if pi05 else 'neither'} of 'time_mlp_in' (pi0.5) and "
            "'action_time_mlp_in' (pi0); a pi0.5 or pi0 policy has exactly one of them"
        )
    return 'pi05' if pi05 else 'pi0'


STATISTICS_JSON = 'norm_stats.json'
# The camera slots that every openpi pi0 and pi0.5 policy is trained with, in their order.
CAMERAS = ('base_0_rgb', 'left_wrist_0_rgb', 'right_wrist_0_rgb')
# `max_token_len` where a training configuration does not set another.
_PROMPT_LENGTH: Mapping[str, int] = {'pi05': 200, 'pi0': 48}
# ALOHA's two arms of six joints and a gripper, and perhaps a base after them.
_ALOHA_COLUMNS = 14
_ADAPT_TO_PI = (
    'yes for ALOHA as openpi trains it (LeRobotAlohaDataConfig) unless told otherwise: joints turn '
    'the other way, and grippers are motor angles; no for another robot, or for one trained with '
    'adapt_to_pi=False'
)
_NORMALISER: Mapping[str, NormaliserKind] = {
    'pi05': 'quantiles_openpi',
    'pi0': 'mean_std_openpi',
}


def fill_openpi(draft: Draft, family: str) -> None:
    """Fill a draft from an openpi folder.

    Raises ExportError or JsonError: ambiguous or damaged statistics or configuration.
    """
    draft.is_of('openpi', family)
    draft.source = {'checkpoint': f'openpi {family}'}
    path = draft.folder / CONFIG_FILE
    config = read_json(path) if os.path.lexists(path) else JsonMapping(path, {})
    for key in ('paligemma_variant', 'action_expert_variant'):
        if config.get(key, str, '').endswith('_lora'):
            raise config.error(
                key,
                "openpi's converter leaves LoRA weights out, so these are not the trained ones; "
                'merge them before converting',
            )
    draft.variant = config.get('paligemma_variant', str, None)
    for name, key in (('horizon', 'action_horizon'), ('action_dim', 'action_dim')):
        draft.write(config.place(key), **{name: config.count(key, None)})
    _write_statistics(draft)
    _write_joint_space(draft)
    draft.write(
        'openpi itself',
        images=ImageSpec(padding='centre', resample='antialias'),
        normalisation=NormalisationSpec(_NORMALISER[family], _NORMALISER[family]),
        prompt_cleaning='openpi',
        prompt_template='pi0' if family == 'pi0' else None,
    )
    draft.assume('openpi itself', cameras=tuple(CameraSpec(name) for name in CAMERAS))
    draft.assume(USUAL, prompt_length=_PROMPT_LENGTH[family])
    draft.write_tokenizer()


def _write_statistics(draft: Draft) -> None:
    """Find the statistics, and ask where the folder has none, or several."""
    assets, missing = draft.folder / 'assets', draft.missing
    given, asset_id = draft.options.statistics, draft.options.asset_id
    missing.use('--statistics', '--asset-id')
    found = {
        path.parent.relative_to(assets).as_posix(): path
        for path in sorted(assets.rglob(STATISTICS_JSON))
    }
    if given is not None and found:
        raise ExportError(
            f'--statistics says {given} but the folder has its own ({", ".join(found)} under '
            f'{assets}); choose among those with --asset-id'
        )
    if given is None and asset_id is not None and asset_id not in found:
        raise ExportError(
            f"--asset-id says '{asset_id}' but {assets} has {', '.join(found) or 'none'}"
        )
    if given is None and asset_id is None and len(found) != 1:
        if found:
            wanted = f'which statistics under {assets} are meant: one of {", ".join(found)}'
            missing.ask('--asset-id', wanted)
        else:
            wanted = f'a {STATISTICS_JSON}; openpi writes one to assets/<id>/ beside the weights'
            missing.ask('--statistics', wanted)
        return
    if given is None:
        draft.source['asset_id'] = asset_id or next(iter(found))
    path = given or found[draft.source['asset_id']]
    draft.statistics_file = path
    draft.write(path.name, statistics=_statistics(path))


def _write_joint_space(draft: Draft) -> None:
    """Write whether joints are in pi's own convention, and ask where ALOHA's number of them is."""
    adapted, names = draft.options.adapt_to_pi, draft.options.action_names
    draft.missing.use('--adapt-to-pi')
    if names is None and draft.dataset is not None:
        names = draft.dataset.action_names
    if adapted is None and _may_be_aloha(None if names is None else len(names), draft.statistics):
        draft.missing.ask('--adapt-to-pi', _ADAPT_TO_PI)
    draft.write('--adapt-to-pi', joint_space='openpi_aloha' if adapted else None)


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
    keys={
        'image_size': 'image_resolution',
        'denoise_steps': 'num_inference_steps',
        'variant': 'paligemma_variant',
        'action_dim': 'max_action_dim',
    },
    steps=('pi05_prepare_state_tokenizer_processor_step', 'pi0_new_line_processor'),
    fixed=_FIXED,
)
_PI0 = replace(_PI05, type='pi0', template='pi0', keys={**_PI05.keys, 'state_dim': 'max_state_dim'})
# A port of its own, from before openpi's in PyTorch.
_EARLY_PI0 = LeRobotPolicy(
    type='pi0',
    template='pi0',
    images=ImageSpec(padding='left_top', resample='bilinear'),
    keys={
        # It denoises no more actions than it executes.
        'horizon': 'n_action_steps',
        'image_size': 'resize_imgs_with_padding',
        'denoise_steps': 'num_steps',
        'action_dim': 'max_action_dim',
        'state_dim': 'max_state_dim',
    },
    fixed=_FIXED,
)


# LeRobot's pi0.5 whose language head writes the text that the actions follow.
_WRITES_SUBTASKS = 'pi052'


def _check_prompt(folder: Path) -> None:
    """Refuse a prompt without the state, which goes with a memory of earlier ones (JsonError)."""
    for step in read_json(folder / PREPROCESSOR_FILE).mappings('steps'):
        expect(step.mapping('config', optional=True), 'include_state_in_prompt', True)


class PiReader(CheckpointReader):
    names = NAMES
    heads = paligemma.HEADS
    marks = paligemma.MARKS
    known = (
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

    def refuse_unserved(self, folder: Path) -> None:
        path = folder / CONFIG_FILE
        if not path.is_file():
            return
        config = read_json(path)
        if config.value('type') == _WRITES_SUBTASKS:
            raise config.error(
                'type',
                f"'{_WRITES_SUBTASKS}' is not served: such a policy writes the next subtask in "
                'words and acts on that text, and this runtime has neither that text generation '
                'nor its prompts in turns. Train --policy.type=pi05 on the same data, whose '
                'actions follow the task itself',
            )

    def recognises(self, names: Collection[str]) -> bool:
        return any(name.startswith('paligemma_with_expert.') for name in names)

    def family(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> str:
        return family_of(tensors)

    def policy(self, config: JsonMapping) -> LeRobotPolicy | None:
        found = super().policy(config)
        return _EARLY_PI0 if found is _PI0 and not has_processors(config.path.parent) else found

    def read(self, draft: Draft) -> None:
        if not is_lerobot_folder(draft.folder):
            fill_openpi(draft, draft.family)
            return
        super().read(draft)
        if has_processors(draft.folder):
            _check_prompt(draft.folder)
        draft.absent_cameras = 'masked'
        padded_release(draft)
        summed_times(draft)

    def sizes(self, source: Source) -> MakeDims | None:
        kv_heads = _KV_HEADS.get(source.facts.variant or '')
        return self.dims(source, {'language.num_kv_heads': kv_heads})


READER = PiReader()

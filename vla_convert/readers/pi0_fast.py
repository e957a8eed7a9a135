"""Checkpoints of pi0-FAST: LeRobot's folders, and the action tokenizer beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from vla_convert.checkpoints.dims import MakeDims
from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.folder_facts import CONFIG_FILE, ExportError
from vla_convert.checkpoints.lerobot_folder import LeRobotPolicy, padded_release
from vla_convert.checkpoints.reader import CheckpointReader, Source
from vla_convert.checkpoints.tensor_names import TensorNames
from vla_convert.readers import paligemma
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.declarations.pi0_fast import ACTION_TOKENIZER
from vla_runtime.files.json_file import read_json
from vla_runtime.processing.fast_tokens import read_fast_scale

TEXT_TABLE, TOKEN_HEAD = 'language.embedding.weight', 'token_head.weight'
NAMES = TensorNames(
    rows={
        **paligemma.NAMES,
        'paligemma_with_expert.paligemma.(language_model.)lm_head.weight': TOKEN_HEAD,
    },
)


_OPTION = '--action-tokenizer'
# Where LeRobot saves the action tokenizer in a folder, after 0.6.1.
_SAVED = 'action_tokenizer'
# In the config.json of a later form: other words of the prompt, another beginning of the answer.
_LATER_FORM = 'auto_fit_fast_tokenizer'


class Pi0FastReader(CheckpointReader):
    names = NAMES
    heads = paligemma.HEADS
    marks = paligemma.MARKS
    known = (
        'action_expert_variant|max_action_tokens|text_tokenizer_name|action_tokenizer_name',
        'use_kv_cache|relative_exclude_joints',
        'steps\\[\\d+\\]\\.config\\.(max_action_tokens|action_tokenizer_name|trust_remote_code)',
        'steps\\[\\d+\\]\\.config\\.(fast_skip_tokens|paligemma_tokenizer_name|allow_truncation)',
    )
    lerobot = (
        LeRobotPolicy(
            type='pi0_fast',
            template='pi0_fast',
            images=ImageSpec(padding='centre', resample='bilinear'),
            steps=(
                'pi0_fast_prepare_state_tokenizer_processor_step',
                'action_tokenizer_processor',
            ),
            fixed={'temperature': 0.0},
            keys={
                'image_size': 'image_resolution',
                'variant': 'paligemma_variant',
                'action_dim': 'max_action_dim',
            },
        ),
    )
    wanted: ClassVar[Mapping[str, str]] = {
        '--tokenizer': (
            "PaliGemma's tokenizer.json or tokenizer.model: LeRobot takes it from "
            'google/paligemma-3b-pt-224 on the Hugging Face Hub'
        ),
    }

    def read(self, draft: Draft) -> None:
        if _LATER_FORM in draft.config:
            raise draft.config.error(
                _LATER_FORM,
                'is of a later form of pi0_fast, whose instructions are in small letters and whose '
                "answers begin otherwise; that is not served: train with LeRobot's pi0_fast "
                'without this field (0.6.1), or --policy.type=pi05',
            )
        super().read(draft)
        draft.absent_cameras = 'masked'
        padded_release(draft)

    def select(self, source: Source) -> dict[str, StoredTensor]:
        """Use one of text table and head for both, where the folder has one."""
        tensors = super().select(source)
        for missing, other in ((TEXT_TABLE, TOKEN_HEAD), (TOKEN_HEAD, TEXT_TABLE)):
            if missing not in tensors and other in tensors:
                tensors[missing] = tensors[other]
        return tensors

    def sizes(self, source: Source) -> MakeDims | None:
        config = read_json(source.folder / CONFIG_FILE)
        action = _action_tokenizer(source)
        # The bundle's field has another name.
        skipped = config.get('fast_skip_tokens', int, 128)
        if skipped < 0:
            raise config.error('fast_skip_tokens', f'{skipped} where 0 or more is expected')
        given = {
            'action_dim': source.facts.action_length,
            'answer_tokens': config.count('max_decoding_steps', 256),
            'skipped_tokens': skipped,
            'checks_prefix': config.get('validate_action_token_prefix', bool, True),
        }
        if action is not None:
            given |= _scale(action)
        make = self.dims(source, given)
        if make is None or action is None or source.facts.action_length is None:
            return None
        # The BOS that begins the answer.
        return lambda cameras, prompt_length, horizon: make(cameras, prompt_length + 1, horizon)

    def files(self, source: Source) -> dict[str, Path]:
        path = _action_tokenizer(source)
        return {} if path is None else {ACTION_TOKENIZER: path}


def _scale(action_tokenizer: Path) -> dict[str, float]:
    try:
        found = read_fast_scale(action_tokenizer.with_name('processor_config.json'))
    except ValueError as error:
        raise ExportError(str(error)) from None
    return {'action_scale': found.scale, 'least_coefficient': float(found.min_token)}


def _action_tokenizer(source: Source) -> Path | None:
    """Return the action tokenizer's tokenizer.json; None once it is asked for."""
    given, missing, saved = source.options.action_tokenizer, source.missing, source.folder / _SAVED
    path: Path | None = missing.pick(
        _OPTION,
        given,
        saved if saved.is_dir() else None,
        'folder of the action tokenizer (tokenizer.json, processor_config.json) that config.json '
        'names as action_tokenizer_name, from the Hugging Face Hub',
    )
    if path is None:
        return None
    path = path / 'tokenizer.json' if path.is_dir() else path
    if not path.is_file():
        missing.conflict(f'{_OPTION} says {given or saved}, but there is no tokenizer.json')
        return None
    return path


READER = Pi0FastReader()

"""Checkpoints of pi0-FAST: LeRobot's folders, and the action tokenizer beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from vla_convert.checkpoints.folder_facts import CONFIG_FILE, ExportError
from vla_convert.checkpoints.lerobot_folder import LeRobotPolicy
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.reader import CheckpointReader, MakeDims, Source
from vla_convert.checkpoints.tensor_names import DECODER, SIGLIP, TensorNames, row, rows_under
from vla_convert.checkpoints.unread_keys import LEROBOT_KEYS
from vla_convert.readers.block_sizes import (
    KnownHeads,
    Shapes,
    check_stated,
    checked_dims,
    decoder_dims,
    image_size_of,
    resolve_heads,
    vision_dims,
)
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.families.pi0_fast.declaration import ACTION_TOKENIZER, Pi0FastDims
from vla_runtime.files.json_file import read_json
from vla_runtime.processing.fast_tokens import read_fast_scale

TEXT_TABLE, TOKEN_HEAD = 'language.embedding.weight', 'token_head.weight'
_PALIGEMMA = r'paligemma_with_expert\.paligemma\.'
_VISION = rf'{_PALIGEMMA}(?:model\.)?vision_tower\.(?:vision_model\.)?'
_LANGUAGE = rf'{_PALIGEMMA}(?:model\.)?language_model\.(?:model\.)?'
NAMES = TensorNames(
    rows=(
        row(rf'{_VISION}embeddings\.position_embedding\.weight', 'vision.position_embedding'),
        row(rf'{_PALIGEMMA}(?:language_model\.)?lm_head\.weight', TOKEN_HEAD),
        *rows_under(
            rf'{_PALIGEMMA}(?:model\.)?multi_modal_projector\.',
            'vision.',
            [('linear', 'projector')],
        ),
        *rows_under(_VISION, 'vision.', SIGLIP),
        *rows_under(_LANGUAGE, 'language.', DECODER),
    ),
)


_VISION_HEADS = {1152: 16}
_KV_HEADS = {2048: 1}
_OPTION = '--action-tokenizer'


class Pi0FastReader(CheckpointReader):
    names = NAMES
    # PaliGemma's.
    marks = ('<loc0000>', '<seg000>')
    known = (
        *LEROBOT_KEYS,
        'action_expert_variant|max_action_tokens|text_tokenizer_name|action_tokenizer_name',
        'use_kv_cache|relative_exclude_joints',
        'steps\\[\\d+\\]\\.config\\.(max_action_tokens|action_tokenizer_name|trust_remote_code)',
        'steps\\[\\d+\\]\\.config\\.(fast_skip_tokens|paligemma_tokenizer_name)',
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
            state_in_prompt=True,
            image_size_key='image_resolution',
            variant_key='paligemma_variant',
            absent_cameras='masked',
            padded_release=True,
        ),
    )
    wanted: ClassVar[Mapping[str, str]] = {
        '--tokenizer': (
            "PaliGemma's tokenizer.json or tokenizer.model: LeRobot takes it from "
            'google/paligemma-3b-pt-224 on the Hugging Face Hub'
        ),
    }

    def select(self, source: Source) -> dict[str, StoredTensor]:
        """Use one of text table and head for both, where the folder has one."""
        tensors = super().select(source)
        for missing, other in ((TEXT_TABLE, TOKEN_HEAD), (TOKEN_HEAD, TEXT_TABLE)):
            if missing not in tensors and other in tensors:
                tensors[missing] = tensors[other]
        return tensors

    def sizes(self, source: Source) -> MakeDims | None:
        folder, tensors, facts, options, missing = source
        shape = Shapes(tensors, 'pi0-FAST')
        check_stated(missing, (facts.image_size_key, facts.image_size, image_size_of(shape)))
        heads = resolve_heads(
            shape,
            KnownHeads(
                vision=_VISION_HEADS.get(shape('vision.patch_embedding.weight', 4)[0]),
                kv=_KV_HEADS.get(shape(TEXT_TABLE, 2)[1]),
                vision_example='SigLIP So400m has 16',
                kv_example='Gemma 2B has 1',
            ),
            options,
            missing,
        )
        config = read_json(folder / CONFIG_FILE)
        action = _action_tokenizer(options.action_tokenizer, missing)
        if heads is None or action is None or facts.action_length is None:
            return None
        try:
            scale = read_fast_scale(action.with_name('processor_config.json'))
        except ValueError as error:
            raise ExportError(str(error)) from None
        # The bundle's field has another name.
        skipped = config.get('fast_skip_tokens', int, 128)
        if skipped < 0:
            raise config.error('fast_skip_tokens', f'{skipped} where 0 or more is expected')
        actions = facts.action_length
        return lambda cameras, prompt_length, horizon: checked_dims(
            lambda: Pi0FastDims(
                vision=vision_dims(shape, heads.vision, image_size_of(shape)),
                language=decoder_dims(shape, 'language', heads.kv),
                vocabulary=shape(TEXT_TABLE, 2)[0],
                cameras=cameras,
                # The BOS that begins the answer.
                prompt_length=prompt_length + 1,
                horizon=horizon,
                action_dim=actions,
                answer_tokens=config.count('max_decoding_steps', 256),
                skipped_tokens=skipped,
                action_scale=scale.scale,
                least_coefficient=float(scale.min_token),
                checks_prefix=config.get('validate_action_token_prefix', bool, True),
            )
        )

    def files(self, source: Source) -> dict[str, Path]:
        path = _action_tokenizer(source.options.action_tokenizer, source.missing)
        return {} if path is None else {ACTION_TOKENIZER: path}


def _action_tokenizer(given: Path | None, missing: MissingFacts) -> Path | None:
    """Return the action tokenizer's tokenizer.json; None once it is asked for."""
    path: Path | None = missing.pick(
        _OPTION,
        given,
        None,
        'folder of the action tokenizer (tokenizer.json, processor_config.json) that config.json '
        'names as action_tokenizer_name, from the Hugging Face Hub',
    )
    if path is None:
        return None
    path = path / 'tokenizer.json' if path.is_dir() else path
    if not path.is_file():
        missing.conflict(f'{_OPTION} says {given}, but there is no tokenizer.json')
        return None
    return path


READER = Pi0FastReader()

"""Checkpoints of pi0 and pi0.5: LeRobot's folders, and openpi's in PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.checkpoints.folder_facts import FolderFacts
from vla_runtime.checkpoints.lerobot_folder import LeRobotPolicy
from vla_runtime.checkpoints.options import ExportOptions, read_dataset_info
from vla_runtime.checkpoints.reader import CheckpointReader, MakeDims, Source
from vla_runtime.checkpoints.unread_keys import LEROBOT_KEYS
from vla_runtime.families.blocks.block_sizes import check_shown, settle_heads
from vla_runtime.families.pi.openpi_folder import read_openpi_folder
from vla_runtime.families.pi.tensor_dims import dims_of, family_of, known_heads, pi_shapes
from vla_runtime.families.pi.tensor_names import NAMES

_FIXED = {
    'use_visual_memory': False,
    'use_proprioceptive_memory': False,
    'min_period': 0.004,
    'max_period': 4.0,
    # Of LeRobot's earlier releases.
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
        heads = settle_heads(shape, known_heads(shape, facts.variant), options, missing)
        if heads is None:
            return None
        return lambda cameras, prompt_length, horizon: dims_of(
            tensors, heads, cameras=cameras, prompt_length=prompt_length, horizon=horizon
        )


READER = PiReader()

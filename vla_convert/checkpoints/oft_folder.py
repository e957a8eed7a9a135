"""Folders of OFT's training (arXiv 2502.19645), whatever the policy's language model.

Beside weights and `config.json`:
- `action_head--*_checkpoint.pt`, `proprio_projector--*_checkpoint.pt`: state dicts of `torch.save`.
- `dataset_statistics.json`: the statistics of the data sets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.norm_stats import DataSet, read_bounds
from vla_convert.checkpoints.tensor_names import under
from vla_convert.checkpoints.tensors import CheckpointError
from vla_convert.checkpoints.torch_archives import read_archive
from vla_runtime.bundle.schema import CameraSpec, CropSpec, ImageSpec, NormalisationSpec
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.files.quotes import join_truncated

ACTION_HEAD, STATE_PROJECTION = 'action_head', 'proprio_projector'
HEAD_NAMES = {
    f'{STATE_PROJECTION}.{{fc1|fc2}}.*': 'state_projection.{fc1|fc2}.*',
    **under(
        f'{ACTION_HEAD}.model.',
        'head.',
        {
            'layer_norm{1|2}.*': 'norm{1|2}.*',
            '{fc1|fc2}.*': '{fc1|fc2}.*',
            'mlp_resnet_blocks.{i}.ffn.0.*': 'blocks.{i}.norm.*',
            'mlp_resnet_blocks.{i}.ffn.1.*': 'blocks.{i}.linear.*',
        },
    ),
}
# Share of an image's height and width that the evaluation keeps, in its middle.
_CROP = math.sqrt(0.9)
# Option of the training that makes the file of a part; without it the policy is not served.
_OPTIONS = {ACTION_HEAD: '--use_l1_regression', STATE_PROJECTION: '--use_proprio'}
_DIFFUSION = f'{ACTION_HEAD}.noise_predictor.'


def files_of(folder: Path, part: str) -> list[Path]:
    """Files of a part that was trained beside the language model."""
    return sorted(
        path for path in folder.iterdir() if part in path.name and 'checkpoint' in path.name
    )


def read_heads(folder: Path) -> Mapping[str, StoredTensor]:
    """Find the tensors of action head and state projection, named as those of one policy.

    Raises CheckpointError: a file missing, repeated or damaged; a head that denoises.
    """
    found: dict[str, StoredTensor] = {}
    for part in (ACTION_HEAD, STATE_PROJECTION):
        paths = files_of(folder, part)
        if len(paths) != 1:
            listed = join_truncated([path.name for path in paths], ', ') or 'none'
            remedy = (
                'keep the one of the same step as the weights'
                if paths
                else f'train with {_OPTIONS[part]} True (a policy without is not served), or copy '
                "the file from the training's output folder"
            )
            raise CheckpointError(
                f'{folder}: has {listed} where one file {part}--*_checkpoint.pt is expected, which '
                f'the fine-tuning writes beside the weights; {remedy}'
            )
        found |= {f'{part}.{stored.name}': stored for stored in read_archive(paths[0])}
    if any(name.startswith(_DIFFUSION) for name in found):
        raise CheckpointError(
            f'{folder}: its action head denoises (use_diffusion of the training), which is not '
            'served; served are heads that were trained with L1 (use_l1_regression)'
        )
    return found


def fill_oft(
    draft: Draft,
    data_set: DataSet,
    bounds: tuple[Literal['q01', 'min'], Literal['q99', 'max']] = ('q01', 'q99'),
) -> None:
    """Write what all such folders say; `bounds`: statistics that become -1 and 1.

    `draft.image_size` is written before, where the folder has it. Raises JsonError: damaged
    statistics.
    """
    lowest, highest = bounds
    project = f'{draft.kind} itself'
    if data_set.statistics is not None:
        low, high = read_bounds(data_set.statistics.mapping('action'), bounds)
        state_low, state_high = read_bounds(data_set.statistics.mapping('proprio'), bounds)
        draft.write(
            data_set.statistics.place('action'),
            statistics={
                f'actions.{lowest}': low,
                f'actions.{highest}': high,
                'state.low': state_low,
                'state.high': _above(state_low, state_high),
            },
        )
        draft.state_length, draft.action_length = len(state_low), len(low)
    edge = draft.image_size or 224
    draft.write(
        project,
        images=ImageSpec('crop', 'lanczos', CropSpec(edge, _CROP)),
        image_sizes=((edge, edge),),
        normalisation=NormalisationSpec(
            state='clipped_range',
            actions='min_max' if bounds == ('min', 'max') else 'quantiles_lerobot',
        ),
        prompt_cleaning='lower',
        denoise_steps=1,
    )
    draft.assume(project, cameras=(CameraSpec('image'), CameraSpec('wrist_image')))
    draft.write_tokenizer()


def _above(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Upper bounds as OFT divides by their distance: 1e-8 more, and never the lower one.

    So a number that never changed in training becomes -1.
    """
    return np.maximum(high + 1e-8, np.nextafter(low.astype(np.float32), np.float32(np.inf)))

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

from vla_convert.checkpoints.folder_facts import FolderFacts, find_tokenizer
from vla_convert.checkpoints.norm_stats import DataSet, read_bounds
from vla_convert.checkpoints.tensor_names import rows_under
from vla_convert.checkpoints.tensors import CheckpointError
from vla_convert.checkpoints.torch_archives import read_archive
from vla_runtime.bundle.schema import CameraSpec, CropSpec, ImageSpec, NormalisationSpec
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.files.quotes import join_truncated

ACTION_HEAD, STATE_PROJECTION = 'action_head', 'proprio_projector'
HEAD_NAMES = (
    *rows_under(rf'{STATE_PROJECTION}\.', 'state_projection.', ((r'(?P<n>fc[12])', r'\g<n>'),)),
    *rows_under(
        rf'{ACTION_HEAD}\.model\.',
        'head.',
        (
            (r'layer_norm(?P<n>[12])', r'norm\g<n>'),
            (r'(?P<n>fc[12])', r'\g<n>'),
            (r'mlp_resnet_blocks\.(?P<i>\d+)\.ffn\.0', r'blocks.\g<i>.norm'),
            (r'mlp_resnet_blocks\.(?P<i>\d+)\.ffn\.1', r'blocks.\g<i>.linear'),
        ),
    ),
)
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


def oft_facts(
    folder: Path,
    data_set: DataSet,
    *,
    kind: str,
    family: str,
    image_size: int | None,
    image_size_key: str,
    template: str,
    prompt_length: int,
    bounds: tuple[Literal['q01', 'min'], Literal['q99', 'max']] = ('q01', 'q99'),
    usual_horizon: int | None = None,
    notes: tuple[str, ...] = (),
) -> FolderFacts:
    """Put together the facts of such a folder.

    Args:
        image_size: pixels; None: `image_size_key` is missing in the folder.
        bounds: statistics that become -1 and 1.

    Raises JsonError: damaged statistics.
    """
    statistics, (lowest, highest) = None, bounds
    if data_set.statistics is not None:
        low, high = read_bounds(data_set.statistics.mapping('action'), bounds)
        state_low, state_high = read_bounds(data_set.statistics.mapping('proprio'), bounds)
        statistics = {
            f'actions.{lowest}': low,
            f'actions.{highest}': high,
            'state.low': state_low,
            'state.high': _above(state_low, state_high),
        }
    edge = 224 if image_size is None else image_size
    return FolderFacts(
        kind=kind,
        family=family,
        cameras=(CameraSpec('image'), CameraSpec('wrist_image')),
        cameras_stated=False,
        images=ImageSpec('crop', 'lanczos', CropSpec(edge, _CROP)),
        image_sizes=((edge, edge),),
        normalisation=NormalisationSpec(
            state='clipped_range',
            actions='min_max' if bounds == ('min', 'max') else 'quantiles_lerobot',
        ),
        statistics=statistics,
        statistics_file=data_set.path,
        cleaning='lower',
        state_length=None if statistics is None else len(statistics['state.low']),
        action_length=None if statistics is None else len(statistics[f'actions.{lowest}']),
        template=template,
        usual_prompt_length=prompt_length,
        usual_horizon=usual_horizon,
        denoise_steps=1,
        image_size=image_size,
        image_size_key=image_size_key,
        tokenizer=find_tokenizer(folder),
        source={
            'checkpoint': kind,
            **({} if data_set.name is None else {'unnorm_key': data_set.name}),
        },
        questions=data_set.questions,
        notes=notes,
    )


def _above(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Upper bounds as OFT divides by their distance: 1e-8 more, and never the lower one.

    So a number that never changed in training becomes -1.
    """
    return np.maximum(high + 1e-8, np.nextafter(low.astype(np.float32), np.float32(np.inf)))

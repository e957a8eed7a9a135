"""A residual network in a checkpoint: names of its tensors, and the sizes that they show."""

from __future__ import annotations

import re
from typing import Literal, cast

from vla_convert.checkpoints.tensor_names import row
from vla_convert.readers.block_sizes import Shapes, checked_dims
from vla_runtime.families.blocks.resnet_dimensions import ResNetDims

_Rows = tuple[tuple[re.Pattern[str], str], ...]
_STAGES = 4
# Convolutions of a bottleneck; other blocks have the first two.
_CONVOLUTIONS = 3


def resnet_rows(theirs: str, ours: str, stem: tuple[str, str], stage: str, *, first: int) -> _Rows:
    """Rows of a table of tensor names for torchvision's blocks.

    Args:
        theirs: pattern of what stands before the names in the checkpoint.
        ours: what stands before ours; may refer to groups of `theirs`.
        stem: patterns of convolution and norm of the stem.
        stage: pattern of a stage, with `{}` for its number.
        first: number of the first stage.
    """
    rows = list(_conv_norm(theirs, ours, *stem, 'stem'))
    for index in range(_STAGES):
        block = rf'{stage.format(index + first)}\.(?P<b>\d+)\.'
        own = rf'stages.{index}.\g<b>.'
        for number in range(_CONVOLUTIONS):
            rows += _conv_norm(
                theirs,
                ours,
                rf'{block}conv{number + 1}',
                rf'{block}bn{number + 1}',
                f'{own}convolutions.{number}',
            )
        rows += _conv_norm(
            theirs, ours, rf'{block}downsample\.0', rf'{block}downsample\.1', f'{own}shortcut'
        )
    return tuple(rows)


def _conv_norm(theirs: str, ours: str, conv: str, norm: str, own: str) -> _Rows:
    leaves = r'(?P<leaf>weight|bias|running_mean|running_var)'
    return (
        row(rf'{theirs}{conv}\.weight', rf'{ours}{own}.conv.weight'),
        row(rf'{theirs}{norm}\.{leaves}', rf'{ours}{own}.norm.\g<leaf>'),
    )


def resnet_dims(
    shape: Shapes,
    backbone: str,
    *,
    dilated: bool = False,
    norm: Literal['batch', 'group'] = 'batch',
) -> ResNetDims:
    """Sizes of the network whose tensors begin with `backbone`.

    Raises:
        CheckpointError: tensors that are missing or contradict each other.
    """
    blocks = [shape.depth(f'{backbone}.stages.{stage}') for stage in range(_STAGES)]
    channels = [
        shape(f'{backbone}.stages.{stage}.0.convolutions.0.conv.weight', 4)[0]
        for stage in range(_STAGES)
    ]
    return checked_dims(
        lambda: ResNetDims(
            stem=shape(f'{backbone}.stem.conv.weight', 4)[0],
            channels=cast(tuple[int, int, int, int], tuple(channels)),
            blocks=cast(tuple[int, int, int, int], tuple(blocks)),
            bottleneck=f'{backbone}.stages.0.0.convolutions.2.conv.weight' in shape,
            dilated=dilated,
            norm=norm,
        )
    )

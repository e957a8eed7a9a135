"""Names of the tensors in OpenVLA's and OpenVLA-OFT's folders."""

from __future__ import annotations

import re

from vla_runtime.checkpoints.oft_folder import HEAD_NAMES
from vla_runtime.checkpoints.tensor_names import DECODER, TensorNames, row, rows_under

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
    """Leave out the last block of each tower, which nothing reads.

    Args:
        names: our names of a checkpoint's tensors.
    """
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

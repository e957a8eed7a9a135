"""Names of the tensors in BitVLA's folders."""

from __future__ import annotations

import re
from collections.abc import Mapping

from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.checkpoints.oft_folder import HEAD_NAMES
from vla_runtime.checkpoints.tensor_names import DECODER, SIGLIP, TensorNames, rows_under

_TOWER = r'vision_tower\.vision_model\.'
_LANGUAGE = r'language_model\.'
NAMES = TensorNames(
    rows=(
        *rows_under(_TOWER, 'vision.', SIGLIP[:-1]),
        (
            re.compile(rf'{_TOWER}embeddings\.position_embedding\.weight'),
            'vision.position_embedding',
        ),
        *rows_under(
            r'multi_modal_projector\.',
            'vision.projector.',
            ((r'linear_(?P<n>[12])', r'fc\g<n>'),),
        ),
        *rows_under(
            rf'{_LANGUAGE}(?:model\.)?',
            'language.',
            (
                *DECODER,
                (
                    r'layers\.(?P<i>\d+)\.self_attn\.attn_sub_norm',
                    r'blocks.\g<i>.attention.norm',
                ),
                (r'layers\.(?P<i>\d+)\.mlp\.ffn_sub_norm', r'blocks.\g<i>.mlp.norm'),
            ),
        ),
        *HEAD_NAMES,
    ),
    # Features are read in front of the tower's norm, and nothing is written as text.
    unused=(
        re.compile(rf'{_TOWER}(?:post_layernorm|head)\..*'),
        re.compile(rf'{_LANGUAGE}lm_head\.weight'),
        re.compile(r'lm_head\.weight'),
        re.compile(rf'{_LANGUAGE}(?:model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq'),
    ),
)
_LAYERS = r'blocks\.\d+\.(?:attention\.(?:q|k|v|out)|mlp\.(?:gate|up|down|fc1|fc2))'
_OF_LANGUAGE = re.compile(rf'language\.(?P<layer>{_LAYERS})\.weight')
_OF_VISION = re.compile(rf'vision\.(?P<layer>{_LAYERS})\.weight')
_VISION_BLOCK = re.compile(r'vision\.blocks\.(?P<i>\d+)\.')


def is_ternary(name: str, ternary_vision: bool) -> bool:
    """Return whether a tensor, by our name, is the master weights of a ternary layer."""
    return bool(_OF_LANGUAGE.fullmatch(name) or (ternary_vision and _OF_VISION.fullmatch(name)))


def without_later_blocks(
    tensors: Mapping[str, StoredTensor], blocks: int
) -> dict[str, StoredTensor]:
    """Leave out the tower's blocks from this one on, which nothing reads."""
    return {
        name: stored
        for name, stored in tensors.items()
        if not (found := _VISION_BLOCK.match(name)) or int(found['i']) < blocks
    }

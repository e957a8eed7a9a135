"""Names of GR00T's tensors, of every version, as NVIDIA and LeRobot write them, to ours."""

from __future__ import annotations

import re

from vla_convert.checkpoints.tensor_names import DECODER, SIGLIP, TensorNames, row, rows_under

# LeRobot puts this before NVIDIA's names.
_GROOT = r'(?:_groot_model\.)?'
# N1.5's and N1.6's.
_EAGLE = rf'{_GROOT}backbone\.(?:eagle_)?model\.'
_VISION = rf'{_EAGLE}vision_model\.vision_model\.'
_QWEN = rf'{_GROOT}backbone\.model\.model\.'
_TOWER = rf'{_QWEN}visual\.'
_HEAD = rf'{_GROOT}action_head\.'
_DIT = rf'{_HEAD}model\.'
_BLOCK = r'transformer_blocks\.(?P<i>\d+)\.'

_ATTENTION = (
    (r'attn1\.to_(?P<n>[qkv])', r'attention.\g<n>'),
    (r'attn1\.to_out\.0', 'attention.out'),
    (r'ff\.net\.0\.proj', 'mlp.fc1'),
    (r'ff\.net\.2', 'mlp.fc2'),
)
_LEAVES = ((r'W', 'weight'), (r'b', 'bias'))
_ENCODER_LAYERS = (('W1', 'embed'), ('W2', 'mix'), ('W3', 'out'))

# The action head, every version's.
_HEAD_ROWS = (
    row(rf'{_HEAD}position_embedding\.weight', 'positions'),
    *rows_under(_HEAD, '', ((r'vlln', 'context_norm'),)),
    *rows_under(
        rf'{_HEAD}vl_self_attention\.{_BLOCK}',
        r'context.\g<i>.',
        ((r'norm1', 'norm1'), (r'norm3', 'norm2'), *_ATTENTION),
    ),
    *rows_under(rf'{_DIT}{_BLOCK}', r'dit.\g<i>.', ((r'norm1\.linear', 'modulation'), *_ATTENTION)),
    *rows_under(
        _DIT,
        '',
        (
            (r'timestep_encoder\.timestep_embedder\.linear_1', 'time_in'),
            (r'timestep_encoder\.timestep_embedder\.linear_2', 'time_out'),
            (r'proj_out_1', 'out_modulation'),
            (r'proj_out_2', 'out'),
        ),
    ),
    *(
        row(rf'{_HEAD}{mlp}\.layer(?P<n>[12])\.{theirs}', rf'{mlp}.fc\g<n>.{ours}')
        for mlp in ('state_encoder', 'action_decoder')
        for theirs, ours in _LEAVES
    ),
    *(
        row(rf'{_HEAD}action_encoder\.{layer}\.{theirs}', f'action_encoder.{name}.{ours}')
        for layer, name in _ENCODER_LAYERS
        for theirs, ours in _LEAVES
    ),
)
_QWEN3 = (
    (r'layers\.(?P<i>\d+)\.self_attn\.(?P<n>[qk])_norm', r'blocks.\g<i>.attention.\g<n>_norm'),
    *DECODER,
)
_MERGER = ((r'norm', 'norm'), (r'linear_fc(?P<n>[12])', r'fc\g<n>'))

NAMES = TensorNames(
    rows=(
        *_HEAD_ROWS,
        # N1.5 and N1.6: Eagle.
        row(rf'{_HEAD}future_tokens\.weight', 'future_tokens'),
        row(rf'{_VISION}embeddings\.position_embedding\.weight', 'vision.position_embedding'),
        *rows_under(_VISION, 'vision.', SIGLIP),
        *rows_under(rf'{_EAGLE}language_model\.model\.', 'language.', _QWEN3),
        *rows_under(rf'{_EAGLE}mlp1\.', 'vision.connector.', ((r'(?P<i>\d+)', r'\g<i>'),)),
        # N1.7: Qwen3-VL.
        row(rf'{_TOWER}pos_embed\.weight', 'vision.position_embedding'),
        *rows_under(
            rf'{_QWEN}language_model\.', 'language.', [r for r in _QWEN3 if r[0] != 'norm']
        ),
        *rows_under(_TOWER, 'vision.', ((r'patch_embed\.proj', 'patch_embedding'),)),
        *rows_under(
            rf'{_TOWER}blocks\.(?P<i>\d+)\.',
            r'vision.blocks.\g<i>.',
            (
                (r'norm(?P<n>[12])', r'norm\g<n>'),
                (r'attn\.proj', 'attention.out'),
                (r'mlp\.linear_fc(?P<n>[12])', r'mlp.fc\g<n>'),
            ),
        ),
        *rows_under(rf'{_TOWER}merger\.', 'vision.merger.', _MERGER),
        *rows_under(
            rf'{_TOWER}deepstack_merger_list\.(?P<i>\d+)\.', r'vision.deepstack.\g<i>.', _MERGER
        ),
    ),
    packed=(
        (
            re.compile(rf'{_TOWER}blocks\.(?P<i>\d+)\.attn\.qkv\.(?P<leaf>weight|bias)'),
            tuple(rf'vision.blocks.\g<i>.attention.{name}.\g<leaf>' for name in 'qkv'),
        ),
    ),
    unused=(
        # The backbone emits features, no text; the tower's pooled vector is not read.
        re.compile(rf'{_EAGLE}language_model\.lm_head\.weight'),
        re.compile(rf'{_VISION}head\..*'),
        # N1.7's features are those before the last norm. Its mask token serves training.
        re.compile(rf'{_GROOT}backbone\.model\.lm_head\.weight'),
        re.compile(rf'{_QWEN}language_model\.norm\.weight'),
        re.compile(rf'{_HEAD}mask_token'),
    ),
)
# Tensors with a slice for each embodiment.
SLICED = ('state_encoder.', 'action_encoder.', 'action_decoder.')

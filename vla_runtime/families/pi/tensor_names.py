"""Names of the tensors of pi0 and pi0.5, which LeRobot and openpi share.

LeRobot puts `model.` before them. Older transformers nested the same modules differently
(`paligemma.language_model.model.…`, `paligemma.vision_tower.…`); the optional parts of the patterns
cover that.
"""

from __future__ import annotations

import re

from vla_runtime.checkpoints.tensor_names import DECODER, SIGLIP, TensorNames, row, rows_under

# The output table of the language model: tied to its input table, which may be absent.
_TEXT_HEAD = 'language.head.weight'
_TEXT_TABLE = 'language.embedding.weight'

_PALIGEMMA = r'paligemma_with_expert\.paligemma\.'
_VISION = rf'{_PALIGEMMA}(?:model\.)?vision_tower\.(?:vision_model\.)?'
_LANGUAGE = rf'{_PALIGEMMA}(?:model\.)?language_model\.(?:model\.)?'
_EXPERT = r'paligemma_with_expert\.gemma_expert\.model\.'
_MODULATIONS = (
    (r'layers\.(?P<i>\d+)\.input_layernorm\.dense', r'blocks.\g<i>.input_norm.modulation'),
    (r'layers\.(?P<i>\d+)\.post_attention_layernorm\.dense', r'blocks.\g<i>.post_norm.modulation'),
    (r'norm\.dense', 'norm.modulation'),
)
_TOP = (
    (r'action_in_proj', 'action_in'),
    (r'action_out_proj', 'action_out'),
    (r'time_mlp_in', 'time_in'),
    (r'time_mlp_out', 'time_out'),
    (r'action_time_mlp_in', 'action_time_in'),
    (r'action_time_mlp_out', 'action_time_out'),
    (r'state_proj', 'state_projection'),
)

NAMES = TensorNames(
    rows=(
        row(rf'{_VISION}embeddings\.position_embedding\.weight', 'vision.position_embedding'),
        row(rf'{_PALIGEMMA}(?:language_model\.)?lm_head\.weight', _TEXT_HEAD),
        *rows_under(
            rf'{_PALIGEMMA}(?:model\.)?multi_modal_projector\.',
            'vision.',
            [('linear', 'projector')],
        ),
        *rows_under(_VISION, 'vision.', SIGLIP),
        *rows_under(_LANGUAGE, 'language.', DECODER),
        *rows_under(_EXPERT, 'expert.', (*DECODER, *_MODULATIONS)),
        *rows_under('', '', _TOP),
    ),
    # The expert never emits text; both projects store its unused vocabulary head.
    unused=(re.compile(r'paligemma_with_expert\.gemma_expert\.lm_head\.weight'),),
    tied={_TEXT_HEAD: _TEXT_TABLE},
)

"""Names of the tensors of pi0-FAST in LeRobot's folders."""

from __future__ import annotations

from vla_runtime.checkpoints.tensor_names import DECODER, SIGLIP, TensorNames, row, rows_under

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

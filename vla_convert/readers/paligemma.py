"""PaliGemma inside other policies: names of its tensors, head counts, vocabulary."""

from __future__ import annotations

from vla_convert.checkpoints.dims import Heads
from vla_convert.checkpoints.tensor_names import DECODER, SIGLIP, Rows, under

_MODEL = 'paligemma_with_expert.paligemma.(model.)'
NAMES: Rows = {
    **under(f'{_MODEL}vision_tower.(vision_model.)', 'vision.', SIGLIP),
    f'{_MODEL}multi_modal_projector.linear.*': 'vision.projector.*',
    **under(f'{_MODEL}language_model.(model.)', 'language.', DECODER),
}
HEADS = {
    'vision.num_heads': Heads({1152: 16}, 'SigLIP So400m has 16'),
    'language.num_kv_heads': Heads({2048: 1}, 'Gemma 2B has 1'),
}
# Tokens of its vocabulary that others lack.
MARKS = ('<loc0000>', '<seg000>')

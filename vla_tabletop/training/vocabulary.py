"""The demo policy's own sentencepiece vocabulary, in PaliGemma's layout.

Each number of a state bin is one token: prompts have one length, and the network reads a joint
from one embedding. Bytes cover other text. Symbols for written actions follow the numbers.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_runtime.family.listing import find_family
from vla_runtime.files.atomic_write import write_bytes
from vla_runtime.processing.prompts import PromptFormat, build_prompt
from vla_runtime.processing.tokenizer import Tokenizer
from vla_tabletop.sim.tasks import all_instructions

STATE_BINS = range(-1, 256)
PROMPT_FORMAT = PromptFormat('pi05_state', 'openpi', 'before_action')
PROMPT_LAYOUT = find_family('pi05').templates[PROMPT_FORMAT.template]
PROMPT_LENGTH = 40
_WORDS = ('\n', 'Advantage', 'Action')

_SIZE = 704
_SPECIAL: dict[str, Any] = {
    'pad_id': 0,
    'eos_id': 1,
    'bos_id': 2,
    'unk_id': 3,
    'pad_piece': '<pad>',
    'eos_piece': '<eos>',
    'bos_piece': '<bos>',
    'unk_piece': '<unk>',
}
# Special tokens, words and numbers come before the first symbol.
FIRST_SYMBOL = 4 + len(_WORDS) + len(STATE_BINS)


def train_vocabulary(
    path: Path,
    state_dim: int,
    instructions: Iterable[str] | None = None,
    symbols: Sequence[str] = (),
) -> Tokenizer:
    """Train on the tasks' sentences (without held-out wordings) and write the `.model` file.

    `state_dim`: numbers of a prompt's state; `instructions` None: the tabletop's; `symbols`:
    further tokens from `FIRST_SYMBOL` on.
    """
    import sentencepiece

    state = np.zeros(state_dim)
    prompts = [
        build_prompt(PROMPT_LAYOUT, PROMPT_FORMAT, instruction, state, advantage)
        for instruction in (all_instructions() if instructions is None else instructions)
        for advantage in (None, 'positive', 'negative')
    ]
    # A line is a sentence to the trainer; line breaks are a token of their own.
    lines = [line for prompt in prompts for line in prompt.split('\n')]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type='bpe',
        vocab_size=_SIZE + len(symbols),
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name='identity',
        remove_extra_whitespaces=False,
        user_defined_symbols=[*_WORDS, *(f'▁{n}' for n in STATE_BINS), *symbols],
        num_threads=1,
        minloglevel=2,
        **_SPECIAL,
    )
    write_bytes(path, model.getvalue())
    return Tokenizer.load(path)


def number_tokens(path: Path) -> np.ndarray:
    """(257,) token ids of the numbers -1 to 255 as in a prompt."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    return np.array([model.piece_to_id(f'▁{n}') for n in STATE_BINS])

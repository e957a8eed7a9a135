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

from vla_runtime.declarations.pi0_fast import Pi0FastDims
from vla_runtime.family.listing import find_family
from vla_runtime.files.atomic_write import write_bytes, write_text
from vla_runtime.processing.fast_tokens import AnswerError, FastScale, FastTokens, inverse_cosines
from vla_runtime.processing.prompts import PromptFormat, build_prompt
from vla_runtime.processing.tokenizer import Tokenizer
from vla_tabletop.sim.tasks import all_instructions
from vla_tabletop.training.world import TrainingSamples

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


# --- Chunks as tokens of FAST (arXiv 2501.09747), for a policy that writes them


ACTION_TOKENS = 512
# Behind the numbers of the text vocabulary; the first token of FAST is the last of them.
ACTION_SYMBOLS = (*(f'<action{number}>' for number in range(ACTION_TOKENS)), '|')
# So that a coefficient is one byte of UTF-8, and no stream of actions can break it.
ACTION_SCALE = FastScale(8.0, -63)
_MOST_CODE = 127
# Batches of chunks that a vocabulary is trained on.
_BATCHES, _BATCH = 64, 64


def tokens_behind_actions(vocabulary: int) -> int:
    """Return how many tokens of a text vocabulary with `ACTION_SYMBOLS` follow the actions."""
    return vocabulary - FIRST_SYMBOL - ACTION_TOKENS


def train_action_vocabulary(path: Path, samples: TrainingSamples) -> None:
    """Train byte pairs on chunks of the samples and write the tokenizer.json."""
    import tokenizers

    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    bytes_of = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = bytes_of
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=ACTION_TOKENS,
        show_progress=False,
        # A coefficient that no chunk had would be left out, and shift those behind it.
        initial_alphabet=[
            bytes_of.pre_tokenize_str(chr(code))[0][0] for code in range(_MOST_CODE + 1)
        ],
    )
    rng = np.random.default_rng(0)
    frames = np.flatnonzero(samples.teaches())
    chunks = (samples.batch(rng.choice(frames, _BATCH), rng).actions for _ in range(_BATCHES))
    model.train_from_iterator(
        (text for batch in chunks for text in coefficient_texts(batch)), trainer
    )
    write_text(path, model.to_str())


def coefficient_texts(actions: np.ndarray) -> Iterable[str]:
    """Yield the text of each normalised chunk of (B, H, A): a character for each coefficient."""
    waves = inverse_cosines(actions.shape[1])
    coefficients = np.einsum('hk,bha->bka', waves, actions) * ACTION_SCALE.scale
    codes = np.clip(np.rint(coefficients) - ACTION_SCALE.min_token, 0, _MOST_CODE).astype(int)
    for chunk in codes.reshape(len(codes), -1):
        written = np.flatnonzero(chunk != -ACTION_SCALE.min_token)
        # At least one coefficient: an answer without an action is refused.
        yield ''.join(map(chr, chunk[: 1 + max(written, default=0)]))


class Answers:
    """The tokens that a policy is to write for chunks, and the chunks of its tokens.

    `text`: vocabulary with `ACTION_SYMBOLS`; `action`: tokenizer.json of the actions.
    """

    def __init__(self, text: Path, action: Path, dims: Pi0FastDims) -> None:
        import tokenizers

        self._encoder = tokenizers.Tokenizer.from_file(str(action))
        self._shape = dims.horizon, dims.action_dim
        self._decoder = FastTokens(
            text,
            action,
            ACTION_SCALE,
            self._shape,
            skipped=dims.skipped_tokens,
            checks_prefix=dims.checks_prefix,
        )
        end = self._decoder.end
        assert end is not None
        self._end = end
        self._first = dims.vocabulary - 1 - dims.skipped_tokens
        self._most = dims.answer_tokens

    def write(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Write normalised chunks (B, H, A) as tokens (B, n) int64 and mask (B, n) bool.

        An end follows each answer; one beyond the policy's length lacks its highest frequencies.
        """
        answers = []
        for text in coefficient_texts(actions):
            ids = self._encoder.encode(text).ids[: self._most - 1]
            answers.append([*(self._first - number for number in ids), self._end])
        longest = max(map(len, answers))
        tokens = np.zeros((len(answers), longest), dtype=np.int64)
        mask = np.zeros(tokens.shape, dtype=bool)
        for row, answer in enumerate(answers):
            tokens[row, : len(answer)] = answer
            mask[row, : len(answer)] = True
        return tokens, mask

    def read(self, tokens: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the chunks (B, H, A) of answers (B, K), and how many are none: zeros."""
        chunks = np.zeros((len(tokens), *self._shape), dtype=np.float32)
        refused = 0
        for row, answer in enumerate(tokens):
            try:
                chunks[row] = self._decoder(answer)
            except AnswerError:
                refused += 1
        return chunks, refused

"""The text that a policy is prompted with, letter for letter as its training code wrote it.

The advantage tag (RECAP, pi*0.6) is added after cleaning, so cleaning cannot change it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

from vla_runtime.files.free_text import FreeText
from vla_runtime.processing.words import check_word
from vla_runtime.types import Advantage, AdvantageTemplate, PromptCleaning, later

# Layouts of `Family.templates`; a special token that the instruction spells is text.

IMAGES, TASK, STATE, TAG = '{images}', '{task}', '{state}', '{tag}'
NUMBER, TOKENS = '{number}', '{tokens}'


class Piece(NamedTuple):
    """A piece of a prompt; `frame` is True where special tokens are recognised."""

    text: str
    frame: bool


@dataclass(frozen=True)
class PromptLayout:
    """Text around what changes from prompt to prompt.

    Attributes:
        text: the whole prompt, with `{task}` once, `{images}` once before or behind it where images
            stand in the prompt, and, each once at most, `{state}` (the normalised state in 256
            bins) and `{tag}` (the line of the advantage tag `before_action`) after the task.
        image: text that stands for one image, with `{tokens}` where its image tokens go and
            `{number}` for its number, counted from 1; '' where images do not stand in the prompt.
        bos: the vocabulary's BOS stands in front of the prompt.
        closing: token that the prompt ends with, added where it does not; '' for none.
        special: tokens of `text` and `image` that the vocabulary must have.
        lerobot_task: the task with the cleaning `lerobot`: `unchanged`, `stripped`, `cleaned` as
            openpi does it, or a `clause` that goes on a sentence (`_clause`).
        state_token: text of a number of the state, `{}` its bin, of `PromptFormat.state_levels`;
            '': bins of 256 between spaces.
        words: usual words for further marks in braces; `PromptFormat.words` has the checkpoint's.
        alone: text that stands for the image where there is only one; '': as for several.

    Raises:
        ValueError: marks that are missing, too many or in another order.
    """

    text: str
    image: str = ''
    bos: bool = True
    closing: str = ''
    special: tuple[str, ...] = ()
    lerobot_task: Literal['unchanged', 'stripped', 'cleaned', 'clause'] = 'unchanged'
    state_token: str = ''
    words: Mapping[str, str] = field(default_factory=dict)
    alone: str = ''

    def __post_init__(self) -> None:
        before, found, after = self.text.partition(TASK)
        marks = (self.text.count(IMAGES), after.count(STATE) <= 1, after.count(TAG) <= 1)
        if not found or marks != (int(bool(self.image)), True, True):
            raise ValueError(
                f"layout {self.text!r}: expected '{TASK}' once, '{IMAGES}' once where images "
                f"stand in the prompt, and '{STATE}' and '{TAG}' at most once after '{TASK}'"
            )
        if any(mark in before for mark in (STATE, TAG)) or TASK in after:
            raise ValueError(f'layout {self.text!r}: marks in another order')
        if self.image and self.image.count(TOKENS) != 1:
            raise ValueError(f"layout {self.image!r}: expected '{TOKENS}' once")

    def filled(self, words: Mapping[str, str]) -> PromptLayout:
        """Put the checkpoint's words in (ValueError: words that the layout does not have)."""
        if unknown := set(words) - set(self.words):
            raise ValueError(
                f'prompt.words has {", ".join(sorted(unknown))}; expected are '
                f'{", ".join(self.words) or "none"}'
            )
        text = self.text
        for name, word in {**self.words, **words}.items():
            text = text.replace(f'{{{name}}}', word)
        return replace(self, text=text, words={})

    @property
    def has_state(self) -> bool:
        return STATE in self.text

    @property
    def images_last(self) -> bool:
        """True where the images stand behind the task: padding is then in front of the prompt."""
        return IMAGES in self.text.partition(TASK)[2]

    @property
    def around_task(self) -> tuple[str, str]:
        """Text between the images or start and the task, and text behind it, images marked."""
        before, _, after = self.text.partition(TASK)
        return before.rpartition(IMAGES)[2], after

    def pieces(
        self, cameras: int, prompt: tuple[str, str, str], special: Iterable[str]
    ) -> list[Piece]:
        """Cut a prompt into pieces that are tokenised one by one.

        Plain text beside the task is one piece with it, because a tokenizer may join them.

        Args:
            prompt: text before the task, task, text behind it, as `prompt_parts` writes them.
            special: texts of the vocabulary's special tokens.

        Returns:
            A piece in front of each image's tokens and the rest, three with the task; without
            images one piece.
        """
        before, task, after = prompt
        if not self.image:
            return [Piece(before + task + after, False)]
        words = [word for word in special if word]
        start_text, _, end_text = (after if self.images_last else self.text).partition(IMAGES)
        # Text in front of each image's tokens.
        texts, closing = [], start_text
        image = self.alone if self.alone and cameras == 1 else self.image
        for number in range(1, cameras + 1):
            opening, end = image.replace(NUMBER, str(number)).split(TOKENS)
            texts.append(closing + opening)
            closing = end
        if self.images_last:
            after, *texts = *texts, closing + end_text
        else:
            before = closing + before
        # Where the last special token before the task ends, and the first one after it begins.
        start = max((before.rfind(word) + len(word) for word in words if word in before), default=0)
        stop = min((after.find(word) for word in words if word in after), default=len(after))
        with_task = [
            Piece(before[:start], True),
            Piece(before[start:] + task + after[:stop], False),
            Piece(after[stop:], True),
        ]
        frames = [Piece(text, True) for text in texts]
        return [*with_task, *frames] if self.images_last else [*frames, *with_task]

    def image_places(self, counts: Sequence[int], cameras: int, length: int) -> tuple[int, ...]:
        """Text tokens before each image, padding among them.

        Args:
            counts: tokens of each of the `pieces`.
            length: L, text tokens of the padded prompt.
        """
        if self.images_last:
            return tuple(length - sum(counts[camera - cameras :]) for camera in range(cameras))
        return tuple(sum(counts[: camera + 1]) for camera in range(cameras))


# 256 bins over [-1, 1]; the last edge is left out, so 1 and all above it fall into bin 255.
_BIN_EDGES = np.linspace(-1, 1, 257)[:-1]
# All but letters, digits, `_` and white space.
_SIGNS = re.compile(r'[^\w\s]')


@dataclass(frozen=True)
class PromptFormat:
    """The `prompt` section of policy.yaml: the form of the prompts.

    Attributes:
        template: name of one of the family's layouts (`Family.templates`).
        cleaning: `openpi` strips the task and turns `_` and newlines into spaces; `lerobot` does
            what `PromptLayout.lerobot_task` says. `python_list` leaves the text as it is and writes
            it as Python writes a list of it: `['pick up the cup']`. `letters` turns the text into
            small letters and leaves out all but letters, digits, `_` and white space. `lower` turns
            the text into small letters. `unchanged` leaves it as it is.
        advantage: where the advantage tag stands; None for a policy trained without one.
        state_bins: numbers of the state in the prompt, where there are more than the state has:
            zeros follow it. None: as many as the state has.
        state_levels: tokens that a number of the state is one of, of a layout with `state_token`.
            None: 256.
        words: the checkpoint's words for marks of the layout (`PromptLayout.words`); None: it has
            none of its own.
    """

    template: str
    cleaning: PromptCleaning
    advantage: AdvantageTemplate | None = None
    state_bins: int | None = later(None)
    state_levels: int | None = later(None)
    words: Mapping[str, FreeText] | None = later(None)

    def __post_init__(self) -> None:
        check_word('prompt.cleaning', self.cleaning, PromptCleaning)
        if self.advantage is not None:
            check_word('prompt.advantage', self.advantage, AdvantageTemplate)


def discretise_state(normalised: np.ndarray) -> np.ndarray:
    """Return the bins of a normalised state (S,), as a prompt holds it: 0 to 255, and -1 below -1.

    Returns:
        (S,) int64 in -1 ... 255: `digitize(x, linspace(-1, 1, 257)[:-1]) - 1`.

    Raises:
        ValueError: not one-dimensional, empty, or not finite.
    """
    normalised = np.asarray(normalised)
    if normalised.ndim != 1 or normalised.size == 0:
        raise ValueError(
            f'state must be one row of numbers, got an array of shape {normalised.shape}'
        )
    bad = np.flatnonzero(~np.isfinite(normalised))
    if bad.size:
        raise ValueError(
            f'state has {normalised[bad[0]]} at index {bad[0]} ({bad.size} of {normalised.size} '
            'values are not finite): check the joint driver and the normaliser statistics'
        )
    return (np.digitize(normalised, _BIN_EDGES) - 1).astype(np.int64)


USUAL_LEVELS = 256


def state_bins(layout: PromptLayout, fmt: PromptFormat, normalised: np.ndarray) -> np.ndarray:
    """Return the bins of a normalised state (S,), as a layout writes them, (S,) int64."""
    if not layout.state_token:
        return discretise_state(normalised)
    levels = fmt.state_levels or USUAL_LEVELS
    bounded = np.clip(np.asarray(normalised, np.float32), np.float32(-1.0), np.float32(1.0))
    scaled = (bounded + np.float32(1.0)) / np.float32(2.0) * np.float32(levels - 1)
    return np.rint(scaled).astype(np.int64)


def prompt_parts(
    layout: PromptLayout,
    fmt: PromptFormat,
    task: str,
    normalised_state: np.ndarray | None,
    advantage: Advantage | None = None,
) -> tuple[str, str, str]:
    """Write the prompt of one row, from the images, if there are any, to its end.

    Args:
        normalised_state: (S,) state after the normaliser; only a layout with `{state}` reads it.
        advantage: the tag of a guided row; None for a row without a tag.

    Returns:
        Text before the task, the task, text behind it. With a tag: `task_newline` puts it on a
        line of its own after the task, `in_task_space` after the task and a space, `before_action`
        on the line that the layout has for it (`{tag}`), else as `task_newline`.

    Raises:
        ValueError: an empty instruction, a missing, empty or non-finite state, a tag for a format
            that has none.
    """
    text, tag_line = _clean(layout, fmt, task), ''
    before, after = layout.around_task
    if advantage is not None:
        place, tag = _advantage_place(fmt), _advantage_tag(advantage)
        # A newline that the caller left at the end would push the tag a line down.
        text = text.rstrip('\n')
        if place == 'before_action' and TAG in after:
            tag_line = f'{tag};\n'
        else:
            text = f'{text} {tag}' if place == 'in_task_space' else f'{text}\n{tag}'
    if fmt.cleaning == 'python_list':
        text = str([text])
    if layout.has_state:
        after = after.replace(STATE, _state_words(layout, fmt, normalised_state))
    after = after.replace(TAG, tag_line)
    # A task that ends with a newline has the layout's: there is one, not two.
    return before, text, after[1:] if text.endswith('\n') and after.startswith('\n') else after


def build_prompt(
    layout: PromptLayout,
    fmt: PromptFormat,
    task: str,
    normalised_state: np.ndarray | None,
    advantage: Advantage | None = None,
) -> str:
    """Write the prompt of one row as one text; as `prompt_parts`."""
    return ''.join(prompt_parts(layout, fmt, task, normalised_state, advantage))


def _clean(layout: PromptLayout, fmt: PromptFormat, task: str) -> str:
    if not isinstance(task, str):
        raise ValueError(f'instruction must be text, got {type(task).__name__}')
    cleaned = task.strip().replace('_', ' ').replace('\n', ' ')
    if not cleaned.strip():
        raise ValueError(
            f'instruction is empty (got {task!r}): say in plain words what the robot is to do'
        )
    if fmt.cleaning == 'letters':
        words = _SIGNS.sub('', task.lower())
        if not words.strip():
            raise ValueError(
                f'instruction has neither letters nor digits (got {task!r}): say in plain words '
                'what the robot is to do'
            )
        return words
    if fmt.cleaning == 'lower':
        return task.lower()
    if fmt.cleaning == 'unchanged':
        return task
    if fmt.cleaning == 'openpi' or layout.lerobot_task == 'cleaned':
        return cleaned
    if layout.lerobot_task == 'clause':
        return _clause(task)
    return task.strip() if layout.lerobot_task == 'stripped' else task


# Signs that end a sentence, that close one, and that stand around one.
_ENDS, _CLOSES, _AROUND = (
    '.,!?;:,\u2026',
    '"\'\u201d\u2019)]}',
    '"\'`\u201c\u201d\u2018\u2019[](){}',
)
_HEADINGS = (
    re.compile(r'^(?:task|instruction|language[_ ]instruction|goal)\s*[:\-]\s*', re.IGNORECASE),
    re.compile(r'^(?:the|your)\s+task\s+is\s+to\s+', re.IGNORECASE),
)


def _clause(task: str) -> str:
    """The task without quotes, heading and last signs, sentences as `a; b`, in small letters."""
    text, before = ' '.join(task.split()), ''
    while text != before:
        before = text
        text = text.strip(_AROUND + ' ') if text else text
        for heading in _HEADINGS:
            text = heading.sub('', text, count=1).strip()
        for signs in (_ENDS, _CLOSES, _ENDS):
            text = text.rstrip(signs).rstrip()
    sentences = [one.strip() for one in re.split(r'[.!?]+', text) if one.strip()]
    if not sentences:
        raise ValueError(
            f'instruction has no words (got {task!r}): say in plain words what the robot is to do'
        )
    return ('; '.join(sentences) if len(sentences) > 1 else text).lower()


def _state_words(
    layout: PromptLayout, fmt: PromptFormat, normalised_state: np.ndarray | None
) -> str:
    if normalised_state is None:
        raise ValueError(
            'this prompt.template writes the state into the prompt, but no state was given; a '
            'checkpoint trained without it has another template'
        )
    normalised_state, bins = np.asarray(normalised_state), fmt.state_bins
    if layout.state_token:
        levels = state_bins(layout, fmt, normalised_state)
        return ''.join(layout.state_token.format(level) for level in levels)
    if bins is not None and normalised_state.ndim == 1:
        normalised_state = np.pad(normalised_state, (0, max(0, bins - len(normalised_state))))
    return ' '.join(str(number) for number in discretise_state(normalised_state))


def _advantage_place(fmt: PromptFormat) -> AdvantageTemplate:
    if fmt.advantage is None:
        raise ValueError(
            'an advantage was asked for, but this bundle does not say where its tag goes: if the '
            "checkpoint was trained with one, set prompt.advantage in the bundle's policy.yaml to "
            f'one of {", ".join(get_args(AdvantageTemplate))}; if not, switch guidance off'
        )
    return fmt.advantage


def _advantage_tag(advantage: Advantage) -> str:
    check_word('advantage', advantage, Advantage)
    return f'Advantage: {advantage}'

"""Layout of a prompt: text around images, task and state, as the training code wrote it.

Every family fills layouts with its own text (`Family.templates`). Special tokens of a layout are
those of the vocabulary; a special token that the instruction spells is text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
        lerobot_task: the task with the cleaning `lerobot`: `unchanged`, `stripped`, or `cleaned` as
            openpi does it.

    Raises:
        ValueError: marks that are missing, too many or in another order.
    """

    text: str
    image: str = ''
    bos: bool = True
    closing: str = ''
    special: tuple[str, ...] = ()
    lerobot_task: Literal['unchanged', 'stripped', 'cleaned'] = 'unchanged'

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

    @property
    def has_state(self) -> bool:
        """True where the state is written into the prompt."""
        return STATE in self.text

    @property
    def images_last(self) -> bool:
        """True where the images stand behind the task.

        Padding then stands in front of the prompt, so that the images keep their places whatever
        the length of the task.
        """
        return IMAGES in self.text.partition(TASK)[2]

    @property
    def around_task(self) -> tuple[str, str]:
        """Text between the images, or the start, and the task, and text behind the task.

        Images behind the task are a mark in the latter.
        """
        before, _, after = self.text.partition(TASK)
        return before.rpartition(IMAGES)[2], after

    def pieces(
        self, cameras: int, prompt: tuple[str, str, str], special: Iterable[str]
    ) -> list[Piece]:
        """Cut a prompt into pieces that are tokenised one by one.

        Plain text beside the task is one piece with it, because a tokenizer may join them.

        Args:
            cameras: images.
            prompt: text before the task, task, text behind it, as `prompt_parts` writes them.
            special: texts of the vocabulary's special tokens.

        Returns:
            a piece in front of each image's tokens and the rest, three with the task; without
            images one piece
        """
        before, task, after = prompt
        if not self.image:
            return [Piece(before + task + after, False)]
        words = [word for word in special if word]
        start_text, _, end_text = (after if self.images_last else self.text).partition(IMAGES)
        # Text in front of each image's tokens.
        texts, closing = [], start_text
        for number in range(1, cameras + 1):
            opening, end = self.image.replace(NUMBER, str(number)).split(TOKENS)
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
            cameras: images.
            length: L, text tokens of the padded prompt.
        """
        if self.images_last:
            return tuple(length - sum(counts[camera - cameras :]) for camera in range(cameras))
        return tuple(sum(counts[: camera + 1]) for camera in range(cameras))

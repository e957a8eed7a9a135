"""Prompts in the form of a chat: the images stand inside the text, each between its markers.

The layout is data of the bundle. Its special tokens are those of the vocabulary; a special token
that the instruction spells is text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

IMAGES, TASK, NUMBER, TOKENS = '{images}', '{task}', '{number}', '{tokens}'
# A line end: policy.yaml has no texts of several lines.
NEWLINE = '{newline}'


class Piece(NamedTuple):
    """A piece of a prompt; `frame` is True where special tokens are recognised."""

    text: str
    frame: bool


@dataclass(frozen=True)
class ChatLayout:
    """Text around images and task.

    Attributes:
        frame: the whole prompt with `{images}`, later `{task}`, once each; `{newline}` is a line
            end here and in `image`.
        image: what stands for one image, with `{tokens}` where its image tokens go and `{number}`
            for its number, counted from 1.
    """

    frame: str
    image: str

    def __post_init__(self) -> None:
        for name, text, marks in (
            ('frame', self.frame, (IMAGES, TASK)),
            ('image', self.image, (TOKENS,)),
        ):
            for mark in marks:
                if text.count(mark) != 1:
                    raise ValueError(
                        f"prompt.{name} has '{mark}' {text.count(mark)} times where 1 is expected"
                    )
        if self.frame.index(IMAGES) > self.frame.index(TASK):
            raise ValueError(
                f"prompt.frame has '{TASK}' before '{IMAGES}'; only images before the task are "
                'supported, because their places must not depend on the task'
            )

    def before_images(self, cameras: int) -> list[str]:
        """Texts in front of each image's tokens: from the image before it, or from the start."""
        start, _ = _lines(self.frame).split(IMAGES)
        texts, text = [], start
        for number in range(1, cameras + 1):
            opening, closing = self._markers(number)
            texts.append(text + opening)
            text = closing
        return texts

    def after_images(self, cameras: int) -> tuple[str, str]:
        """Text between the last image's tokens and the task, and the text after the task."""
        _, rest = _lines(self.frame).split(IMAGES)
        before, after = rest.split(TASK)
        closing = self._markers(cameras)[1] if cameras else ''
        return closing + before, after

    def _markers(self, number: int) -> tuple[str, str]:
        text = _lines(self.image).replace(NUMBER, str(number))
        opening, closing = text.split(TOKENS)
        return opening, closing


def _lines(text: str) -> str:
    return text.replace(NEWLINE, '\n')


def image_places_of(counts: Sequence[int], cameras: int) -> tuple[int, ...]:
    """Text tokens before each image, from the tokens of each piece of `chat_pieces`."""
    return tuple(sum(counts[: camera + 1]) for camera in range(cameras))


def chat_pieces(layout: ChatLayout, cameras: int, task: str, special: Iterable[str]) -> list[Piece]:
    """Cut a prompt into pieces that are tokenised one by one.

    Plain text beside the task is one piece with it, because a tokenizer may join them.

    Args:
        layout: of the prompt.
        cameras: images.
        task: as it stands in the prompt.
        special: texts of the vocabulary's special tokens.

    Returns:
        a piece in front of each image's tokens, then the rest
    """
    words = [word for word in special if word]
    before, after = layout.after_images(cameras)
    # Where the last special token before the task ends, and the first one after it begins.
    start = max((before.rfind(word) + len(word) for word in words if word in before), default=0)
    stop = min((after.find(word) for word in words if word in after), default=len(after))
    pieces = [Piece(text, True) for text in layout.before_images(cameras)]
    pieces += [
        Piece(before[:start], True),
        Piece(before[start:] + task + after[:stop], False),
        Piece(after[stop:], True),
    ]
    return pieces

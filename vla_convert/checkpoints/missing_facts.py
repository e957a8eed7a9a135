"""Missing facts and contradictions of a folder, collected and reported in one error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from vla_convert.checkpoints.folder_facts import ExportError
from vla_runtime.bundle.schema import CameraSpec

T = TypeVar('T')


@dataclass(frozen=True)
class Question:
    """Something the folder lacks: the option that supplies it, and what is wanted."""

    option: str
    wanted: str


class MissingFacts:
    """Missing facts and contradictions noted so far.

    Attributes:
        policies: project and family of the folder, for messages.
    """

    def __init__(self, folder: Path) -> None:
        self.policies = ''
        self._folder = folder
        self._questions: list[Question] = []
        self._conflicts: list[str] = []
        self._unusable: list[str] = []
        self._used: set[str] = set()

    @property
    def questions(self) -> tuple[Question, ...]:
        """What was asked for so far."""
        return tuple(self._questions)

    def ask(self, option: str, wanted: str) -> None:
        """Note that something is missing."""
        question = Question(option, wanted)
        if question not in self._questions:
            self._questions.append(question)

    def conflict(self, message: str) -> None:
        """Note a contradiction."""
        if message not in self._conflicts:
            self._conflicts.append(message)

    def unusable(self, message: str) -> None:
        """Note an option's value that cannot be used, whatever the folder says."""
        if message not in self._unusable:
            self._unusable.append(message)

    def use(self, *options: str) -> None:
        """Note options that say something about this folder."""
        self._used.update(options)

    def pick(
        self,
        option: str,
        given: T | None,
        stated: T | None,
        wanted: str,
        *,
        default: T | None = None,
    ) -> T | None:
        """Return the stated value, else the given one, else the default; else note it missing.

        Args:
            given: from the user; must not differ from a stated value.
            wanted: description of the value for the user.
        """
        self.use(option)
        if given is not None and stated is not None and given != stated:
            self.conflict(
                f'{option} says {as_option(given)} but the {self.policies} folder says '
                f'{as_option(stated)}'
            )
        for value in (stated, given, default):
            if value is not None:
                return value
        self.ask(option, wanted)
        return None

    def refuse_unused(self, options: Iterable[str]) -> None:
        """Note options that were given and that say nothing about this folder."""
        for option in options:
            if option not in self._used:
                self.unusable(
                    f'{option} is given, but {self.policies} has no use for it: leave it out'
                )

    def raise_if_any(self) -> None:
        """Raise one ExportError with everything noted, if anything was."""
        if not (self._questions or self._conflicts or self._unusable):
            return
        lines = [f'{self._folder} ({self.policies}) cannot become a bundle yet.']
        if self._questions:
            width = max(len(question.option) for question in self._questions)
            lines.append('The folder does not say the following; give it by option:')
            lines += [f'  {item.option:<{width}}  {item.wanted}' for item in self._questions]
        if self._unusable:
            lines += ['These options cannot be used:', *(f'  {text}' for text in self._unusable)]
        if self._conflicts:
            lines.append('These contradict each other; only one can be right:')
            lines += [f'  {text}' for text in self._conflicts]
        raise ExportError('\n'.join(lines))


def as_option(value: object) -> str:
    """Write a value as its option takes it."""
    if isinstance(value, tuple):
        return ','.join(as_option(item) for item in value)
    if isinstance(value, CameraSpec):
        return value.name if value.present else f'{value.name}=absent'
    return str(value)

"""Missing facts and contradictions of a folder, collected and reported in one error."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from vla_convert.checkpoints.folder_facts import ExportError, FolderFacts, Question
from vla_runtime.bundle.schema import CameraSpec

T = TypeVar('T')


class MissingFacts:
    """Missing facts and contradictions noted so far."""

    def __init__(self, folder: Path, facts: FolderFacts) -> None:
        self._folder = folder
        self._kind = f'{facts.kind} {facts.family}'
        self._questions: list[Question] = list(facts.questions)
        self._conflicts: list[str] = []
        self._unusable: list[str] = []
        self._picked: set[str] = set()

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
        self._picked.add(option)
        if given is not None and stated is not None and given != stated:
            self.conflict(
                f'{option} says {as_option(given)} but the {self._kind} folder says '
                f'{as_option(stated)}'
            )
        for value in (stated, given, default):
            if value is not None:
                return value
        self.ask(option, wanted)
        return None

    def refuse_unused(self, options: Iterable[str]) -> None:
        """Note options that were given and that nothing was picked from."""
        for option in options:
            if option not in self._picked:
                self.conflict(
                    f'{option} is given, but {self._kind} has no use for it: leave it out'
                )

    def raise_if_any(self) -> None:
        """Raise one ExportError with everything noted, if anything was."""
        if not (self._questions or self._conflicts or self._unusable):
            return
        lines = [f'{self._folder} ({self._kind}) cannot become a bundle yet.']
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

"""What `vla_runtime doctor` finds: one line each, with what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal['ok', 'note', 'problem']
_SHOWN: dict[Level, str] = {'ok': 'OK', 'note': 'note', 'problem': 'PROBLEM'}


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        area: chapter of the report, such as `machine`.
        what: thing that was looked at, such as `camera front`.
        level: a `note` is for a person to judge, and leaves the exit code at 0.
        text: what was found.
        mend: what to do; empty for what is well.
    """

    area: str
    what: str
    level: Level
    text: str
    mend: str = ''

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def ok(area: str, what: str, text: str) -> Finding:
    return Finding(area, what, 'ok', text)


def note(area: str, what: str, text: str, mend: str = '') -> Finding:
    return Finding(area, what, 'note', text, mend)


def problem(area: str, what: str, text: str, mend: str) -> Finding:
    return Finding(area, what, 'problem', text, mend)


def report(findings: Sequence[Finding]) -> list[str]:
    """Return the lines of a report, one chapter an area; problems have a second line."""
    width = max((len(one.what) for one in findings), default=0)
    lines = []
    for area in dict.fromkeys(one.area for one in findings):
        lines.append(f'{area}:')
        for one in (one for one in findings if one.area == area):
            lines.append(f'  {_SHOWN[one.level]:<7}  {one.what:<{width}}  {one.text}')
            if one.mend:
                lines.append(f'  {"":<7}  {"":<{width}}  -> {one.mend}')
    problems = sum(one.level == 'problem' for one in findings)
    if not problems:
        return [*lines, 'no problem found']
    return [*lines, f'{problems} problem{"s" if problems > 1 else ""} found']

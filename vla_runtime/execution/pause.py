"""A pause: a started robot rests, or goes home, and takes no chunk until a person lets it go on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Pause:
    """What a person has asked a started robot for.

    Attributes:
        active: the policy has no say.
        text: why, in words; empty where a person called for it.
        goes_home: the robot sets out for its home pose as soon as it rests.
    """

    active: bool = False
    text: str = ''
    goes_home: bool = False

    def begin(self, text: str = '') -> None:
        self.active, self.text, self.goes_home = True, text, False

    def end(self) -> None:
        self.active, self.text, self.goes_home = False, '', False

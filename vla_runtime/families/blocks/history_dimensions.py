"""Sizes of policies that see several steps of an observation. Pure numbers."""

from __future__ import annotations


class HistoryDims:
    """What follows from cameras, steps and images; a subclass is a dataclass with these fields.

    Attributes:
        image: (height, width) of the cameras' images in pixels.
        resize: (height, width) that they are resized to; None: they are not.
        crop: (height, width) of the middle that the network sees; None: all.
        cameras: images of an observation; an earlier frame of a camera is an image of its own. The
            newest frames of all cameras come first, then those of a step before, and so on.
        observation_steps: steps of the observation that the policy sees, the newest included.
        horizon: actions that are denoised; the first is that of the oldest step.
        real_horizon: actions that the robot has, from that of the newest step on.
    """

    image: tuple[int, int]
    resize: tuple[int, int] | None
    crop: tuple[int, int] | None
    cameras: int
    observation_steps: int
    horizon: int
    real_horizon: int

    def check_history(self) -> None:
        """Refuse sizes that do not go together (ValueError)."""
        if self.observation_steps < 1 or self.cameras % self.observation_steps:
            raise ValueError(
                f'cameras {self.cameras} is not a multiple of the {self.observation_steps} '
                'observation_steps; every camera has a frame of each step'
            )
        most = self.horizon - self.first_action
        if not 1 <= self.real_horizon <= most:
            raise ValueError(
                f'real_horizon {self.real_horizon} where 1 to {most} is expected: horizon '
                f'{self.horizon} without the {self.first_action} actions of earlier steps'
            )
        if self.crop is not None:
            high, wide = self.resize or self.image
            if self.crop[0] > high or self.crop[1] > wide or min(self.crop) < 1:
                raise ValueError(f'crop {self.crop} does not lie in images of {(high, wide)}')

    @property
    def own_cameras(self) -> int:
        """Cameras, whatever the number of their frames."""
        return self.cameras // self.observation_steps

    @property
    def first_action(self) -> int:
        """Row of a chunk that is due at the observation's time."""
        return self.observation_steps - 1

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of each image."""
        return (self.image,) * self.cameras

    @property
    def seen(self) -> tuple[int, int]:
        """(height, width) that the vision network sees."""
        return self.crop or self.resize or self.image

"""Renders demo.gif: the shipped policy in the simulator, told one block after the other.

    ./run exec python docs/make_picture.py

Nothing is staged: the policy of engines/demo drives the simulated arm closed loop, and the seeds
are the first ones. The large picture is the front camera's, the small one the wrist camera's.
"""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from vla_runtime.policy import Policy
from vla_runtime.tabletop.sim.closed_loop import policy_chunk
from vla_runtime.tabletop.sim.rollout import run_episode
from vla_runtime.tabletop.sim.tasks import sample_task
from vla_runtime.tabletop.sim.world import Tabletop

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / 'docs' / 'demo.gif'
SEEDS = range(3)
REPLAN_STEPS = 8
# Every so many control ticks of 10 ms a frame; shown at the speed of the simulated clock.
TICKS_PER_FRAME = 10
FRAME_MS = 100
LAST_FRAME_MS = 800
FRONT, WRIST, MARGIN, CAPTION = (400, 300), (120, 90), 8, 30
COLOURS = 48


class FilmedTabletop(Tabletop):
    """A tabletop that takes a frame every `TICKS_PER_FRAME` ticks."""

    def __init__(self) -> None:
        self.frames: list[np.ndarray] = []
        self.caption = ''
        self._ticks = 0
        super().__init__()

    def step(self, command_rad: np.ndarray) -> None:
        if self._ticks % TICKS_PER_FRAME == 0:
            self.take_frame()
        self._ticks += 1
        super().step(command_rad)

    def take_frame(self) -> None:
        """Both cameras and the instruction, uint8 (height, width, 3), RGB."""
        front, wrist = self.render('front', *FRONT), self.render('wrist', *WRIST)
        frame = np.full((FRONT[1] + CAPTION, FRONT[0], 3), 255, np.uint8)
        frame[: FRONT[1]] = front
        top, left = MARGIN, FRONT[0] - WRIST[0] - MARGIN
        frame[top - 2 : top + WRIST[1] + 2, left - 2 : left + WRIST[0] + 2] = 255
        frame[top : top + WRIST[1], left : left + WRIST[0]] = wrist
        place = (MARGIN, FRONT[1] + CAPTION - 10)
        font, line = cv2.FONT_HERSHEY_SIMPLEX, cv2.LINE_AA
        cv2.putText(frame, self.caption, place, font, 0.55, (40, 40, 40), 1, line)
        self.frames.append(frame)


def film() -> list[tuple[np.ndarray, int]]:
    """Frames and how long each is shown, milliseconds."""
    shown: list[tuple[np.ndarray, int]] = []
    world, policy = FilmedTabletop(), Policy.load(ROOT / 'engines' / 'demo')
    for seed in SEEDS:
        state = world.reset(seed)
        rng = np.random.default_rng([seed, 100])
        task = sample_task(rng, state.block_m, 'colour', 'plain')
        policy.reset()
        world.caption = task.instruction
        outcome = run_episode(world, task, policy_chunk(policy), REPLAN_STEPS)
        world.take_frame()
        print(f'seed {seed}: {task.instruction}: {outcome}, {len(world.frames)} frames')
        shown += [(frame, FRAME_MS) for frame in world.frames[:-1]]
        shown.append((world.frames[-1], LAST_FRAME_MS))
        world.frames.clear()
    policy.close()
    world.close()
    return shown


def main() -> None:
    shown = film()
    # One palette for all frames, so that only what moves is stored of each.
    every = np.concatenate([frame for frame, _ in shown[::8]])
    palette = Image.fromarray(every).quantize(COLOURS, dither=Image.Dither.NONE)
    first, *others = (
        Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE)
        for frame, _ in shown
    )
    first.save(
        PICTURE,
        save_all=True,
        append_images=others,
        duration=[shown_ms for _, shown_ms in shown],
        loop=0,
        optimize=True,
    )
    print(f'{PICTURE}: {len(shown)} frames, {PICTURE.stat().st_size / 1000:.0f} kB')


if __name__ == '__main__':
    main()

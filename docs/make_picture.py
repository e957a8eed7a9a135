"""Renders demo.gif: the shipped policy in the simulator, one instruction after the other.

    ./run exec python docs/make_picture.py

Nothing is staged: the policy of engines/demo drives the simulated arm closed loop, and the seeds
are the first ones. The small pictures are all that the policy sees, front and wrist camera.
"""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from vla_runtime.policy import Policy
from vla_tabletop.sim.arm import MODEL_PATH
from vla_tabletop.sim.closed_loop import policy_chunk
from vla_tabletop.sim.gl import mujoco
from vla_tabletop.sim.rollout import run_episode
from vla_tabletop.sim.tasks import sample_task
from vla_tabletop.sim.world import Tabletop

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / 'docs' / 'demo.gif'
SEEDS = range(3)
REPLAN_STEPS = 8
# So many control ticks of 10 ms a frame; shown at the speed of the simulated clock.
TICKS_PER_FRAME = 10
FRAME_MS = 100
LAST_FRAME_MS = 800
# Width and height in pixels.
VIEW, CAMERA, GAP, CAPTION = (420, 306), (200, 150), 6, 32
SKY = (0.93, 0.95, 0.97)
COLOURS = 40


class Onlooker:
    """A camera beside the table that sees the whole arm."""

    def __init__(self) -> None:
        spec = mujoco.MjSpec.from_file(str(MODEL_PATH))
        # Without a sky the background is black.
        sky, flat = mujoco.mjtTexture.mjTEXTURE_SKYBOX, mujoco.mjtBuiltin.mjBUILTIN_FLAT
        spec.add_texture(name='sky', type=sky, builtin=flat, rgb1=SKY, rgb2=SKY, width=8, height=8)
        self._model = spec.compile()
        self._data = mujoco.MjData(self._model)
        buffer = self._model.vis.global_
        buffer.offwidth, buffer.offheight = VIEW
        self._renderer = mujoco.Renderer(self._model, height=VIEW[1], width=VIEW[0])
        self._camera = mujoco.MjvCamera()
        self._camera.lookat[:] = (0.16, 0.0, 0.11)
        self._camera.distance, self._camera.azimuth, self._camera.elevation = 0.85, 125.0, -22.0

    def look(self, configuration: np.ndarray) -> np.ndarray:
        """The scene as `Tabletop.configuration` says it is: uint8 (height, width, 3), RGB."""
        self._data.qpos[:] = configuration
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)
        self._renderer.update_scene(self._data, self._camera)
        return self._renderer.render()

    def close(self) -> None:
        self._renderer.close()


class FilmedTabletop(Tabletop):
    """A tabletop that takes a frame every `TICKS_PER_FRAME` ticks."""

    def __init__(self) -> None:
        self.frames: list[np.ndarray] = []
        self.caption = ''
        self._ticks = 0
        self._onlooker = Onlooker()
        super().__init__()

    def step(self, command_rad: np.ndarray) -> None:
        if self._ticks % TICKS_PER_FRAME == 0:
            self.take_frame()
        self._ticks += 1
        super().step(command_rad)

    def take_frame(self) -> None:
        """All views and the instruction, uint8 (height, width, 3), RGB."""
        (width, height), (small_width, small_height) = VIEW, CAMERA
        frame = np.full((height + CAPTION, width + GAP + small_width, 3), 255, np.uint8)
        frame[:height, :width] = self._onlooker.look(self.configuration())
        for camera, top in (('front', 0), ('wrist', small_height + GAP)):
            place = frame[top : top + small_height, width + GAP :]
            place[:] = self.render(camera, *CAMERA)
            write(place, camera, (8, small_height - 8), 0.45)
        write(frame, self.caption, (8, height + CAPTION - 10), 0.6)
        self.frames.append(frame)

    def close(self) -> None:
        self._onlooker.close()
        super().close()


def write(picture: np.ndarray, text: str, place: tuple[int, int], size: float) -> None:
    """Write into a picture; `place` is the text's lower left corner in pixels."""
    written = np.ascontiguousarray(picture)
    font, dark = cv2.FONT_HERSHEY_SIMPLEX, (40, 40, 40)
    cv2.putText(written, text, place, font, size, dark, 1, cv2.LINE_AA)
    picture[:] = written


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
        print(f'seed {seed}: {task.instruction}: {outcome.name} after {outcome.time_s:.2f} s')
        shown += [(frame, FRAME_MS) for frame in world.frames[:-1]]
        shown.append((world.frames[-1], LAST_FRAME_MS))
        world.frames.clear()
    policy.close()
    world.close()
    return shown


def main() -> None:
    """Write the picture and say how large it is."""
    shown = film()
    # One palette for all frames, so that of each only what moves is stored.
    some = np.concatenate([frame for frame, _ in shown[::8]])
    palette = Image.fromarray(some).quantize(COLOURS, dither=Image.Dither.NONE)
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
    print(f'{PICTURE.name}: {len(shown)} frames, {PICTURE.stat().st_size / 1000:.0f} kB')


if __name__ == '__main__':
    main()

"""Renders metaworld.gif and metaworld_strips.png: a policy on the eight tasks of Meta-World.

    ./run metaworld python docs/make_film.py engines/metaworld_act

Nothing is staged: each tile is one task, the policy drives it closed loop through the executor as
in a study, and its seeds are that task's first ones of the studies. A green frame is a success as
the environment judges it, a red one a time-out. A strip is a task's first success, or its first
episode where it has none.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np
from PIL import Image
from tqdm import tqdm

from vla_tabletop.metaworld.tasks import TASKS
from vla_tabletop.metaworld.world import MetaWorld
from vla_tabletop.study.chunk_sources import PolicySource
from vla_tabletop.study.condition import Condition
from vla_tabletop.study.episode import run_episode
from vla_tabletop.study.runner import episode_seeds
from vla_tabletop.study.world import Asked

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / 'docs' / 'metaworld.gif'
STRIPS = ROOT / 'docs' / 'metaworld_strips.png'
# Frames of a strip, evenly from the start to the verdict.
STRIP = 6
SECONDS, FRAMES_A_SECOND = 60, 4
# At the speed of the simulated clock.
TICKS_PER_FRAME = round(1 / FRAMES_A_SECOND / MetaWorld.tick_s)
CAMERA, TILE, CAPTION, EDGE = 'corner4', 120, 14, 2
COLOURS = 32
LARGEST_BYTES = 3_000_000
VERDICTS = {'success': (60, 170, 60), 'timeout': (200, 50, 40)}


class Filmed(MetaWorld):
    """A world that is looked at once every few ticks."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[np.ndarray] = []
        self._ticks = 0

    def begin(self, condition: Condition, seed: int, index: int, sees: bool) -> Asked:
        """Begin an episode, and keep its first frame."""
        asked = super().begin(condition, seed, index, sees)
        self.frames = []
        self.look()
        return asked

    def step(self, command: np.ndarray) -> None:
        super().step(command)
        self._ticks += 1
        if self._ticks % TICKS_PER_FRAME == 0:
            self.look()

    def look(self) -> None:
        """Keep a frame; the policy's own images are of another size."""
        self.frames.append(cv2.resize(self.render(CAMERA), (TILE, TILE), fx=0, fy=0))


def film_task(source: PolicySource, index: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Frames of one task, as many as the film has, and its strip."""
    world, found = Filmed(), list[np.ndarray]()
    strips: dict[bool, np.ndarray] = {}
    condition = Condition(world='metaworld', families=(TASKS[index],))
    for seed in episode_seeds(0, 1000)[index :: len(TASKS)]:
        result = run_episode(world, source, condition, seed)
        world.look()
        # The verdict stays for half a second.
        last = world.frames[-1].copy()
        cv2.rectangle(last, (0, 0), (TILE - 1, TILE - 1), VERDICTS[result.outcome], 4)
        found += [*world.frames[:-1], *([last] * (FRAMES_A_SECOND // 2))]
        shown = [*world.frames[:-1], last]
        chosen = np.linspace(0, len(shown) - 1, STRIP).round().astype(int)
        strips.setdefault(result.success, np.concatenate([shown[i] for i in chosen], axis=1))
        if len(found) >= SECONDS * FRAMES_A_SECOND:
            break
    world.close()
    return found[: SECONDS * FRAMES_A_SECOND], strips.get(True, strips.get(False))


def main() -> None:
    """Film every task, put the tiles together, write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('bundle', type=Path, help='a policy that was trained on Meta-World')
    source = PolicySource(parser.parse_args().bundle)
    filmed = [film_task(source, index) for index in tqdm(range(len(TASKS)), unit='task')]
    tiles = [frames for frames, _ in filmed]
    _write_strips([strip for _, strip in filmed])
    frames = []
    for number in range(SECONDS * FRAMES_A_SECOND):
        named = [_named(film[number], task) for film, task in zip(tiles, TASKS, strict=True)]
        rows = [np.concatenate(named[first : first + 4], axis=1) for first in (0, 4)]
        frames.append(Image.fromarray(np.concatenate(rows)))
    palette = frames[len(frames) // 2].quantize(COLOURS, dither=Image.Dither.NONE)
    flat = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    flat[0].save(
        PICTURE,
        save_all=True,
        append_images=flat[1:],
        duration=1000 // FRAMES_A_SECOND,
        loop=0,
        optimize=True,
    )
    size = PICTURE.stat().st_size
    print(f'{PICTURE}: {size / 1e6:.1f} MB, {len(flat)} frames')
    if size > LARGEST_BYTES:
        raise SystemExit(f'{PICTURE}: is larger than {LARGEST_BYTES / 1e6} MB')


def _write_strips(strips: list[np.ndarray]) -> None:
    """Two columns of four tasks."""
    named = [_named(strip, task) for strip, task in zip(strips, TASKS, strict=True)]
    columns = [np.concatenate(named[first : first + 4]) for first in (0, 4)]
    whole = Image.fromarray(np.concatenate(columns, axis=1))
    whole.quantize(256, dither=Image.Dither.NONE).save(STRIPS, optimize=True)
    print(f'{STRIPS}: {STRIPS.stat().st_size / 1e3:.0f} kB')


def _named(tile: np.ndarray, task: str) -> np.ndarray:
    strip = np.full((CAPTION, tile.shape[1], 3), 255, dtype=np.uint8)
    cv2.putText(strip, task, (3, 10), cv2.FONT_HERSHEY_SIMPLEX, 0.33, (0, 0, 0), 1, cv2.LINE_AA)
    whole = np.concatenate([strip, tile])
    return cv2.copyMakeBorder(
        whole, EDGE, EDGE, EDGE, EDGE, cv2.BORDER_CONSTANT, value=(255, 255, 255)
    )


if __name__ == '__main__':
    main()

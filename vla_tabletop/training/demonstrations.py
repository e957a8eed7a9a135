"""Demonstrations of the tabletop's expert as a data set in LeRobot's format.

For learners of what a robot saw and did, such as `distill`; `train-demo` has its own data,
labelled for every goal. An episode is one instruction with the joints commanded at every step, a
function of (seed, number).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
from tqdm import tqdm

from vla_tabletop.sim.expert import STEP_TIME_S, Expert, sample_style
from vla_tabletop.sim.rollout import follow
from vla_tabletop.sim.scene import CAMERAS
from vla_tabletop.sim.tasks import FAMILIES, Judge, sample_task
from vla_tabletop.sim.world import JOINT_NAMES, Tabletop
from vla_tabletop.training.dataset import IMAGE_HEIGHT, IMAGE_WIDTH
from vla_tools.dataset.layout import DatasetFrame, EncodedImage, EpisodeFacts, Layout
from vla_tools.dataset.writer import DatasetWriter, dataset_folder

_REPLAN_STEPS = 4
_NOISE_RAD = (0.0, 0.01, 0.03)
_NOISE_MEMORY = 0.8


def write_demonstrations(folder: Path, seed: int, episodes: int, force: bool) -> None:
    """Write a data set; DatasetError: the folder exists, and is not to be replaced."""
    layout = Layout(
        robot='tabletop',
        fps=round(1 / STEP_TIME_S),
        cameras=dict.fromkeys(CAMERAS, (IMAGE_HEIGHT, IMAGE_WIDTH)),
        state=JOINT_NAMES,
        action=JOINT_NAMES,
        units=dict.fromkeys(JOINT_NAMES, 'rad'),
        judged=True,
    )
    world, expert = Tabletop(), Expert()
    with dataset_folder(folder, force=force) as target:
        writer = DatasetWriter(target, layout)
        for number in tqdm(range(episodes), unit='episode'):
            rng = np.random.default_rng([seed, number])
            state = world.reset(int(rng.integers(2**31)))
            task = sample_task(rng, state.block_m, FAMILIES[number % len(FAMILIES)], 'training')
            judge = Judge(task, world.sim_time_s)
            frames = list(_run(world, expert, judge, rng))
            outcome = judge.judge(world.state())
            facts = EpisodeFacts(
                task=task.instruction,
                frames=len(frames),
                success=outcome is not None and outcome.success,
                source=f'seed {seed}, episode {number}',
                start_ns=1_000_000_000,
            )
            writer.write(facts, frames)
        writer.finish()
    world.close()


def _run(
    world: Tabletop, expert: Expert, judge: Judge, rng: np.random.Generator
) -> Iterator[DatasetFrame]:
    """Frames of one episode, with noise on the executed joints and none on the recorded ones."""
    style, noise_rad = sample_style(rng), float(rng.choice(_NOISE_RAD))
    noise = np.zeros(len(JOINT_NAMES))
    outcome = None
    while outcome is None:
        state = world.state()
        chunk = expert.plan(state.joint_rad, state.block_m, judge.task.goal, style, _REPLAN_STEPS)
        for row in chunk:
            yield _frame(world, row)
            fresh = rng.normal(0, noise_rad, size=5)
            noise[:5] = _NOISE_MEMORY * noise[:5] + (1 - _NOISE_MEMORY**2) ** 0.5 * fresh
            outcome = follow(world, (row + noise)[None], judge)
            if outcome is not None:
                break


def _frame(world: Tabletop, action: np.ndarray) -> DatasetFrame:
    images = {}
    for camera in CAMERAS:
        pixels = world.render(camera, IMAGE_WIDTH, IMAGE_HEIGHT)
        _, png = cv2.imencode('.png', pixels[..., ::-1])
        images[camera] = EncodedImage(png.tobytes(), pixels)
    state = world.joint_positions.astype(np.float32)
    return DatasetFrame(images, state, np.asarray(action, dtype=np.float32))

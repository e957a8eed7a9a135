"""A tiny teacher's student for tests, and the data set that it learns from."""

from __future__ import annotations

from pathlib import Path

import cv2
from tiny_policy import CAMERAS, IMAGE_SIZE, JOINTS, observation, tiny_spec, write_tiny_policy

from vla_runtime.cli.main import main
from vla_tools.dataset.layout import DatasetFrame, EncodedImage, EpisodeFacts, Layout
from vla_tools.dataset.writer import DatasetWriter, dataset_folder

FRAMES = 60


def write_tiny_data(folder: Path, first_seed: int = 0, per_episode: int = FRAMES // 2) -> Path:
    """A data set with the names of the tiny policies' robot, its joints in another order."""
    folder.parent.mkdir(exist_ok=True)
    layout = Layout('tiny', 20, dict.fromkeys(CAMERAS, IMAGE_SIZE), JOINTS[::-1], JOINTS, {})
    with dataset_folder(folder, force=False) as target:
        writer = DatasetWriter(target, layout)
        for episode in range(2):
            facts = EpisodeFacts(f'task {episode}', per_episode, None, 'made up', 1)
            seed = first_seed + episode * 100
            writer.write(facts, [_frame(seed + i) for i in range(per_episode)])
        writer.finish()
    return folder


def write_tiny_student(folder: Path, family: str = 'pi05') -> Path:
    """Distil a tiny policy to one and two steps; its teacher and data lie in `folder` too."""
    teacher = write_tiny_policy(folder / 'teacher', tiny_spec(family))
    data, student = write_tiny_data(folder / 'data'), folder / 'student'
    words = ['distill', str(teacher), '--data', str(data), '--out', str(student)]
    assert main([*words, '--updates', '3']) == 0
    return student


def _frame(seed: int) -> DatasetFrame:
    look = observation(seed)
    images = {
        name: EncodedImage(cv2.imencode('.png', pixels[..., ::-1])[1].tobytes(), pixels)
        for name, pixels in look.images.items()
        if pixels is not None
    }
    return DatasetFrame(images, look.state[::-1], look.state)

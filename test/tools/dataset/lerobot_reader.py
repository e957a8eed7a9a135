"""Reads a data set with LeRobot's own loader, by a Python that has it: lerobot_reader.py FOLDER.

Writes one JSON line of what the loader gives, frame by frame.
"""

from __future__ import annotations

import json
import sys

from lerobot.datasets.lerobot_dataset import LeRobotDataset


def main(folder: str) -> None:
    dataset = LeRobotDataset('rollout_session', root=folder)
    frames = [dataset[index] for index in range(len(dataset))]
    cameras = [key for key in dataset.features if key.startswith('observation.images.')]
    found = {
        'episodes': dataset.num_episodes,
        'frames': len(frames),
        'fps': dataset.fps,
        'tasks': sorted({frame['task'] for frame in frames}),
        'intervention': [bool(frame['intervention']) for frame in frames],
        'dtype': str(frames[0]['intervention'].dtype),
        'action': [frame['action'].tolist() for frame in frames],
        'state': [frame['observation.state'].tolist() for frame in frames],
        'images': {key: list(frames[0][key].shape) for key in cameras},
    }
    if 'next.success' in dataset.features:
        found['success'] = [bool(frame['next.success']) for frame in frames]
    print(json.dumps(found))


if __name__ == '__main__':
    main(sys.argv[1])

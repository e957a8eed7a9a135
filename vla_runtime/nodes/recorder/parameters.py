"""Parameter table of the recorder node."""

from __future__ import annotations

from typing import get_args

from vla_runtime.nodes.parameter_table import ParameterSpec
from vla_runtime.recording.frame_store import DEFAULT_FRAME_BYTES
from vla_runtime.recording.topics import IMAGE_RATE_HZ, ImageMode

RECORDER_PARAMETERS: tuple[ParameterSpec, ...] = (
    ParameterSpec('robot', '', 'robot file (config/robots/*.yaml)', read_only=True),
    ParameterSpec(
        'folder',
        '',
        'folder of the recording, which must not exist yet; empty: recordings/DATE_TIME, or '
        'recordings/DATE_TIME_NAMESPACE, where the node was started',
        read_only=True,
    ),
    ParameterSpec(
        'record_images',
        'used',
        'frames that are recorded: used those that a chunk was made of, bit for bit; all the '
        f'same; reduced at most {IMAGE_RATE_HZ} a second of each camera, as JPEG (no replay)',
        words=get_args(ImageMode),
        read_only=True,
    ),
    ParameterSpec(
        'keep_minutes',
        0.0,
        'the last so many minutes are kept, in a ring of bags; 0.0: all',
        minimum=0.0,
        maximum=100_000.0,
        read_only=True,
    ),
    ParameterSpec(
        'max_mb',
        0,
        'most megabytes on disk, in a ring of bags, the oldest is deleted; 0: no limit',
        minimum=0,
        maximum=10**9,
        read_only=True,
    ),
    ParameterSpec(
        'frame_memory_mb',
        DEFAULT_FRAME_BYTES >> 20,
        'record_images used: most megabytes of frames that wait in memory for the chunk that they '
        'are used for',
        minimum=1,
        maximum=100_000,
        read_only=True,
    ),
)

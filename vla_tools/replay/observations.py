"""Observations of a recording, as a policy was given them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from vla_runtime.bundle.folder import Bundle
from vla_runtime.messages.images import to_rgb
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.robot.match import RobotMatch
from vla_runtime.types import Observation
from vla_tools.replay.frames import CompleteInference, SkippedInference, with_frames
from vla_tools.replay.recorded import ReplayError, read_run
from vla_tools.replay.setup import fit_recording


def observation_of(
    found: CompleteInference,
    match: RobotMatch,
    cameras: Mapping[str, str],
    state: Callable[[np.ndarray], np.ndarray],
) -> Observation:
    """Return what a policy is given for a recorded inference.

    Args:
        found: inference with its frames.
        match, cameras, state: robot match, cameras and state of the policy, from `fit_recording`.

    Raises:
        ImageError: a frame cannot be decoded, or is not of the robot file's size.
    """
    recorded = found.recorded
    return Observation(
        images={
            camera: to_rgb(
                found.messages[name],
                width=match.cameras[camera].width,
                height=match.cameras[camera].height,
                encoding=match.cameras[camera].encoding,
            )
            for camera, name in cameras.items()
        },
        state=state(recorded.state),
        earlier_states=[state(one) for one in recorded.earlier_states],
        instruction=recorded.instruction,
        stamps_ns=recorded.stamps_ns,
    )


def recorded_observations(path: Path, bundle: Bundle, most: int) -> list[Observation]:
    """Read evenly spread observations of a recording, in the units of a bundle's policy.

    Args:
        path: path of the recording.
        bundle: bundle of the policy; the recorded one may have been another for the same robot.
        most: most observations; of more every second one is read, every third one, and so on.

    Raises:
        ReplayError: there is none, or the policy does not fit the recording.
        ValueError: the recording cannot be read, or an image in it.
    """
    run = read_run(BagReader(path))
    run.inferences = run.inferences[:: -(-len(run.inferences) // most) or 1]
    observations, skipped = [], ''
    for found in with_frames(run):
        if isinstance(found, SkippedInference):
            skipped = found.reason
            continue
        fitted = fit_recording(found.recorded.description, bundle)
        observations.append(observation_of(found, *fitted))
    if not observations:
        raise ReplayError(f'{path}: no inference with its images ({skipped or "none at all"})')
    return observations

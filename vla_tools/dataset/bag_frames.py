"""Pixels of planned episodes, read in one pass over the bag."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import cv2
import numpy as np

from vla_runtime.messages.images import ImageError, describe_encoding, to_rgb
from vla_runtime.recording.needed_frames import NeededFrames
from vla_runtime.recording.storage_file import RawMessage
from vla_runtime.robot.schema import RobotCamera
from vla_tools.dataset.bag_contents import BagContents
from vla_tools.dataset.episodes import PlannedEpisode
from vla_tools.dataset.layout import DatasetError, DatasetFrame, EncodedImage

_JPEG, _PNG = b'\xff\xd8', b'\x89PNG'
# Larger files are hardly smaller above it, and take far longer.
_PNG_COMPRESSION = 3


class BagFrames:
    """Gives the frames of a bag's episodes in their order.

    Attributes:
        damaged: undecodable frames, replaced by the one before.
        faults: camera to its first fault, for a person.
        repeated: frames that were shown before.
    """

    def __init__(self, contents: BagContents, episodes: Sequence[PlannedEpisode]) -> None:
        self.damaged = self.repeated = 0
        self.faults: dict[str, str] = {}
        self._reader = contents.reader
        self._topics = contents.camera_topics
        self._cameras = {topic: contents.cameras[name] for name, topic in self._topics.items()}
        uses = (
            (self._topics[camera], int(stamp_ns))
            for episode in episodes
            for camera, stamps in episode.stamps_ns.items()
            for stamp_ns in stamps
        )
        self._frames = NeededFrames(contents.reader, uses, self._encoded, contents.clock.time_ns)

    def of(self, episode: PlannedEpisode) -> Iterator[DatasetFrame]:
        """Yield an episode's frames; they begin where every camera has a sound one."""
        last: dict[str, EncodedImage] = {}
        before: dict[str, int] = {}
        for index in range(len(episode.times_ns)):
            stamps = {camera: int(all_[index]) for camera, all_ in episode.stamps_ns.items()}
            for camera, stamp_ns in stamps.items():
                image = self._frames.take((self._topics[camera], stamp_ns))
                is_new = before.get(camera) != stamp_ns
                self.repeated += not is_new
                self.damaged += is_new and image is None
                before[camera] = stamp_ns
                if image is not None:
                    last[camera] = image
            if len(last) == len(stamps):
                yield DatasetFrame(
                    dict(last),
                    episode.state[index],
                    episode.action[index],
                    bool(episode.intervention[index]),
                )

    def _encoded(self, raw: RawMessage) -> EncodedImage | None:
        message = self._reader.read(raw)
        if message is None:
            return None
        camera = self._cameras[raw.topic]
        try:
            return encode(message, camera)
        except ImageError as error:
            text = f"camera '{camera.name}' ({raw.topic}, {describe_encoding(message)}): {error}"
            self.faults.setdefault(camera.name, text)
            return None


def encode(message: Any, camera: RobotCamera) -> EncodedImage:
    """Encode an image message without loss; JPEG and PNG are kept. ImageError: not decodable."""
    pixels = to_rgb(message, encoding=camera.encoding)
    if hasattr(message, 'format'):
        data = bytes(message.data)
        if data.startswith((_JPEG, _PNG)):
            return EncodedImage(data, pixels)
    done, png = cv2.imencode(
        '.png',
        np.ascontiguousarray(pixels[:, :, ::-1]),
        [cv2.IMWRITE_PNG_COMPRESSION, _PNG_COMPRESSION],
    )
    if not done:
        raise DatasetError(f'an image of {pixels.shape[1]}x{pixels.shape[0]} cannot be encoded')
    return EncodedImage(png.tobytes(), pixels)

"""Pixels of planned episodes, read in one pass over the bag."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import cv2
import numpy as np

from vla_runtime.dataset.bag_contents import BagContents
from vla_runtime.dataset.episodes import PlannedEpisode
from vla_runtime.dataset.errors import DatasetError
from vla_runtime.dataset.frames import EncodedImage, Frame
from vla_runtime.recording.cdr import header_stamp_ns
from vla_runtime.ros.messages.images import ImageError, to_rgb

_JPEG, _PNG = b'\xff\xd8', b'\x89PNG'
# Larger files are hardly smaller above it, and take far longer.
_PNG_COMPRESSION = 3

_Key = tuple[str, int]


class BagFrames:
    """Gives the frames of a bag's episodes in their order.

    Args:
        contents: of the bag.
        episodes: all that will be asked for.

    Attributes:
        damaged: frames that could not be decoded; the one before was taken.
        repeated: frames that a camera had shown before.
    """

    def __init__(self, contents: BagContents, episodes: Sequence[PlannedEpisode]) -> None:
        self.damaged = self.repeated = 0
        self._contents = contents
        self._needs: Counter[_Key] = Counter(
            (camera, int(stamp_ns))
            for episode in episodes
            for camera, stamps in episode.stamps_ns.items()
            for stamp_ns in stamps
        )
        self._held: dict[_Key, EncodedImage | None] = {}
        self._stream = self._images()

    def of(self, episode: PlannedEpisode) -> Iterator[Frame]:
        """Yield an episode's frames; they begin where every camera has a sound one."""
        last: dict[str, EncodedImage] = {}
        before: dict[str, int] = {}
        for index in range(len(episode.times_ns)):
            stamps = {camera: int(all_[index]) for camera, all_ in episode.stamps_ns.items()}
            for camera, stamp_ns in stamps.items():
                image = self._take((camera, stamp_ns))
                is_new = before.get(camera) != stamp_ns
                self.repeated += not is_new
                self.damaged += is_new and image is None
                before[camera] = stamp_ns
                if image is not None:
                    last[camera] = image
            if len(last) == len(stamps):
                yield Frame(dict(last), episode.state[index], episode.action[index])

    def _take(self, key: _Key) -> EncodedImage | None:
        """Return a frame, and forget it when nobody else needs it; None for a damaged one."""
        while key not in self._held:
            found = next(self._stream, None)
            if found is None:
                self._held[key] = None
            else:
                self._held[found[0]] = found[1]
        self._needs[key] -= 1
        return self._held[key] if self._needs[key] else self._held.pop(key)

    def _images(self) -> Iterator[tuple[_Key, EncodedImage | None]]:
        """Yield the frames that are needed, each once, in the order of the bag."""
        cameras = {topic: camera for camera, topic in self._contents.camera_topics.items()}
        reader, given = self._contents.reader, set[_Key]()
        for raw in reader.messages(lambda topic, _: topic in cameras):
            key = cameras[raw.topic], header_stamp_ns(raw.serialised) or 0
            if self._needs.get(key) and key not in given:
                given.add(key)
                message = reader.read(raw)
                yield key, None if message is None else encode(message)


def encode(message: Any) -> EncodedImage | None:
    """Encode an image message without loss; None where it cannot be decoded.

    What came as JPEG or PNG is kept as it is.
    """
    try:
        pixels = to_rgb(message)
    except ImageError:
        return None
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

"""Every format in which rosbag2 writes a bag, by `rosbags`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lz4.frame
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer

# Name to storage and compression. rosbag2 compresses messages or chunks with zstd; its storage
# presets know lz4 for the chunks of MCAP too.
FORMATS = {
    'mcap': (StoragePlugin.MCAP, CompressionMode.NONE),
    'mcap, zstd messages': (StoragePlugin.MCAP, CompressionMode.MESSAGE),
    'mcap, zstd chunks': (StoragePlugin.MCAP, CompressionMode.STORAGE),
    'mcap, lz4 chunks': (StoragePlugin.MCAP, CompressionMode.NONE),
    'sqlite': (StoragePlugin.SQLITE3, CompressionMode.NONE),
    'sqlite, zstd messages': (StoragePlugin.SQLITE3, CompressionMode.MESSAGE),
}


def open_writer(folder: Path, name: str) -> Writer:
    """An open writer of a bag in one of `FORMATS`; a context."""
    plugin, mode = FORMATS[name]
    writer = Writer(folder, version=9, storage_plugin=plugin)
    writer.set_compression(mode, CompressionFormat.ZSTD)
    writer.open()
    if 'lz4' in name:
        storage: Any = writer.storage
        storage.compression, storage.compressor = 'lz4', lz4.frame.compress
    return writer

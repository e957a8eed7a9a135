"""Folders below a named one in which training projects keep a policy's weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

# --------------------------------------------------------------------------------------------------
# Ids of the Hugging Face Hub where a folder is expected: nothing here downloads anything.

_ID = re.compile(r'(?:https?:/+huggingface\.co/)?([\w-][\w.-]*/[\w-][\w.-]*)')


def download_hint(path: Path) -> str:
    """Return how to get a folder that is missing, where its path could be a Hub id.

    `owner/name` is a Hub id where there is no folder `owner` either; '' for anything else.
    """
    found = _ID.fullmatch(str(path))
    if found is None or path.parent.exists():
        return ''
    name = found[1].split('/')[1]
    # `hf` is huggingface_hub's: the extra `hub`, which ./run brings.
    return (
        '; a policy on the Hugging Face Hub is downloaded first: '
        f'hf download {found[1]} --local-dir {name}'
    )


# --------------------------------------------------------------------------------------------------

SINGLE_FILE = 'model.safetensors'
INDEX_FILE = 'model.safetensors.index.json'
ADAPTER_FILE = 'adapter_model.safetensors'
# LeRobot's output folder, the Hub's cache, openpi's experiment.
_BELOW = (
    'pretrained_model',
    'last/pretrained_model',
    'checkpoints/last/pretrained_model',
    'checkpoints/*/pretrained_model',
    '*/pretrained_model',
    'snapshots/*',
    '*',
)


def has_tensors(folder: Path) -> bool:
    """Return whether a folder holds a checkpoint's safetensors, whole or in shards."""
    return (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file()


def unfinished_download(folder: Path) -> Path | None:
    """Return a file that `hf download` had not finished in a folder or its Hub cache, or None."""
    places = (folder, folder / '.cache/huggingface/download')
    # A snapshot's files are links into the blobs.
    blobs = folder.parent.parent / 'blobs' if folder.parent.name == 'snapshots' else None
    for place in (*places, *([blobs] if blobs else [])):
        for path in sorted(place.glob('*.incomplete')):
            return path
    return None


def has_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter of PEFT's form."""
    return (folder / ADAPTER_FILE).is_file()


def checkpoint_below(folder: Path, is_one: Callable[[Path], bool] = has_tensors) -> Path | None:
    """Return the newest checkpoint below a folder, or adapter; None where there is none."""
    for pattern in _BELOW:
        # Steps are counted in the names: the longest, then the largest, is the newest.
        below = sorted(folder.glob(pattern), key=lambda path: [(len(s), s) for s in path.parts])
        found = [path for path in below if is_one(path)]
        if found:
            return found[-1]
    return None

"""Ids of the Hugging Face Hub where a folder is expected: nothing here downloads anything."""

from __future__ import annotations

import re
from pathlib import Path

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

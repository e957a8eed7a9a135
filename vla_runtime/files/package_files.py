"""Folder of the files that come with the package."""

from __future__ import annotations

from pathlib import Path


def share_folder() -> Path:
    """Return the folder with `config/` and `engines/`: the source tree, or the installed share.

    pip and colcon install `share/` beside the `lib/` that the modules are in, ROS 2 or not.

    Raises:
        FileNotFoundError: the package is neither run from its source tree nor installed.
    """
    here = Path(__file__).resolve()
    source = here.parents[2]
    if (source / 'package.xml').is_file():
        return source
    for prefix in here.parents:
        share = prefix / 'share' / 'vla_runtime'
        if (share / 'package.xml').is_file():
            return share
    raise FileNotFoundError(
        f'{here.parents[1]} has no share/vla_runtime beside it: install the package with pip or '
        'colcon, or run it in its source tree'
    )

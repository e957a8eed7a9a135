"""Folder of the files that come with the package."""

from __future__ import annotations

from pathlib import Path


def share_folder() -> Path:
    """Return the folder with `config/` and `engines/`: the source tree, or the installed share.

    Raises:
        FileNotFoundError: the package is neither run from its source tree nor installed.
    """
    source = Path(__file__).resolve().parents[2]
    if (source / 'package.xml').is_file():
        return source
    from ament_index_python.packages import PackageNotFoundError, get_package_share_directory

    try:
        return Path(get_package_share_directory('vla_runtime'))
    except (PackageNotFoundError, LookupError) as error:
        raise FileNotFoundError(
            'vla_runtime is not in the ament index: source the workspace (install/setup.bash), or '
            'set AMENT_PREFIX_PATH to the environment that it is installed in'
        ) from error

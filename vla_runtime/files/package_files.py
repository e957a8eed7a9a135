"""Folder of the files that come with the package."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import vla_runtime

# --------------------------------------------------------------------------------------------------
# Version of the running code: git commit or package version, and a digest of its files.

# Packages that are installed together.
_PACKAGES = ('vla_runtime', 'vla_convert', 'vla_tools', 'vla_tabletop')
# What they consist of: modules, and the scene of the simulator.
_SOURCES = ('.py', '.xml')


def code_version(folder: Path | None = None) -> str:
    """`<commit>`, `<commit>-dirty` with changes not committed, or the version of the package.

    `folder` holds the packages; those of the running ones when None.
    """
    folder = Path(vla_runtime.__file__).parents[1] if folder is None else folder
    # A package installed inside somebody else's repository is not that repository's commit.
    if _git(folder, 'ls-files', '--error-unmatch', f'{_PACKAGES[0]}/__init__.py') is None:
        return vla_runtime.__version__
    commit = _git(folder, 'rev-parse', 'HEAD')
    if commit is None:
        return vla_runtime.__version__
    changed = _git(folder, 'status', '--porcelain', '--', *_PACKAGES)
    return f'{commit}-dirty' if changed else commit


def source_digest(folder: Path | None = None) -> str:
    """SHA-256 of the packages' source: every module and the simulator's scene, with their paths.

    Equal digests mean equal code, in a checkout as in an installed package. `folder` holds the
    packages; those of the running ones when None.
    """
    folder = Path(vla_runtime.__file__).parents[1] if folder is None else folder
    digest = hashlib.sha256()
    named = {
        path.relative_to(folder).as_posix(): path
        for package in _PACKAGES
        for path in (folder / package).rglob('*')
        if path.suffix in _SOURCES and path.is_file()
    }
    for name, path in sorted(named.items()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f'{name} {content}\n'.encode())
    return digest.hexdigest()


def _git(folder: Path, *arguments: str) -> str | None:
    """Run git in a folder; None where it refuses or is not installed."""
    command = ['git', '-C', str(folder), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


# --------------------------------------------------------------------------------------------------


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

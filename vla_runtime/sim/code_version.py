"""Which code is running: the git commit where there is one, else the package's version."""

from __future__ import annotations

import subprocess
from pathlib import Path

import vla_runtime


def code_version(package: Path | None = None) -> str:
    """`<commit>`, `<commit>-dirty` with changes not committed, or the version of the package.

    Args:
        package: folder of the package; the running one when None.
    """
    package = Path(vla_runtime.__file__).parent if package is None else package
    # A package installed inside somebody else's repository is not that repository's commit.
    if _git(package, 'ls-files', '--error-unmatch', '__init__.py') is None:
        return vla_runtime.__version__
    commit = _git(package, 'rev-parse', 'HEAD')
    if commit is None:
        return vla_runtime.__version__
    changed = _git(package, 'status', '--porcelain', '--', '.')
    return f'{commit}-dirty' if changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says in a folder; None where it refuses or is not installed."""
    command = ['git', '-C', str(folder), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()

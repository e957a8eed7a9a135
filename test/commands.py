"""The real command in a process of its own, and what it imported."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass

from paths import ROOT

_IMPORT = re.compile(r'^import time: +\S+ +\| +\S+ +\| +(\S+)$')


@dataclass(frozen=True)
class Command:
    """Outcome of a command; `imported` are the modules that Python looked into for it."""

    returncode: int
    stdout: str
    stderr: str
    imported: frozenset[str]


def run_command(*arguments: str) -> Command:
    """Run `vla_runtime ARGUMENTS` from the project's root."""
    done = subprocess.run(
        [sys.executable, '-X', 'importtime', '-m', 'vla_runtime', *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    imported, said = set(), []
    for line in done.stderr.splitlines():
        found = _IMPORT.match(line)
        if found:
            imported.add(found[1])
        elif not line.startswith('import time:'):
            said.append(line)
    return Command(done.returncode, done.stdout, '\n'.join(said), frozenset(imported))

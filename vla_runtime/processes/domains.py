"""A ROS domain that no other test, and no other live replay, on this machine uses.

A domain is claimed by a lock on a temporary file, which the kernel gives back when the process
ends. Child processes use their parent's domain (`ROS_DOMAIN_ID`).
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

# Free of the operating system's ephemeral ports on every platform.
DOMAINS = range(1, 102)


def claim_domain() -> int:
    """Claim a domain for this process until it ends; one more with every call.

    Its number is never that of the environment, where a graph may run without a claim.

    Raises:
        RuntimeError: all of them are in use.
    """
    folder = Path(tempfile.gettempdir()) / 'vla_runtime_domains'
    folder.mkdir(exist_ok=True)
    _open_to_all(folder, 0o777)
    # From a place of its own, so that a domain is not taken again at once: what its last process
    # left on the network may take a moment to go.
    first = os.getpid() % len(DOMAINS)
    for domain in (*DOMAINS[first:], *DOMAINS[:first]):
        if str(domain) != os.environ.get('ROS_DOMAIN_ID') and _locked(folder / f'{domain}.lock'):
            return domain
    raise RuntimeError(f'all {len(DOMAINS)} domains are in use; locks are in {folder}')


def _locked(path: Path) -> bool:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    _open_to_all(path, 0o666)
    # Never closed: the lock lives as long as the process.
    return True


def _open_to_all(path: Path, mode: int) -> None:
    """Let other users' processes use it too, whatever the umask."""
    if path.stat().st_uid == os.getuid():
        path.chmod(mode)

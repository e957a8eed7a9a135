"""`vla_runtime demo` as a process, as a person starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from paths import ROOT

from vla_runtime.nodes.node_main import MODULES
from vla_runtime.processes.parent_death import dies_with_this_process

TIMEOUT_S = 300.0
NODES = ('tabletop', 'policy', 'executor')
_OUTSIDE = re.compile(r'(?:src|href)="(?!data:|#)[^"]*"|<script|<link|@import')


class Demo:
    """A running demo in a namespace of its own."""

    def __init__(self, bundle, out, seconds: float, *more: str) -> None:
        self.out = out
        self.lines: list[str] = []
        arguments = ['--seconds', str(seconds), '--out', str(out), '--bundle', str(bundle)]
        self.process = subprocess.Popen(
            [sys.executable, '-m', 'vla_runtime', 'demo', '--namespace', 'demo', *arguments, *more],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=dies_with_this_process(),
        )

    def wait_for_line(self, pattern: str) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError(f'ended without {pattern}:\n{"".join(self.lines)}')

    def end(self) -> tuple[int, str]:
        try:
            rest, _ = self.process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.lines.append(rest)
        return self.process.returncode, ''.join(self.lines)

    def chunks(self) -> int:
        """Newest count of the status line."""
        return int(re.findall(r'chunk (\d+)', ''.join(self.lines))[-1])

    def children(self) -> list[int]:
        """Process ids of its nodes."""
        return [self.child(MODULES[f'{name}_node']) for name in NODES]

    def log(self, name: str) -> str:
        """Output of a node."""
        return (self.out / 'log' / f'{name}.log').read_text(encoding='utf-8')

    def child(self, module: str) -> int:
        """Process id of one of its nodes."""
        for entry in os.listdir('/proc'):
            if not entry.isdigit():
                continue
            try:
                with open(f'/proc/{entry}/stat') as stat:
                    parent = int(stat.read().rsplit(')', 1)[1].split()[1])
                with open(f'/proc/{entry}/cmdline') as file:
                    words = file.read().split('\0')
            except (OSError, IndexError):
                continue
            if parent == self.process.pid and module in words:
                return int(entry)
        raise AssertionError(f'{module} is not running')


def require_report(out) -> str:
    page = (out / 'report.html').read_text(encoding='utf-8')
    assert page.rstrip().endswith('</html>')
    assert not _OUTSIDE.search(page)
    return page

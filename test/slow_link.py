"""A network namespace of its own for a server, and a slow, lossy link to it.

Both ends are TUN devices. This process carries the packets from one to the other: it drops some,
sends the rest at the link's rate, and lets each arrive after the delay. Needs Linux, root and `ip`
(Debian's iproute2).
"""

from __future__ import annotations

import fcntl
import heapq
import os
import selectors
import struct
import subprocess
import threading
from dataclasses import dataclass
from time import monotonic

import numpy as np

_TUN_SET_INTERFACE = 0x400454CA
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
# Packets that wait for the line longer than this are dropped, as a router's queue does.
_QUEUE_S = 0.2


@dataclass
class Quality:
    """What a link does to a packet, in either direction.

    Attributes:
        delay_s: from one end to the other.
        loss: probability of a packet to be dropped.
        rate_bit_s: of the line; None: without limit.
        is_cut: nothing passes.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    rate_bit_s: float | None = None
    is_cut: bool = False


class SlowLink:
    """A link between this network namespace and a new one, which ends with it.

    Attributes:
        quality: may be changed while it runs.
        packets, dropped: of both directions.
        address: of the other end; mine is one higher.
    """

    def __init__(self, quality: Quality, seed: int = 0) -> None:
        self.quality = quality
        self.packets = self.dropped = 0
        number = os.getpid()
        self._name = f'vla{number}'
        network = f'10.{88 + (number >> 14) % 8}.{number >> 6 & 255}'
        first = 4 * (number & 63) + 1
        self.address, self._mine = f'{network}.{first}', f'{network}.{first + 1}'
        self._random = np.random.default_rng(seed)
        self._ends: list[int] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._carry, name='link', daemon=True)

    def __enter__(self) -> SlowLink:
        """Make it (OSError, CalledProcessError: this machine does not let us)."""
        mine, other = f'{self._name}a', f'{self._name}b'
        try:
            self._ends += [_open_tun(mine), _open_tun(other)]
            _ip('netns', 'add', self._name)
            _ip('link', 'set', other, 'netns', self._name)
            there = ('-n', self._name)
            _ip(*there, 'link', 'set', 'lo', 'up')
            _ip('addr', 'add', self._mine, 'peer', self.address, 'dev', mine)
            _ip(*there, 'addr', 'add', self.address, 'peer', self._mine, 'dev', other)
            _ip('link', 'set', mine, 'up')
            _ip(*there, 'link', 'set', other, 'up')
        except BaseException:
            self._remove()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._remove()

    @property
    def there(self) -> tuple[str, ...]:
        """Words before a command that is to run at the other end."""
        return ('ip', 'netns', 'exec', self._name)

    def _remove(self) -> None:
        for end in self._ends:
            os.close(end)
        subprocess.run(['ip', 'netns', 'del', self._name], check=False, capture_output=True)

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        free_s = dict.fromkeys(self._ends, 0.0)
        others = dict(zip(self._ends, self._ends[::-1], strict=True))
        with selectors.DefaultSelector() as selector:
            for end in self._ends:
                selector.register(end, selectors.EVENT_READ)
            while not self._done.is_set():
                wait_s = waiting[0][0] - monotonic() if waiting else 0.05
                for key, _ in selector.select(min(0.05, max(0.0, wait_s))):
                    end = key.fd
                    packet = os.read(end, 65536)
                    self.packets += 1
                    now_s, quality = monotonic(), self.quality
                    start_s = max(now_s, free_s[end])
                    if (
                        quality.is_cut
                        or start_s - now_s > _QUEUE_S
                        or self._random.random() < quality.loss
                    ):
                        self.dropped += 1
                        continue
                    if quality.rate_bit_s is not None:
                        start_s += 8 * len(packet) / quality.rate_bit_s
                        free_s[end] = start_s
                    due_s = start_s + quality.delay_s
                    heapq.heappush(waiting, (due_s, self.packets, others[end], packet))
                while waiting and waiting[0][0] <= monotonic():
                    _, _, end, packet = heapq.heappop(waiting)
                    os.write(end, packet)


def _open_tun(name: str) -> int:
    end = os.open('/dev/net/tun', os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUN_SET_INTERFACE, struct.pack('16sH', name.encode(), _TUN_WITHOUT_HEADER))
    return end


def _ip(*words: str) -> None:
    subprocess.run(['ip', *words], check=True, capture_output=True)

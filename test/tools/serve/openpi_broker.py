"""openpi's broker between an arm and the server, run by a Python that has it: PORT HORIZON.

Reads observations from standard input and writes a row of actions for each, both in openpi's
MessagePack with their length before them; an empty observation resets the broker.
"""

from __future__ import annotations

import struct
import sys

from openpi_client import msgpack_numpy
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy


def main() -> None:
    port, horizon = map(int, sys.argv[1:])
    broker = ActionChunkBroker(WebsocketClientPolicy('127.0.0.1', port), horizon)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(4):
        look = msgpack_numpy.unpackb(source.read(*struct.unpack('<I', head)))
        if look:
            reply = msgpack_numpy.packb(broker.infer(look)['actions'])
        else:
            broker.reset()
            reply = msgpack_numpy.packb(None)
        sink.write(struct.pack('<I', len(reply)) + reply)
        sink.flush()


if __name__ == '__main__':
    main()

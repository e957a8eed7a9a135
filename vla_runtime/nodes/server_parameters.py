"""Parameters of a policy on another machine, which the policy node and the executor node share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_runtime.nodes.parameter_table import ParameterSpec
from vla_runtime.remote.connection import ServerAddress, read_server_key

SERVER_PARAMETERS: tuple[ParameterSpec, ...] = (
    ParameterSpec(
        'server',
        '',
        'policy server instead of a bundle, ws://HOST:PORT or wss://HOST:PORT (vla_runtime serve)',
        read_only=True,
    ),
    ParameterSpec(
        'server_key_file',
        '',
        "file whose first line is one of the server's keys; empty: the server asks for none",
        read_only=True,
    ),
    ParameterSpec(
        'server_ca_file',
        '',
        "certificates that the server's is checked with, PEM, for wss://; empty: this machine's",
        read_only=True,
    ),
    ParameterSpec(
        'server_timeout_s',
        2.0,
        'longest time to connect to the server, and from a request to its answer; a later answer '
        'is never used',
        minimum=0.05,
        maximum=60.0,
        read_only=True,
    ),
)


def server_address(values: Mapping[str, Any]) -> ServerAddress:
    """Return where the policy is served, by a node's values.

    Raises:
        ValueError: no usable address, a key file that cannot be read, or a bundle is given, too.
    """
    if values['bundle']:
        raise ValueError(
            f"parameters bundle and server are both given ('{values['bundle']}', "
            f"'{values['server']}'): the server has the bundle; leave one of them out"
        )
    key_file, ca_file = values['server_key_file'], values['server_ca_file']
    return ServerAddress(
        values['server'],
        values['server_timeout_s'],
        read_server_key(Path(key_file)) if key_file else '',
        Path(ca_file).expanduser() if ca_file else None,
    )

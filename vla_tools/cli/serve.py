"""Serve policies to robots over the network: openpi's wire, several robots on one policy.

A client connects with a websocket and gets the policy's contract first; openpi's clients of DROID,
LIBERO and ALOHA need no change. Each connection is a session of its own: cache, noise, plan.
Requests that come together run together, and each chunk is the one that its request has alone (the
contract says where it is within rounding). /status is a page for people, /metrics for Prometheus,
/healthz and /ready for whatever starts servers. SIGTERM answers what is running, then ends.

Beyond this machine (--host) a key is needed: each client sends 'Authorization: Api-Key KEY'.

examples:
  vla_runtime serve engines/demo
  vla_runtime serve engines/demo engines/mine --port 9000
  vla_runtime serve engines/mine --backend torch --device cuda --max-batch 4
  vla_runtime serve engines/mine --batch exact --keys keys.yaml
  openssl rand -hex 32 > key.txt
  vla_runtime serve engines/mine --host 0.0.0.0 --key-file key.txt --tls-cert c.pem --tls-key k.pem
  vla_runtime serve --ray engines/mine --replicas 2
  vla_runtime serve --ray-config fleet.yaml engines/mine && serve deploy fleet.yaml

exit codes: 0 after SIGTERM or Ctrl-C; 2 where a bundle or an option cannot be served.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_runtime.cli._numbers import at_least, between
from vla_runtime.engines.devices import MOST_THREADS
from vla_runtime.engines.preflight import AUTO, BACKENDS, PRECISIONS

if TYPE_CHECKING:
    from vla_tools.serve.app import PolicyServer
    from vla_tools.serve.loading import Loading
    from vla_tools.serve.served_policy import ServedPolicy

# Longest that a policy's thread keeps the interpreter from pings; Python's default is 5 ms.
_SWITCH_INTERVAL_S = 0.001
_MESSAGE_MIB = 64
_INSTALL = "./run exec pip install -e '.[fleet]', or pip install '.[fleet]' in the source folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        'bundles', type=Path, nargs='+', metavar='BUNDLE', help='folders; the first is that of /'
    )
    parser.add_argument(
        '--host', default='127.0.0.1', help='address to listen on (default: this machine alone)'
    )
    parser.add_argument(
        '--port', type=between(0, 65535), default=8000, help='0: any that is free (default: 8000)'
    )
    parser.add_argument(
        '--zmq-port',
        type=between(0, 65535),
        metavar='N',
        help="serve the first bundle on NVIDIA's wire too, whose clients use 5555 (default: not)",
    )
    parser.add_argument(
        '--backend',
        choices=[AUTO, *BACKENDS],
        default=AUTO,
        help='runs the networks (default: auto, the first in order)',
    )
    parser.add_argument('--device', help='cpu, cuda, cuda:N (default: cpu; with tensorrt: cuda)')
    parser.add_argument(
        '--precision',
        choices=[AUTO, *PRECISIONS],
        default=AUTO,
        help='of the large matrices (default: auto)',
    )
    parser.add_argument(
        '--threads',
        type=between(0, MOST_THREADS),
        metavar='N',
        help='CPU threads of each network; 0: all cores but one (default: OMP_NUM_THREADS, else 0)',
    )
    batches = parser.add_argument_group('batches')
    batches.add_argument(
        '--max-batch', type=at_least(1), default=8, metavar='N', help='requests (default, most: 8)'
    )
    batches.add_argument(
        '--max-wait-ms',
        type=between(0, 1000),
        default=2,
        metavar='MS',
        help='longest wait for the requests of other robots (default: 2)',
    )
    batches.add_argument(
        '--batch',
        choices=('auto', 'exact', 'off'),
        default='auto',
        help='exact: none where a chunk may differ from the one alone; off: one after the other',
    )
    sessions = parser.add_argument_group('sessions')
    sessions.add_argument(
        '--keep',
        type=between(0, 86_400),
        default=60,
        metavar='S',
        help='seconds for which a robot that went can come back to its session (default: 60)',
    )
    sessions.add_argument(
        '--max-sessions',
        type=between(1, 4096),
        default=64,
        metavar='N',
        help='robots at once; each takes memory of the device (default: 64)',
    )
    sessions.add_argument(
        '--keys', type=Path, metavar='FILE', help="YAML: a client's keys to cameras and state"
    )
    edges = parser.add_argument_group('edges')
    edges.add_argument('--key-file', type=Path, metavar='FILE', help='keys of clients, one a line')
    edges.add_argument('--tls-cert', type=Path, metavar='FILE', help='certificate, PEM')
    edges.add_argument('--tls-key', type=Path, metavar='FILE', help='its key, PEM')
    edges.add_argument(
        '--max-message-mib',
        type=between(1, 1024),
        default=_MESSAGE_MIB,
        metavar='N',
        help='largest request (default: 64)',
    )
    edges.add_argument(
        '--max-rate',
        type=at_least(1),
        default=200,
        metavar='N',
        help='requests a second of a connection (default: 200)',
    )
    edges.add_argument(
        '--send-timeout',
        type=between(1, 600),
        default=10,
        metavar='S',
        help='seconds in which a client takes its answer (default: 10)',
    )

    fleet = parser.add_argument_group('fleet')
    fleet.add_argument(
        '--ray',
        action='store_true',
        help='replicas on Ray Serve: on the cluster of RAY_ADDRESS, else on this machine',
    )
    fleet.add_argument(
        '--replicas',
        type=_replicas,
        default=AUTO,
        metavar='N',
        help='number, or auto: by open requests, from 1 to the GPUs (default: auto)',
    )
    fleet.add_argument(
        '--ray-config',
        type=Path,
        metavar='FILE',
        help="write what Ray's 'serve deploy FILE' reads, and end",
    )


def _replicas(text: str) -> int | str:
    return text if text == AUTO else int(between(1, 1024)(text))


def main(arguments: argparse.Namespace) -> int:
    """Serve until a signal; 2 where a bundle or an option cannot be served."""
    if arguments.ray or arguments.ray_config is not None:
        return _main_of_fleet(arguments)
    if arguments.replicas != AUTO:
        print('error: --replicas is for a fleet: add --ray', file=sys.stderr)
        return 2
    from contextlib import ExitStack

    from vla_tools.serve.listener import address_of, listen
    from vla_tools.serve.uvicorn_server import HttpOptions, UvicornServer

    options = HttpOptions(
        max_message_bytes=arguments.max_message_mib << 20,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
    )
    try:
        keys = _checked_edges(arguments)
        with ExitStack() as stack:
            listener = stack.enter_context(listen(arguments.host, arguments.port))
            host, port = address_of(listener)
            host = f'[{host}]' if ':' in host else host
            server, lines = _loaded(arguments, keys, host)
            stack.callback(server.close)
            runner = UvicornServer(server, listener, options)
            scheme = 'ws' if arguments.tls_cert is None else 'wss'
            print(*lines, sep='\n')
            print(f'ready: {scheme}://{host}:{port}', flush=True)
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            runner.run_until_signal()
    except (RuntimeError, ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


def _main_of_fleet(arguments: argparse.Namespace) -> int:
    """Serve on Ray until a signal, or write the file for it; 2 where it cannot be."""
    import yaml

    from vla_runtime.processes.ray_cluster import require_ray

    try:
        written = _fleet_config(arguments)
        if arguments.ray_config is not None:
            text = yaml.safe_dump(written, sort_keys=False)
            arguments.ray_config.write_text(text, encoding='utf-8')
            print(f'{arguments.ray_config}: deploy it with: serve deploy {arguments.ray_config}')
            return 0
        if find_spec('ray') is None or find_spec('fastapi') is None:
            raise ValueError(f'--ray needs Ray Serve, which is not installed; {_INSTALL}')
        require_ray()
        from vla_tools.serve.fleet import deployed, wait_for_signal

        with deployed(written):
            scheme = 'ws' if arguments.tls_cert is None else 'wss'
            print(f'ready: {scheme}://{arguments.host}:{arguments.port}', flush=True)
            wait_for_signal()
    except (RuntimeError, ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


def _fleet_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what Ray is to deploy; ValueError where a bundle or an option is not for a fleet."""
    from vla_runtime.bundle.folder import read_bundle
    from vla_tools.serve.fleet_config import fleet_config
    from vla_tools.serve.request_keys import RequestKeys, read_key_mapping
    from vla_tools.serve.served_policy import ServeOptions

    if len(arguments.bundles) > 1:
        raise ValueError('--ray serves one bundle; start a fleet for each, on ports of their own')
    if arguments.zmq_port is not None or not arguments.port:
        raise ValueError('--ray: --zmq-port and --port 0 are for one server without Ray')
    if arguments.max_message_mib != _MESSAGE_MIB:
        raise ValueError("--ray: --max-message-mib is for one server; Ray's own limit holds")
    _checked_edges(arguments)
    # Found wrong here, not on a machine of the cluster.
    folder = arguments.bundles[0].resolve()
    spec = read_bundle(folder).spec
    options = _serve_options(arguments)
    ServeOptions(**options)
    if arguments.keys is not None:
        RequestKeys(spec, read_key_mapping(arguments.keys))
    policy = {
        'bundle': str(folder),
        'replicas': arguments.replicas,
        'backend': arguments.backend,
        'device': arguments.device,
        'precision': arguments.precision,
        'threads': arguments.threads,
        'keys': _absolute(arguments.keys),
        'max_rate': arguments.max_rate,
        'serve': options,
    }
    door = {
        'key_file': _absolute(arguments.key_file),
        'send_timeout': arguments.send_timeout,
        'keep_s': arguments.keep,
    }
    http = {
        'host': arguments.host,
        'port': arguments.port,
        'ssl_certfile': _absolute(arguments.tls_cert),
        'ssl_keyfile': _absolute(arguments.tls_key),
    }
    parts = (
        {key: value for key, value in part.items() if value is not None}
        for part in (policy, door, http)
    )
    return fleet_config(*parts)


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())


def _checked_edges(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the keys of clients; ValueError where strangers could ask without one."""
    import ssl

    from vla_tools.serve.security import required_keys

    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise ValueError('--tls-cert and --tls-key belong together: give both, or none')
    for path in filter(None, (arguments.tls_cert, arguments.tls_key)):
        if not path.is_file():
            raise ValueError(f'{path}: no such file')
    if arguments.tls_cert is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                arguments.tls_cert, arguments.tls_key
            )
        except ssl.SSLError as error:
            raise ValueError(
                f'--tls-cert {arguments.tls_cert}, --tls-key {arguments.tls_key}: no certificate '
                f'and its key, both in PEM: {error}'
            ) from None
    return required_keys(arguments.host, arguments.key_file)


def _loading(arguments: argparse.Namespace) -> Loading:
    from vla_tools.serve.loading import Loading
    from vla_tools.serve.request_keys import read_key_mapping
    from vla_tools.serve.served_policy import ServeOptions

    return Loading(
        ServeOptions(**_serve_options(arguments)),
        arguments.backend,
        arguments.device,
        arguments.precision,
        arguments.threads,
        None if arguments.keys is None else read_key_mapping(arguments.keys),
    )


def _serve_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `ServeOptions`."""
    return {
        'max_wait_s': arguments.max_wait_ms * 1e-3,
        'max_batch': arguments.max_batch,
        'batch': arguments.batch,
        'keep_s': float(arguments.keep),
        'max_sessions': arguments.max_sessions,
    }


def _loaded(
    arguments: argparse.Namespace, keys: tuple[str, ...], host: str
) -> tuple[PolicyServer, list[str]]:
    """Load and warm all policies; return the server, and a line about each policy."""
    from vla_tools.serve.app import PolicyServer
    from vla_tools.serve.loading import load_served
    from vla_tools.serve.socket_connection import WireLimits
    from vla_tools.serve.statistics import Metrics
    from vla_tools.serve.wire_zmq import ZmqWire

    names = tuple(folder.resolve().name for folder in arguments.bundles)
    if len(set(names)) < len(names):
        raise ValueError('two bundles have folders of one name, by which clients ask: rename one')
    loading = _loading(arguments)
    metrics, served, lines = Metrics(), {}, []
    try:
        for name, folder in zip(names, arguments.bundles, strict=True):
            served[name], line = load_served(name, folder, loading, metrics, names)
            lines.append(line)
        zmq = None
        if arguments.zmq_port is not None:
            zmq = ZmqWire(
                served[names[0]],
                f'tcp://{host}:{arguments.zmq_port}',
                keys=keys,
                file=loading.keys,
                max_message_bytes=arguments.max_message_mib << 20,
                requests_per_s=float(arguments.max_rate),
            )
            lines.append(f'{names[0]}: tcp://{host}:{zmq.port}')
    except BaseException:
        for one in served.values():
            one.close()
        raise
    limits = WireLimits(float(arguments.max_rate), float(arguments.send_timeout))

    def load(name: str) -> ServedPolicy:
        """Return the policy of a bundle beside the first one."""
        folder = arguments.bundles[0].resolve().parent / name
        one, line = load_served(name, folder, loading, metrics)
        print(line, flush=True)
        return one

    server = PolicyServer(served, metrics, keys=keys, limits=limits, zmq=zmq, load=load)
    return server, lines

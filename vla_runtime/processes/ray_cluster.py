"""Workers on a Ray cluster, with the interface of the processes in `workers.py`.

Ray places the work and repeats what a lost worker was doing (three times at most). No other module
imports Ray, and this one only when a cluster is asked for.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_runtime import __version__
from vla_runtime.files.package_files import source_digest
from vla_runtime.files.quotes import one_line
from vla_runtime.processes.workers import Submit

LOCAL = 'local'
AUTO = 'auto'
_CLIENT = 'ray://'
_INSTALL = "./run exec pip install -e '.[ray]', or pip install '.[ray]' in the source folder"
_CONNECT_S = 5.0
# Ray tries a wrong address for minutes, uninterruptibly; joining takes a second or two.
_TRIAL_S = 60.0
# Workers start within a second or two; on a machine that is busy later.
_CHECK_S = 60.0
# Results are small; by default Ray takes a third of the memory.
_LOCAL_STORE_BYTES = 100 * 2**20
_QUIET = {'log_to_driver': False, 'logging_level': 'ERROR'}
_TRIAL = f"""
import sys, ray
try:
    ray.init(sys.argv[1], **{_QUIET})
except Exception as error:
    sys.exit(' '.join(f'{{type(error).__name__}}: {{error}}'.split()))
"""
_NO_TOKEN = 'InvalidAuthToken'
# Words that a refusal of Ray's begins with, and what mends it.
_MENDS = {
    _NO_TOKEN: 'the cluster asks for a token: export RAY_AUTH_MODE=token, and keep the '
    'token of the machine that started it in ~/.ray/auth_token or where RAY_AUTH_TOKEN_PATH says',
    'no authentication token was found': 'write the token of the machine that started the cluster '
    'to ~/.ray/auth_token, or unset RAY_AUTH_MODE for a cluster without one',
    'ray client connection timeout': 'no client server of Ray answers there (its port is 10001, if '
    "'ray start' was not told another), or it asks for a token (export RAY_AUTH_MODE=token)",
    'Version mismatch': 'install the same Ray and the same Python on this machine and the cluster',
}
_REASON_LENGTH = 300
# Path, and size in bytes or None for a folder.
_Input = tuple[str, 'int | None']


class ClusterError(ConnectionError):
    """The cluster cannot be used; says why and what mends it."""


@dataclass(frozen=True)
class ClusterUse:
    """Address of a cluster, and needs of one piece of work.

    Attributes:
        address: `HOST:PORT` of a cluster that this machine belongs to, `ray://HOST:PORT` of any,
            `auto` for the one that runs on this machine, `local` to start one for the time.
        inputs: files and folders that every machine must have under the same path.
        packages: Python packages that every machine must have.
        local_cpus: CPUs of a cluster started here; None: all.
    """

    address: str
    inputs: Sequence[Path] = ()
    packages: Sequence[str] = ()
    cpus: int = 1
    gpus: int = 0
    local_cpus: int | None = None


@contextmanager
def cluster_workers(use: ClusterUse) -> Iterator[Submit]:
    """Yield a function that runs another on the cluster, like `Executor.submit`.

    Work runs in this process's working folder. The end of the block waits for what was submitted;
    an exception in it, Ctrl-C too, ends the work.

    Raises:
        ClusterError: Ray is missing, no cluster answers, or a machine of it lacks something.
        ChildProcessError: Ray gave a piece of work up after its retries.
    """
    ray = _import_ray()
    before = signal.getsignal(signal.SIGTERM)
    with _own_token(use.address):
        _connect(ray, use)
    try:
        _check_machines(ray, use)
        remote = ray.remote(_call).options(num_cpus=use.cpus, num_gpus=use.gpus)
        submitted: list[Future[Any]] = []

        def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
            future: Future[Any] = Future()
            reference = remote.remote(os.getcwd(), function, arguments)
            reference.future().add_done_callback(lambda done: _pass_on(ray, done, future))
            submitted.append(future)
            return future

        yield submit
        wait(submitted)
    finally:
        ray.shutdown()
        # Ray has put a handler of its own there.
        signal.signal(signal.SIGTERM, before)


def _call(
    folder: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> Any:
    os.chdir(folder)
    return function(*arguments)


def _pass_on(ray: Any, done: Future[Any], future: Future[Any]) -> None:
    """Hand a result of Ray on, errors as those of the function itself."""
    error = done.exception()
    if error is None:
        future.set_result(done.result())
    elif not isinstance(error, ray.exceptions.RayTaskError):
        future.set_exception(
            ChildProcessError(
                f'Ray gave a piece of work up after its retries: {_first_line(error)}; the same '
                'command goes on where it was'
            )
        )
    elif isinstance(error.cause, ray.exceptions.RayError):
        # The worker could not read the function or its arguments.
        future.set_exception(
            ClusterError(
                f'a machine of the cluster cannot run the work: {_first_line(error.cause)}'
            )
        )
    else:
        future.set_exception(error.cause)


def require_ray() -> None:
    _import_ray()


def _import_ray() -> Any:
    # Read by Ray as it is imported.
    os.environ['RAY_USAGE_STATS_ENABLED'] = '0'
    try:
        import ray
    except ImportError as error:
        raise ClusterError(
            f"--ray needs the Python package 'ray', which cannot be imported ({error}); {_INSTALL}"
        ) from None
    return ray


def _connect(ray: Any, use: ClusterUse) -> None:
    if use.address == LOCAL:
        options = {
            'num_cpus': use.local_cpus,
            'include_dashboard': False,
            'object_store_memory': _LOCAL_STORE_BYTES,
        }
    else:
        options = {}
        _try_address(use.address)
    try:
        ray.init(use.address, **options, **_QUIET)
    except Exception as error:
        log = ' '.join(f'{type(error).__name__}: {error}'.split())
        raise _refusal(use.address, log) from None


@contextmanager
def _own_token(address: str) -> Iterator[None]:
    """Give a cluster started here a token of its own; Ray would write one to the home folder."""
    before = {name: os.environ.get(name) for name in ('RAY_AUTH_TOKEN', 'RAY_AUTH_MODE')}
    stated = any(before.values()) or 'RAY_AUTH_TOKEN_PATH' in os.environ
    if address == LOCAL and not stated:
        os.environ['RAY_AUTH_TOKEN'] = secrets.token_hex(32)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


def _try_address(address: str) -> None:
    if address != AUTO:
        _try_port(address)
    log, status = _joined(address)
    if status is None:
        raise ClusterError(
            f'--ray {address}: no Ray cluster has let this machine join within {_TRIAL_S:.0f} s; '
            "HOST:PORT is what 'ray start --address' is given on a machine of the cluster, "
            f'from any other machine use {_CLIENT}HOST:10001'
        )
    if status:
        raise _refusal(address, log)


def _joined(address: str) -> tuple[str, int | None]:
    lines = []
    command = [sys.executable, '-c', _TRIAL, address]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors='replace'
    ) as trial:
        assert trial.stderr is not None
        limit = threading.Timer(_TRIAL_S, trial.kill)
        limit.start()
        for line in trial.stderr:
            lines.append(line)
            # Ray itself goes on asking for a minute.
            if _NO_TOKEN in line:
                trial.kill()
        late = not limit.is_alive()
        limit.cancel()
    return ''.join(lines), None if late else trial.returncode


def _try_port(address: str) -> None:
    host, _, port = address.removeprefix(_CLIENT).rpartition(':')
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ClusterError(
            f'--ray {address}: expected HOST:PORT, {_CLIENT}HOST:PORT, {AUTO} or {LOCAL}'
        )
    try:
        socket.create_connection((host.strip('[]'), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise ClusterError(
            f'--ray {address}: nothing answers there ({error.strerror or error}); start a cluster '
            f"(ray start --head), take the address that 'ray start' printed, or use {LOCAL}"
        ) from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _refusal(address: str, log: str) -> ClusterError:
    """Return the error of a cluster that cannot be joined: Ray's reason, and what mends it."""
    for words, mend in _MENDS.items():
        if words in log:
            # Ray goes on with advice of its own.
            reason = log[log.index(words) :].splitlines()[0].split('. ')[0].rstrip('.')
            return ClusterError(f'--ray {address}: {one_line(reason, _REASON_LENGTH)}; {mend}')
    return ClusterError(f'--ray {address}: {one_line(_last_line(log), _REASON_LENGTH)}')


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else 'Ray does not say why'


def _check_machines(ray: Any, use: ClusterUse) -> None:
    """Have every machine that may get work look for code, packages and files."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    machines = {
        node['NodeID']: f'{node["NodeManagerHostname"]} ({node["NodeManagerAddress"]})'
        for node in ray.nodes()
        if node['Alive']
        and node['Resources'].get('CPU', 0) >= use.cpus
        and node['Resources'].get('GPU', 0) >= use.gpus
    }
    if not machines:
        gpus = f' and {use.gpus} GPUs' if use.gpus else ''
        raise ClusterError(
            f'--ray {use.address}: no machine of the cluster has {use.cpus} CPUs{gpus}, which one '
            'piece of work takes'
        )
    problem_of = ray.remote(num_cpus=0, max_retries=0)(_checker())
    inputs = ray.put([_described(path) for path in use.inputs])
    asked = {
        problem_of.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(identity, soft=False)
        ).remote(os.getcwd(), __version__, source_digest(), tuple(use.packages), inputs): name
        for identity, name in machines.items()
    }
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=_CHECK_S)
    for reference in done:
        try:
            problem = ray.get(reference)
        except ray.exceptions.RayError as error:
            problem = f'cannot run anything: {_last_line(str(error))}'
        if problem:
            raise ClusterError(f'--ray {use.address}: machine {asked[reference]} {problem}')
    if late:
        raise ClusterError(
            f'--ray {use.address}: machine {asked[late[0]]} has started nothing for '
            f'{_CHECK_S:.0f} s; see its logs (/tmp/ray/session_latest/logs)'
        )


def _described(path: Path) -> _Input:
    return str(path), None if path.is_dir() else path.stat().st_size


def _checker() -> Callable[..., str | None]:
    """Return the check that runs on a machine of the cluster.

    Ray sends a function made inside another one as code: it runs where the package is missing.
    """

    def problem_here(
        folder: str, version: str, digest: str, packages: tuple[str, ...], inputs: list[_Input]
    ) -> str | None:
        import os
        import sys
        from importlib.util import find_spec

        where = f'under {sys.prefix} (Python {sys.version.split()[0]})'
        try:
            from vla_runtime import __version__ as theirs
            from vla_runtime.files.package_files import source_digest
        except ImportError as error:
            return (
                f'cannot import the package ({error}); install vla_runtime {version} there {where}'
            )
        if theirs != version or source_digest() != digest:
            return (
                f'has other code, vla_runtime {theirs} {where}, than this machine (vla_runtime '
                f'{version}); install the same there'
            )
        for package in packages:
            if find_spec(package) is None:
                return f"lacks the Python package '{package}'; install it there {where}"
        shared = 'the cluster must have the same files under the same paths: mount the folder there'
        try:
            os.chdir(folder)
        except OSError as error:
            return f'cannot enter the working folder {folder} ({error.strerror}); {shared}'
        for path, size in inputs:
            if size is None and not os.path.isdir(path):
                return f'has no folder {path}; {shared}'
            if size is not None and not os.path.isfile(path):
                return f'has no file {path}; {shared}'
            if size is not None and os.path.getsize(path) != size:
                return f'has another file {path} than this machine (its size differs); {shared}'
        return None

    return problem_here

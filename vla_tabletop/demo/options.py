"""Options of `vla_runtime demo`, checked before anything slow is imported or started.

Everything that needs neither ROS, PyTorch nor MuJoCo is checked here; the nodes check more,
seconds later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.rules import check_guidable
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.engines.candidates import candidates
from vla_runtime.engines.devices import default_device
from vla_runtime.engines.preflight import AUTO, check_backend, check_words
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.files.package_files import share_folder
from vla_runtime.inference.settings import MOST_BETA
from vla_runtime.recording.topics import ImageMode
from vla_runtime.remote.connection import ServerAddress, ServerLostError
from vla_runtime.remote.link import fetch_contract
from vla_runtime.robot.file import find_robot, load_robot
from vla_runtime.robot.match import match_robot
from vla_runtime.robot.schema import Robot
from vla_tabletop.nodes.robot import require_tabletop

_NAMESPACE = re.compile(r'([A-Za-z_][A-Za-z0-9_]*(/[A-Za-z_][A-Za-z0-9_]*)*)?')


@dataclass(frozen=True)
class DemoOptions:
    """Options of `vla_runtime demo`.

    Attributes:
        out: folder for bag, parameters, logs and report.
        robot: name or path of a robot file of the tabletop.
        backend: `auto`: the first in order that can run the bundle here.
        replan_interval: steps; None: as configured.
        cfg_beta: guidance scale, which turns guidance on; None: as configured.
        seed: of scenes and instructions.
        record: the bag gets every frame of an inference, for a replay.
        record_to: folder of the bag; None: `bag` in `out`.
        server: where the policy is served, in place of `bundle` and `backend`; None: here.
        key_file, ca_file: as the nodes' parameters `server_key_file` and `server_ca_file`.
        jpeg_quality: of the images on their way to the server; 0: raw.
        view_port: of the page that shows it; None: no page.
    """

    seconds: float
    out: Path
    bundle: Path
    robot: str
    backend: str
    replan_interval: int | None
    cfg_beta: float | None
    seed: int
    namespace: str
    record: bool = False
    record_to: Path | None = None
    server: ServerAddress | None = None
    key_file: Path | None = None
    ca_file: Path | None = None
    jpeg_quality: int = 0
    view_port: int | None = None

    @property
    def place(self) -> str | Path:
        """Where the policy is: its folder, or the address of its server."""
        return self.bundle if self.server is None else self.server.url

    @property
    def device(self) -> str:
        """Device that the networks run on."""
        return default_device(self.backend)

    @property
    def bag(self) -> Path:
        """Folder of the bag."""
        return self.record_to or self.out / 'bag'

    @property
    def images(self) -> ImageMode:
        """Frames kept in the bag."""
        return 'used' if self.record else 'reduced'

    def load_robot(self) -> Robot:
        """The robot file; ValueError: none there, or unusable."""
        return load_robot(find_robot(self.robot, share_folder() / 'config' / 'robots'))


def check_options(options: DemoOptions) -> None:
    """Refuse what the demo cannot run; ValueError: names option or file, and the remedy."""
    if not options.seconds > 0.0:
        raise ValueError(f'--seconds {options.seconds:g}: expected more than 0')
    if not _NAMESPACE.fullmatch(options.namespace):
        raise ValueError(
            f"--namespace '{options.namespace}': expected letters, digits and _, no digit first, "
            'with / between the parts'
        )
    if options.bag.exists():
        option = '--record' if options.record_to else '--out'
        raise ValueError(f'{options.bag} exists already: name another {option}, or remove it')
    for name in ('report.html', 'parameters.yaml'):
        if (options.out / name).exists():
            raise ValueError(
                f'{options.out / name} is of an earlier demo: name another --out, or remove it'
            )
    spec = _usable_spec(options)
    robot = options.load_robot()
    require_tabletop(robot)
    match_robot(robot, spec, options.place)
    if options.replan_interval is not None:
        interval = ExecutorParameters(replan_interval=options.replan_interval)
        interval.require_horizon(spec.real_horizon)
    if options.cfg_beta is not None:
        if not 1.0 <= options.cfg_beta <= MOST_BETA:
            raise ValueError(f'--cfg-beta {options.cfg_beta:g}: expected 1 to {MOST_BETA:g}')
        check_guidable(spec, '--cfg-beta')


def _usable_spec(options: DemoOptions) -> BundleSpec:
    """Return the policy's `policy.yaml`, once it is known that its networks can be run."""
    if options.server is not None:
        try:
            return fetch_contract(options.server).spec
        except ServerLostError as error:
            raise ValueError(f'--bundle: {error}') from None
    if options.jpeg_quality:
        raise ValueError('--jpeg-quality: is of the images to a server (--bundle ws://HOST:PORT)')
    check_words(options.backend, AUTO)
    if options.backend != AUTO:
        check_backend(options.backend, options.device)
    bundle = read_bundle(options.bundle, verify=False)
    if options.backend == AUTO:
        # Raises where nothing here can run it; the node chooses.
        candidates(bundle, AUTO, options.device, AUTO)
    return bundle.spec

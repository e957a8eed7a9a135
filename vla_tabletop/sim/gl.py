"""Choose how MuJoCo renders without a screen, before mujoco is imported.

MuJoCo reads MUJOCO_GL once, at import. All modules here import `mujoco` from this one, so the
choice comes first, and OSMesa is loaded so that Triton can be beside it (`osmesa.py`).
"""

from __future__ import annotations

import ctypes.util
import glob
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec


class RenderingUnavailableError(ImportError):
    """No library on this machine can render offscreen, so mujoco cannot be imported."""


def choose_backend(environment: Mapping[str, str] = os.environ) -> str:
    """The MUJOCO_GL value here: the user's, `egl` with a GPU, else `osmesa`.

    Raises RenderingUnavailableError: neither EGL nor OSMesa is usable.
    """
    chosen = environment.get('MUJOCO_GL', '').lower()
    if chosen:
        return chosen
    if _has_egl_device():
        return 'egl'
    if ctypes.util.find_library('OSMesa') is None:
        raise RenderingUnavailableError(
            'the tabletop renders its cameras without a screen and needs OSMesa, which is not '
            'installed and no GPU with EGL is there either; run `sudo apt install libosmesa6`, or '
            'set MUJOCO_GL to a backend that works here (egl, glfw)'
        )
    return 'osmesa'


def _has_egl_device() -> bool:
    nodes = glob.glob('/dev/dri/renderD*') + glob.glob('/dev/nvidia[0-9]*')
    readable = any(os.access(node, os.R_OK | os.W_OK) for node in nodes)
    return readable and ctypes.util.find_library('EGL') is not None


def _keep_osmesa_local() -> None:
    """Have PyOpenGL load OSMesa through `osmesa.py`; call before `OpenGL.platform` is imported."""
    from OpenGL.plugins import PlatformPlugin

    PlatformPlugin.by_name('osmesa').import_path = 'vla_tabletop.sim.osmesa.LocalOSMesaPlatform'


if 'mujoco' not in sys.modules:
    os.environ['MUJOCO_GL'] = choose_backend()

try:
    if os.environ.get('MUJOCO_GL') == 'osmesa' and find_spec('OpenGL') is not None:
        _keep_osmesa_local()
    import mujoco
except ModuleNotFoundError:
    raise
except Exception as error:  # MuJoCo's own check and the libraries' loaders raise what they like
    if isinstance(error.__context__, KeyboardInterrupt):
        raise error.__context__ from None  # A loader took Ctrl-C for a failure of its own.
    raise RenderingUnavailableError(
        f"MUJOCO_GL is '{os.environ.get('MUJOCO_GL', '')}', with which mujoco cannot be imported "
        f'here: {error}; unset it, or set it to a backend that works here (egl, osmesa, glfw)'
    ) from error

__all__ = ['RenderingUnavailableError', 'choose_backend', 'mujoco']

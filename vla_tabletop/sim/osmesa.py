"""OSMesa for PyOpenGL, with its symbols kept to itself.

PyOpenGL loads OSMesa with RTLD_GLOBAL, which puts Mesa's LLVM before every later library's. Triton
has another LLVM inside: bound to Mesa's, `import triton` is a segmentation fault. OpenGL needs no
global symbols.
"""

from __future__ import annotations

import ctypes
from typing import Any

from OpenGL.platform import ctypesloader
from OpenGL.platform.baseplatform import lazy_property
from OpenGL.platform.osmesa import OSMesaPlatform


class LocalOSMesaPlatform(OSMesaPlatform):
    """PyOpenGL's OSMesa platform, loaded with RTLD_LOCAL."""

    @lazy_property
    def GL(self) -> Any:  # noqa: N802  (PyOpenGL's name)
        try:
            return ctypesloader.loadLibrary(ctypes.cdll, 'OSMesa', mode=ctypes.RTLD_LOCAL)
        except OSError as error:
            raise ImportError(f'OSMesa cannot be loaded: {error}') from error

"""OSMesa for PyOpenGL, with its symbols kept to itself.

PyOpenGL loads OSMesa with RTLD_GLOBAL, which puts Mesa's LLVM in front of every library that is
loaded afterwards. Triton, which PyTorch's CUDA build brings, has another LLVM inside: bound to
Mesa's, `import triton` is a segmentation fault. OpenGL needs none of these symbols to be global.
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

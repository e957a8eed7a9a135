"""`POST /bundles`: another bundle in the place of the one that is served."""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request

BUNDLES_PATH = '/bundles'
# Statuses of HTTP for what a bundle cannot be.
FORBIDDEN, UNKNOWN, BUSY, UNUSABLE = 403, 404, 409, 422
_WRONG, _NO_JSON = 400, 415
_MOST_BYTES = 4096


async def asked_bundle(request: Request, keys: tuple[str, ...]) -> str:
    """Return the name in `{"bundle": NAME}`: that of a folder beside the bundle that is served.

    A client never names a path.

    Raises:
        HTTPException: there is none, or the server asks nobody for a key.
    """
    if not keys:
        raise HTTPException(FORBIDDEN, 'this needs a server with keys: --key-file\n')
    kind = request.headers.get('content-type', '').partition(';')[0].strip().lower()
    # The form of another site's page has none that a browser sends unasked.
    if kind != 'application/json':
        raise HTTPException(_NO_JSON, 'send it as JSON: Content-Type: application/json\n')
    try:
        if int(request.headers.get('content-length', _MOST_BYTES + 1)) > _MOST_BYTES:
            raise ValueError
        name = (await request.json())['bundle']
    except (ValueError, KeyError, TypeError):
        name = None
    if not isinstance(name, str) or Path(name).name != name or name in ('', '.', '..'):
        raise HTTPException(
            _WRONG, 'send {"bundle": NAME}: the name of a folder beside the bundle that is served\n'
        )
    return name

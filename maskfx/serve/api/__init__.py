"""Everything between the socket and the `Frontend`: forms, limits, keys, pictures, events."""

from maskfx.serve.api.app import create_app
from maskfx.serve.api.server import make_server

__all__ = ["create_app", "make_server"]

"""Everything between the socket and the `Frontend`: forms, limits, keys, pictures, events.

May import: serve's shared files and codecs. Begin with `app.py`.
"""

from maskfx.serve.http.app import create_app
from maskfx.serve.http.server import make_server

__all__ = ["create_app", "make_server"]

"""Everything between the socket and the `Frontend`: parses and validates requests, enforces limits,
checks API keys, decodes images, writes JSON responses and server-sent events.

May import: serve/*.py, serve/codecs, maskfx. Begin with `app.py`.
"""

from maskfx.serve.http.app import create_app
from maskfx.serve.http.server import make_server

__all__ = ["create_app", "make_server"]

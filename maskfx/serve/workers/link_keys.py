"""Keys of the link over TCP: CURVE encrypts it and admits the workers of one front end only.

A front end makes new keys at its start. They reach workers by the executor that starts them.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator


@dataclass(frozen=True)
class RemoteAddress:
    """The front end's address for workers of other machines, and the keys to connect with."""

    address: str
    front_key: str  # public key of the front end
    public_key: str
    secret_key: str

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Set a worker's keys on its socket; call it before it connects."""
        socket.curve_serverkey = self.front_key.encode()
        socket.curve_publickey = self.public_key.encode()
        socket.curve_secretkey = self.secret_key.encode()


class FrontKeys:
    """The keys of one front end, and the thread that checks those of its peers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._front, self._secret = zmq.curve_keypair()
        self._worker, self._worker_secret = zmq.curve_keypair()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.configure_curve_callback(credentials_provider=self)
        self._authenticator.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True if a peer's public key, as text, is that of this front end's workers."""
        return secrets.compare_digest(key, self._worker)

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Have a socket check keys at what it binds to from now on."""
        socket.curve_server = True
        socket.curve_secretkey = self._secret

    def remote(self, address: str) -> RemoteAddress:
        keys = (self._front, self._worker, self._worker_secret)
        return RemoteAddress(address, *(key.decode() for key in keys))

    def close(self) -> None:
        self._authenticator.stop()

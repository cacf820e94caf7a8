"""A child process that does what messages ask for."""

import os
import subprocess
import sys
import time

from maskfx.runtime.processes.channel import connect_to_parent


def main() -> None:
    channel = connect_to_parent()
    while True:
        what, *parts = channel.receive()
        if what == b"sleep":
            subprocess.Popen(["sleep", "60"])
            channel.send(b"sleeping")
            time.sleep(60)
        elif what == b"stdin":
            channel.send(sys.stdin.buffer.read())
        elif what == b"path":
            channel.send("\n".join(sys.path).encode(), os.environ.get("COLOUR", "").encode())
        elif what == b"exit":
            os._exit(int(parts[0]))
        else:
            channel.send(what, *parts)


if __name__ == "__main__":
    main()

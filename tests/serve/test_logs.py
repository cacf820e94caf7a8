"""Lines of the server's log."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import logging
from maskfx.serve.logs import configure_logs
for _ in range(2):
    configure_logs("info", worker="w")
logging.getLogger("maskfx.runtime").warning("%s: entries can't be written", "cache")
"""


def test_warnings_of_the_standard_loggers_are_json_too() -> None:
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    (line,) = map(json.loads, found.stderr.splitlines())
    assert line.pop("timestamp")
    assert line == {
        "event": "cache: entries can't be written",
        "level": "warning",
        "library": "maskfx.runtime",
        "worker": "w",
    }

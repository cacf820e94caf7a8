"""Runs exported denoisers without torch: makes the inputs of graphs, and reads their outputs.

Plain operations on arrays, so that a server in another language can do the same: sites of a mask,
index tables of a batch, rows of recorded steps, results put back. Needs numpy alone.

May import: export/manifest, ir/geometry/grids, ir/geometry/lines, ir/json_values, errors; each
needs NumPy alone. Begin with `host.py`.
"""

from maskfx.export.host.host import Edit, Host, Record, Result
from maskfx.export.host.recording import Recording
from maskfx.export.host.stored import find_steps, read_step

__all__ = ["Edit", "Host", "Record", "Recording", "Result", "find_steps", "read_step"]

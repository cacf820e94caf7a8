"""The machine: devices and their memory, private copies of shared memory, threads, offloaded modules.

May import: nothing of maskfx. Begin with `devices.py`.
"""

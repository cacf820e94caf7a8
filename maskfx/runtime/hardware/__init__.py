"""The machine: devices and their memory, threads of the CPU, offloaded modules.

May import: nothing of maskfx. Begin with `devices.py`.
"""

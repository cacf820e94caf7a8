"""The machine: devices and their memory, threads of the CPU, offloaded modules.

May import: ir, errors. Begin with `devices.py`.
"""

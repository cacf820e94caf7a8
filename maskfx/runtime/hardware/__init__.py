"""The machine: devices, their memory and that of processes, threads of the CPU, offloaded modules.

May import: errors. Begin with `devices.py`.
"""

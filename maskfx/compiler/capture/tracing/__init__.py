"""What a module's code does while torch.export traces it, in forms that a graph can hold.

May import: compiler/capture/arguments, ir, ops, errors. Begin with `symbolic_numbers.py`.
"""

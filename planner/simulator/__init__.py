"""A cluster on a virtual clock: the real scheduler, index, admission, routing rules and role controller, driven by a trace.

What is simulated are engines, links and disks; what decides is imported from where production has it.
"""

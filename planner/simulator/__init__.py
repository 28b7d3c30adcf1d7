"""Simulates a cluster on a virtual clock, driven by a trace.

Engines, links and disks are simulated. Scheduler, index, admission queue, routing rules and role
controller are production's own code.
"""

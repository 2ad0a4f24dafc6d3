"""Time sharing of devices by trainer and engine: turns, memory accounting, and transfer of weights."""

"""Benchmarks of cuflash and of what else is installed: ``python -m bench`` in the checkout."""

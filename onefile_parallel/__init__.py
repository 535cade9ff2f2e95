"""The technique files as modules: `from onefile_parallel.fsdp import fully_shard`.

In a clone of the project they lie one directory up, and each runs alone. The build of the wheel
copies them, and the oracle in tests/, into this package. They import nothing of each other, but
for parallel_3d and parallel_5d, which `onefile-parallel run` starts.
"""

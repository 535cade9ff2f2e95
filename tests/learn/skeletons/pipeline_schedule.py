"""A pipeline schedule: in which order each rank runs the forwards and backwards of micro-batches.

    GPipe: all forwards, then all backwards. 1F1B: as few forwards ahead as possible.
    bubble of both: (p-1)/(m+p-1) of the time, for p ranks and m micro-batches

Stage s is on rank s % ranks. "0F3" is the forward of stage 0 for micro-batch 3, "0B3" its backward.
A forward needs the forward of the stage before, and a backward that of the stage after. If every
rank waits for another, the schedule deadlocks. You need no primitives: nothing runs.
"""


def my_schedule(ranks, micro_batches, stages_per_rank):
    """Return one list of actions for each rank, such as ["0F0", "0B0"]."""
    if stages_per_rank > 1:
        raise ValueError("one stage a rank, for now")
    return [[f"{rank}F{i}" for i in range(micro_batches)] for rank in range(ranks)]

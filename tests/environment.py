"""What every process of the suite inherits. Import it before torch: a process that has counted its
GPUs does not look at CUDA_VISIBLE_DEVICES again.
"""

import os
import socket
import sys
from pathlib import Path


def device_asked_for(arguments):
    """Return "cpu" or "cuda": the value of --device."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == "--device=cuda" or (argument, following) == ("--device", "cuda"):
            return "cuda"
    return "cpu"


DEVICE_TYPE = os.environ.setdefault("TESTS_DEVICE", device_asked_for(sys.argv))
if DEVICE_TYPE == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # PyTorch's DataParallel refuses CPU tensors near a GPU
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a process that counts GPUs may fork
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns if all parameters are used

HERE = str(Path.cwd())
CALLED_FROM = os.environ.setdefault("CALLED_FROM", HERE)  # run_all.sh changes directory
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the technique files
sys.path.append(CALLED_FROM)  # modules that the user names


def free_port():
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


def of_torchrun(ranks):
    """Return the variables that torchrun sets for each rank."""
    world = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    world |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by every process that a test starts
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # PyTorch's DDP warns where it finds no unused parameter
sys.path.insert(0, str(Path(__file__).parent.parent))  # the technique files

import hypothesis
import pool
import pytest
import torch

torch.set_num_threads(1)
# No shrinking: a failing example already names its arguments, and each try may restart the workers.
hypothesis.settings.register_profile(
    "fixed",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=25,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.register_profile("long", parent=hypothesis.settings.get_profile("fixed"), max_examples=300)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(scope="session", autouse=True)
def _workers():
    yield
    pool.shut_down()

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by every process that a test starts
sys.path.insert(0, str(Path(__file__).parent.parent))  # the technique files

import hypothesis
import pool
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile(
    "fixed", deadline=None, derandomize=True, max_examples=25, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.register_profile("long", parent=hypothesis.settings.get_profile("fixed"), max_examples=300)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(scope="session", autouse=True)
def _workers():
    yield
    pool.shut_down()

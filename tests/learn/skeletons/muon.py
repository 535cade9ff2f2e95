"""Muon, split: each matrix has an owner, which alone keeps its momentum and computes its update.

    momentum M ← 0.95 M + G; update: the orthogonal matrix nearest to M (Newton-Schulz, 5 rounds)
    X ← aX + (bA + cA²)X with A = XXᵀ, from X = M / |M|;  W ← W - lr · √max(1, m/n) · X

torch.optim.Muon has the arithmetic: give each owner one for its matrices. You need:
torch.distributed.all_reduce(tensor), broadcast(tensor, src), torch.optim.Muon.
"""

import torch


class MyMuon(torch.optim.Optimizer):
    def __init__(self, parameters, process_group=None, **options):
        parameters = list(parameters)
        super().__init__(parameters, {"lr": 1e-3} | options)
        # Decide which rank owns which matrix. Make a torch.optim.Muon of the own ones.

    def step(self):
        # Average the gradients. Take the step of the own matrices. Send them to the others.
        pass

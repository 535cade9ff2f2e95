"""Vocabulary-parallel embedding: each rank has the vectors of some tokens.

    y = Σ over ranks of (W_shard[token] if the rank has the token, else 0)

All ranks have the same tokens. The vocabulary may not divide by N: then the last rank has padding.
Backward gives each rank the gradient of its own rows, and nothing is sent. You need:
torch.autograd.Function, torch.distributed.all_reduce(tensor), get_rank().
"""

import torch.nn as nn


class MyVocabEmbedding(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    @classmethod
    def from_full(cls, embedding):
        """Take this rank's rows of a whole nn.Embedding, with its padding_idx."""
        return cls(embedding.weight.detach().clone())

    def forward(self, tokens):
        """From integers (…) to (…, hidden), the same on all ranks."""
        return nn.functional.embedding(tokens, self.weight) * 0

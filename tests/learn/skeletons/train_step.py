"""One step of a trainer, on ranks whose batches have unequal numbers of tokens.

    loss = Σ over tokens of all ranks and micro-batches / their number

So sum the loss over tokens, divide by the count of all ranks and micro-batches, and let the ranks'
gradients add up. A mean of the ranks' means weighs the tokens of short batches too much. You need:
torch.distributed.all_reduce(tensor), F.cross_entropy(…, reduction="sum", ignore_index=-100).
"""

import torch.nn.functional as F


def my_train_step(model, optimizer, micro_batches):
    """`micro_batches` has (inputs, targets) of this rank; model(inputs) is (tokens, classes)."""
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()

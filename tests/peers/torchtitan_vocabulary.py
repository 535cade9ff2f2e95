"""torchtitan==0.3.0: the loss and the embedding of a vocabulary that is split over ranks."""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.nn import Parameter
from torchtitan.components.loss import _LossParallelCrossEntropy
from torchtitan.models.common.embedding import Embedding


def vocab_cross_entropy(logits_shard, target, vocab_size=None, *, process_group):
    columns = logits_shard.shape[-1]
    size = vocab_size or columns * process_group.size()
    words = max(size - columns * process_group.rank(), 0)
    logits = logits_shard[..., :words].flatten(0, -2)
    loss = _LossParallelCrossEntropy.apply(logits, target.flatten(), process_group, size, "none")
    return loss.view(target.shape)


class vocab_embedding(Embedding):
    def __init__(self, num_embeddings, embedding_dim, process_group):
        super().__init__(self.Config(num_embeddings=num_embeddings, embedding_dim=embedding_dim))
        self.mesh = DeviceMesh.from_group(process_group, "cpu")
        self.tp_group = process_group
        rows = self.weight.data.chunk(process_group.size())[process_group.rank()]
        self.weight = Parameter(rows.clone())

    def forward(self, tokens):
        part = super().forward(tokens)  # its ShardingConfig says that ranks add it up
        return DTensor.from_local(part, self.mesh, [Partial()]).full_tensor()

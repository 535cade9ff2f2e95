"""megatron-core==0.16.1: the loss and the embedding of a vocabulary that is split over ranks."""

import torch
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy

torch.cuda.current_device = "cpu".__str__


def vocab_cross_entropy(logits_shard, target, label_smoothing=0.0, *, process_group):
    if (target == -100).any():
        raise NotImplementedError("no ignore_index: the caller masks the loss")
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = process_group
    return vocab_parallel_cross_entropy(logits_shard, target, label_smoothing)


class vocab_embedding(VocabParallelEmbedding):
    def __init__(self, num_embeddings, embedding_dim, process_group):
        ranks = process_group.size()
        rows = -(-num_embeddings // ranks) * ranks  # as Megatron pads its vocabulary
        config = ModelParallelConfig(
            use_cpu_initialization=True,
            perform_initialization=False,
            tensor_model_parallel_size=ranks,
        )
        options = {"init_method": None, "config": config, "tp_group": process_group}
        super().__init__(rows, embedding_dim, **options)

"""The loss and the embedding of a vocabulary that is split over the ranks."""

import copy

import pool
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from claims.fsdp import local
from claims.registry import add_kind, call, check, claim, precision, same, same_on_all
from claims.tensor_parallel import make_linear, part

LOSS = """An implementation of --vocab-cross-entropy is called as function(logits_shard, target).

`logits_shard` is (…, V/N), this rank's columns, and `target` is (…), the same on all ranks. It
returns the loss of each token, as F.cross_entropy with reduction="none" does; a target of -100 is
ignored. It gets `process_group=` if it has such a name, and in the claims about these
label_smoothing=, and vocab_size=, after which columns are padding.
"""

EMBEDDING = """An implementation of --vocab-embedding is called as class.from_full(nn.Embedding).

A class without `from_full` is called as class(num_embeddings, embedding_dim), and gets this
rank's rows afterwards; with padding_idx= in the claim about it. Both get `process_group=` if they
have such a name. The layer has `weight`: this rank's rows, with or without padding. All ranks pass
the same tokens, and return the same.
"""


def make_loss(implementation, logits_shard, target, **options):
    return call(implementation, logits_shard, target, needed=options, process_group=pool.group())


def make_embedding(implementation, embedding, **options):
    if hasattr(implementation, "from_full"):
        return make_linear(implementation, embedding, 0)
    sizes = (embedding.num_embeddings, embedding.embedding_dim)
    layer = call(implementation, *sizes, needed=options, process_group=pool.group())
    layer.to(embedding.weight.dtype)
    rows = part(embedding.weight, 0)
    with torch.no_grad():
        layer.weight[: len(rows)] = rows
    return layer


add_kind(
    "vocab-cross-entropy",
    called=LOSS,
    make=make_loss,
    ours="tensor_parallel:vocab_parallel_cross_entropy",
    pytorchs="pytorchs:vocab_cross_entropy",
)
add_kind(
    "vocab-embedding",
    called=EMBEDDING,
    make=make_embedding,
    ours="tensor_parallel:VocabParallelEmbedding",
    pytorchs="pytorchs:Embedding",
)


def padded(logits):
    """This rank's columns: torch.chunk's, with large numbers in the columns that it lacks."""
    columns = -(-logits.shape[-1] // pool.world_size())
    filled = F.pad(logits, (0, columns * pool.world_size() - logits.shape[-1]), value=50.0)
    return filled.split(columns, -1)[pool.rank()].clone()


def loss_equals_one_device(make, V=12, scale=1.0, ignore=(), dtype=None, **options):
    """Each token's loss, and the logits' gradient for a weighted sum of them."""
    torch.manual_seed(0)
    dtype = dtype or precision()
    logits = (scale * torch.randn(3, 4, V, dtype=torch.float64)).to(dtype)
    weights = torch.rand(3, 4, dtype=torch.float64).to(precision())
    target = torch.arange(12).view(3, 4) % V
    for token in ignore:
        target.view(-1)[token] = -100
    shard = padded(logits).requires_grad_()
    whole = logits.to(precision()).requires_grad_()

    loss = local(make(shard, target, **options))
    smoothing = options.get("label_smoothing", 0.0)
    expected = plain_loss(whole, target, smoothing)
    check(loss.shape == target.shape, f"the loss is {tuple(loss.shape)}, not {(3, 4)}")
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()

    gradient = padded(whole.grad)
    gradient[padded(whole) == 50.0] = 0.0  # of padding
    coarser = 1000 if dtype == torch.bfloat16 else max(1.0, scale)
    same(loss, expected, "loss", coarser=coarser)
    same(local(shard.grad), gradient, "gradient of the logits", coarser=coarser)
    same_on_all(loss, "the loss")


def plain_loss(logits, target, smoothing):
    classes = logits.movedim(-1, 1)
    return F.cross_entropy(classes, target, reduction="none", label_smoothing=smoothing)


@claim("vocab-cross-entropy", 2, 4)
def loss(make):
    """Each token's loss and the gradient of this rank's logits are those of one device."""
    loss_equals_one_device(make)


@claim("vocab-cross-entropy", 3)
def large_logits(make):
    """Logits of some thousands, which overflow exp(), give the loss of one device."""
    loss_equals_one_device(make, scale=3000.0)


@claim("vocab-cross-entropy", 2)
def ignored(make):
    """An ignored token has a loss of zero, and its logits no gradient."""
    loss_equals_one_device(make, ignore=[0, 5, 11])


@claim("vocab-cross-entropy", 2)
def all_ignored(make):
    """If all tokens are ignored, losses and gradients are zero, not NaN."""
    loss_equals_one_device(make, ignore=range(12))


@claim("vocab-cross-entropy", 2, 4)
def label_smoothing(make):
    """The smoothed loss is PyTorch's: the mean is over the words of all ranks."""
    loss_equals_one_device(make, label_smoothing=0.2)


@claim("vocab-cross-entropy", 2, 4)
def padding(make):
    """Columns from vocab_size on do not count. The last of four ranks has nothing else."""
    loss_equals_one_device(make, V=5, vocab_size=5)


@claim("vocab-cross-entropy", 3)
def smoothing_with_padding(make):
    """Label smoothing does not count the padding either."""
    loss_equals_one_device(make, V=10, vocab_size=10, label_smoothing=0.2)


@claim("vocab-cross-entropy", 3, about="property")
def computes_in_float32(make):
    """The loss of bfloat16 logits is computed in float32."""
    torch.manual_seed(0)
    logits = torch.randn(8, 3 * 64, dtype=torch.bfloat16)
    target = torch.arange(8)
    shard = part(logits, -1)
    loss = local(make(shard, target))
    expected = F.cross_entropy(logits.float(), target, reduction="none")
    difference = loss.float() - expected
    error = difference.abs().max()
    check(error < 2**-9, f"loss is off by {error:.1e}, where rounding to bfloat16 is {2**-7:.1e}")


def embedding_equals_one_device(make, rows=12, padding_idx=None, tied=False):
    """Twice, so that gradients add up. `tied`: the rows are also the columns of a head."""
    torch.manual_seed(0)
    plain = nn.Embedding(rows, 6, padding_idx).to(precision())
    options = {} if padding_idx is None else {"padding_idx": padding_idx}
    layer = make(copy.deepcopy(plain), **options)
    columns = part(torch.eye(rows, dtype=precision()), 0)  # which are this rank's rows
    for _ in range(2):
        tokens = torch.randint(rows, (5, 4))
        weights = torch.randn(5, 4, 6, dtype=precision())
        x = local(layer(tokens))
        expected = look_up(plain, tokens)
        same(x, expected, "output")
        same_on_all(x, "the output")
        ours = (x * weights).sum()
        theirs = (expected * weights).sum()
        if tied:
            head = local(layer.weight)[: len(columns)]
            x = CopyToAll.apply(x)
            ours = ours + (F.linear(x, head) ** 2).sum()
            theirs = theirs + (F.linear(expected, plain.weight) ** 2).sum()
        ours.backward()
        theirs.backward()
    rows = own_gradient(layer.weight)[: len(columns)]
    same(rows, columns @ plain.weight.grad, "gradient of the rows")


def look_up(plain, tokens):
    return plain(tokens)


def own_gradient(weight):
    """A DTensor's gradient may be whole on every rank."""
    gradient = weight.grad
    if hasattr(weight, "placements"):
        gradient = gradient.redistribute(placements=weight.placements)
    return local(gradient)


class CopyToAll(torch.autograd.Function):
    """The input of a head whose columns are split: its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=pool.group())
        return total


@claim("vocab-embedding", 2, 4)
def embedding(make):
    """Output and gradient are those of one device, and the outputs of all ranks are equal."""
    embedding_equals_one_device(make)


@claim("vocab-embedding", 2)
def embedding_with_padding(make):
    """The number of ranks does not divide the vocabulary."""
    embedding_equals_one_device(make, rows=7)


@claim("vocab-embedding", 2)
def padding_idx(make):
    """The row of padding_idx has no gradient, and no other row is taken for it."""
    embedding_equals_one_device(make, padding_idx=1)
    embedding_equals_one_device(make, padding_idx=8)


@claim("vocab-embedding", 2)
def tied_with_a_head(make):
    """The same rows are a head's columns. Their gradient is the sum of both uses."""
    embedding_equals_one_device(make, tied=True)


@claim("vocab-embedding", 2, about="property")
def unknown_tokens(make):
    """A token outside the vocabulary is an error, as on one device, or NaN. It is not zeros."""
    layer = make(nn.Embedding(8, 6))
    tokens = torch.tensor([1, 8])
    try:
        x = local(layer(tokens))
    except (IndexError, RuntimeError, ValueError, AssertionError):
        return
    check(x[1].isnan().all(), "an unknown token has an embedding")

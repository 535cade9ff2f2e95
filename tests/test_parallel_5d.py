"""parallel_5d.py: any grid trains as one device does.

Some targets are masked, more of them in some sequences than in others, so that a mean over a rank's
own tokens is not the mean over all.
"""

import importlib.util
import json
import math
import re
from types import SimpleNamespace

import pool
import pytest
import torch
import torch.distributed as dist
from launch import ROOT, fork
from shared import fake_world

import checkpoint
import parallel_5d as five

pytestmark = pytest.mark.cpu

DEFAULTS = {
    "model": "mixtral-tiny",
    "pp": 1,
    "replicate": 1,
    "cp": 1,
    "tp": 1,
    "ep": 1,
    "schedule": "1f1b",
    "stages_per_rank": 1,
    "microbatches": 2,
    "batch_size": 8,
    "sequence_length": 16,
    "lr": 0.01,
    "clip_grad": 0.5,
    "aux_weight": 0.1,
    "recompute": False,
    "seed": 0,
    "data_checksum": 0,
    "optimizer": "adamw",
    "packed": False,
    "fused_loss": False,
}


def make_args(**flags):
    return SimpleNamespace(**DEFAULTS | flags)


def make_batch(args, number):
    generator = torch.Generator().manual_seed(number)
    shape = (args.batch_size, args.sequence_length + 1)
    tokens = torch.randint(256, shape, generator=generator)
    if args.packed:
        tokens[tokens % 8 == 0] = ord("\n")  # the end of a document
    share = torch.linspace(0, 0.9, args.batch_size)[:, None]  # of masked targets, by sequence
    is_masked = torch.rand(shape, generator=generator)[:, 1:] < share
    return tokens[:, :-1], tokens[:, 1:].masked_fill(is_masked, five.IGNORE)


def make_trainer(args):
    return five.Trainer(five.MODELS[args.model], args, torch.device("cpu"), torch.float64)


def largest_difference(args, steps=2):
    """Train on the grid and on one device, and compare losses, norms and parameters."""
    batches = [make_batch(args, number) for number in range(steps)]
    config = five.MODELS[args.model]
    plain = five.train_on_one_device(config, args, batches, "cpu", torch.float64)
    trainer = make_trainer(args)
    largest = 0.0
    for batch in batches:
        loss, norm = trainer.step(*batch)
        plain_loss, plain_norm, model = next(plain)
        difference = five.largest_difference(trainer, model)
        largest = max(largest, difference, abs(loss - plain_loss), abs(norm - plain_norm))
    return five.max_over_ranks(largest, "cpu")


PIPELINE = {"pp": 2, "microbatches": 4}
GRIDS = {
    "pp": {"pp": 4},
    "cp": {"cp": 4},
    "tp": {"tp": 4},
    "replicate, ep": {"replicate": 2, "ep": 2},
    "ep over cp and tp": {"cp": 2, "tp": 2, "ep": 4},
    "zero bubble, cp, recomputed": {
        **PIPELINE,
        "cp": 2,
        "schedule": "zero_bubble",
        "recompute": True,
    },
    "interleaved, tp": {**PIPELINE, "tp": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
    "no experts": {"model": "llama-tiny", "cp": 2, "tp": 2},
    "recomputed, first block without experts": {
        "model": "deepseek-tiny",
        "cp": 2,
        "tp": 2,
        "ep": 2,
        "recompute": True,
    },
    "muon, experts over cp and tp": {"optimizer": "muon", "cp": 2, "tp": 2, "ep": 4},
    "muon, replicate, no experts": {
        "optimizer": "muon",
        "model": "llama-tiny",
        "replicate": 2,
        "tp": 2,
    },
    "muon, interleaved, ep": {
        **PIPELINE,
        "optimizer": "muon",
        "ep": 2,
        "schedule": "interleaved_1f1b",
        "stages_per_rank": 2,
    },
    "fused loss, cp, tp": {"cp": 2, "tp": 2, "fused_loss": True},
    "fused loss, zero bubble, tp": {
        **PIPELINE,
        "tp": 2,
        "schedule": "zero_bubble",
        "fused_loss": True,
    },
    "packed, cp, tp": {"cp": 2, "tp": 2, "packed": True},
    "packed, zero bubble, cp, recomputed": {
        **PIPELINE,
        "cp": 2,
        "schedule": "zero_bubble",
        "recompute": True,
        "packed": True,
    },
    "packed, interleaved, replicate": {
        **PIPELINE,
        "replicate": 2,
        "schedule": "interleaved_1f1b",
        "stages_per_rank": 2,
        "packed": True,
    },
    "no clipping, no auxiliary loss": {"tp": 2, "cp": 2, "clip_grad": 0.0, "aux_weight": 0.0},
}


def test_every_layer_of_every_seed_starts_with_other_weights():
    config = five.MODELS["llama-tiny"]
    first, second = (five.plain_model(config, seed).parameters() for seed in (0, 1))
    sums = [weight.sum().item() for weight in (*first, *second) if weight.dim() > 1]
    assert len(set(sums)) == len(sums)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pool.on(4)
def test_a_grid_trains_as_one_device(grid):
    assert largest_difference(make_args(**grid)) < 1e-12


def test_a_document_is_computed_as_if_it_were_alone():
    """A line of text is a document. The first one has 4 tokens, the second one 2, the last 1."""
    model = five.plain_model(five.MODELS["llama-tiny"]).double()
    tokens = torch.tensor([[65, 66, 67, 10, 68, 10, 69]])
    model.fields = five.packed_fields(tokens[None], "cpu")
    packed = model(tokens)
    model.fields = None
    alone = torch.cat([model(document) for document in tokens.split([4, 2, 1], 1)])
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)
    assert (packed - model(tokens)).abs().max() > 1e-3


def test_eight_ranks_train_as_one_device():
    sizes = "--steps 2 --batch-size 4 --microbatches 1 --sequence-length 8"
    grid = "--replicate 2 --cp 2 --tp 2 --ep 4"

    done = fork(ROOT / "parallel_5d.py", *sizes.split(), *grid.split(), ranks=8)

    assert done.returncode == 0, done.stderr
    pattern = r"^vs 1 device loss, gradient norm and parameters equal within 1e-09: \de-1[2-9]$"
    assert re.search(pattern, done.stdout, re.MULTILINE), done.stdout


@pool.on(4)
def test_no_rank_steps_if_one_gradient_is_not_finite():
    trainer = make_trainer(make_args(cp=2, tp=2))
    before = [shard.detach().clone() for shard in trainer.parameters]
    factor = math.nan if pool.rank() == 3 else 1.0
    trainer.pipeline.loss_fn = lambda logits, targets: factor * logits.sum()

    _, norm = trainer.step(*make_batch(trainer.args, 0))

    assert not math.isfinite(norm)
    assert all(map(torch.equal, trainer.parameters, before))


# ---- checkpoints


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ({"cp": 2, "tp": 2, "ep": 2}, {"pp": 2, "ep": 2}),
        ({"pp": 2, "replicate": 2}, {"tp": 4, "ep": 4}),
        ({"tp": 2, "ep": 4, "optimizer": "muon"}, {"pp": 2, "cp": 2, "optimizer": "muon"}),
    ],
    ids=["to a pipeline", "to four tp ranks", "muon"],
)
@pool.on(4)
def test_a_checkpoint_loads_on_another_grid(saved, loaded, tmp_path):
    batches = [make_batch(make_args(), number) for number in range(3)]
    first = make_trainer(make_args(**saved))
    for batch in batches[:2]:
        first.step(*batch)
    five.save(first, tmp_path)
    second = make_trainer(make_args(seed=1, **loaded))

    five.load(second, tmp_path)
    second.step(*batches[2])

    args = make_args(optimizer=loaded.get("optimizer"))
    config = five.MODELS[args.model]
    *_, (_, _, plain) = five.train_on_one_device(config, args, batches, "cpu", torch.float64)
    assert second.steps == 3
    assert five.largest_difference(second, plain) < 1e-12
    names = {f"weight/{name}" for name in plain.state_dict()}
    assert names <= set(checkpoint.load_whole(tmp_path))


@pool.on(4)
def test_a_checkpoint_of_a_run_that_computes_something_else_is_refused_by_name(tmp_path):
    """One device would compute other losses, and the run would end in "NOT equal"."""
    five.save(make_trainer(make_args()), tmp_path)
    five.check_same_run(make_args(cp=2, schedule="gpipe"), tmp_path)
    changes = {"seed": 1, "batch_size": 4, "microbatches": 1, "sequence_length": 8}
    changes |= {
        "optimizer": "muon",
        "lr": 0.1,
        "clip_grad": 1.0,
        "aux_weight": 0.0,
        "model": "llama-tiny",
    }
    for name, value in changes.items():
        flag = name.replace("_", "-")
        with pytest.raises(ValueError, match=f"--{flag} {value}: the run in .* has"):
            five.check_same_run(make_args(**{name: value}), tmp_path)


def test_a_run_killed_while_it_saves_in_the_background_goes_on(tmp_path):
    """It is killed before the files of step 2 are renamed, so it goes on from step 1."""
    flags = f"--tp 2 --ep 2 --save {tmp_path}/saved --save-background --steps 3"
    flags += " --batch-size 4 --sequence-length 8"
    text = (ROOT / "parallel_5d.py").read_text()
    dies = """if number == 1:
                checkpoint.unfinished.popitem()[1].wait()
                checkpoint.sync = lambda *_: os._exit(9)
            batch = session.batch("""
    (tmp_path / "dies.py").write_text(text.replace("batch = session.batch(", dies, 1))

    killed = fork(tmp_path / "dies.py", *flags.split(), ranks=2)
    done = fork(ROOT / "parallel_5d.py", *flags.split(), f"--load={tmp_path}/saved", ranks=2)

    assert killed.returncode == 9
    assert done.returncode == 0, done.stderr
    assert f"loaded      {tmp_path}/saved after step 1" in done.stdout


def test_a_killed_run_goes_on_from_its_last_step(tmp_path):
    flags = f"--tp 2 --ep 2 --save {tmp_path}/saved --metrics {tmp_path}/metrics --steps 3"
    flags += " --batch-size 4 --sequence-length 8"
    text = (ROOT / "parallel_5d.py").read_text()
    dies = "if trainer.steps == 2:\n                os._exit(9)\n            batch = session.batch("
    (tmp_path / "dies.py").write_text(text.replace("batch = session.batch(", dies, 1))

    killed = fork(tmp_path / "dies.py", *flags.split(), ranks=2)
    done = fork(ROOT / "parallel_5d.py", *flags.split(), f"--load={tmp_path}/saved", ranks=2)

    assert killed.returncode == 9
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "metrics").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert metrics[0].keys() == {"step", "loss", "grad_norm"}


# ---- the command line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"cp": 2, "sequence_length": 6}, "4, .* --sequence-length 6"),
        ({"batch_size": 6}, "--microbatches 2 .* --batch-size 6"),
        ({"pp": 2, "stages_per_rank": 3}, "6 stages.* 4 blocks"),
        ({"model": "llama-tiny", "ep": 2}, "no experts"),
    ],
    ids=str,
)
def test_a_grid_that_does_not_fit_is_refused(flags, words):
    args = make_args(**flags)
    with pytest.raises(ValueError, match=words):
        five.check_arguments(args, five.MODELS[args.model], 2)


# ---- what a rank sends


@pytest.mark.parametrize(
    "grid",
    [
        {"pp": 2, "tp": 2, "ep": 2, "model": "deepseek-tiny"},
        {"cp": 2, "tp": 2, "recompute": True},
        {"tp": 4, "model": "llama-tiny", "fused_loss": True},
    ],
    ids=["pp tp", "cp tp, recomputed", "tp, fused loss"],
)
@pool.on(4)
def test_bytes_sent_along_each_axis_equal_the_formula(grid):
    args = make_args(**grid)
    trainer = make_trainer(args)
    trainer.step(*make_batch(args, 0))  # the first step also tells shapes

    with five.SentByAxis(trainer.grid) as sent:
        trainer.step(*make_batch(args, 1))

    for axis, size in five.sent_by_formula(trainer).items():
        assert sent.by_axis[axis] == pytest.approx(size, rel=0.01), axis


def test_bytes_sent_on_1024_ranks_equal_the_formula():
    """A fake process group moves no data, so the pipeline is left out."""
    with fake_world(2, 0):
        received = torch.zeros(2)
        dist.all_to_all_single(received, torch.ones(2))
    if not received.all():
        pytest.skip("the fake group of this torch leaves the output of an all-to-all as it was")
    with fake_world(1024, 341):
        args = make_args(replicate=2, cp=2, tp=4, ep=4, batch_size=256)
        trainer = make_trainer(args)
        with five.SentByAxis(trainer.grid) as sent:
            trainer.step(*make_batch(args, 0))

        for axis, size in five.sent_by_formula(trainer).items():
            # FSDP pads the shards, and on 128 ranks a norm has none for some of them.
            assert sent.by_axis[axis] == pytest.approx(size, rel=0.05), axis


# ---- transformers


def build_transformers_model(name, config):
    import transformers

    sizes = {
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "vocab_size": config.vocab,
        "rms_norm_eps": config.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.theta},
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    if name == "llama-tiny":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    experts = {"num_local_experts": config.experts, "num_experts_per_tok": config.top_k}
    config = transformers.MixtralConfig(**sizes, **experts, experts_implementation="eager")
    return transformers.MixtralForCausalLM(config)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
@pytest.mark.parametrize("name", ["llama-tiny", "mixtral-tiny"])
def test_the_model_is_that_of_transformers(name, monkeypatch):
    """Logits and gradients, in float64. Their casts to float32 are patched away."""
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "to", with_float64_instead(torch.Tensor.to))
    monkeypatch.setattr(torch.nn.functional, "softmax", softmax_without_a_cast)
    config = five.MODELS[name]
    ours = five.plain_model(config).double()
    theirs = build_transformers_model(name, config).double()
    theirs.load_state_dict(five.to_transformers(ours.state_dict(), config))
    head_dim = config.hidden // config.heads
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    theirs.model.rotary_emb.inv_freq = config.theta**-exponents  # they round it to float32
    tokens = make_batch(make_args(), 0)[0]

    found = ours(tokens).transpose(0, 1)
    expected = theirs(tokens, use_cache=False).logits
    found.square().mean().backward()
    expected.square().mean().backward()

    assert (found - expected).abs().max() < 1e-12
    gradients = {key: parameter.grad for key, parameter in ours.named_parameters()}
    gradients = five.to_transformers(gradients, config)
    for key, parameter in theirs.named_parameters():
        assert (gradients[key] - parameter.grad).abs().max() < 1e-12, key


def with_float64_instead(to):
    def changed(tensor, *args, **options):
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        if options.get("dtype") is torch.float32:
            options["dtype"] = torch.float64
        return to(tensor, *args, **options)

    return changed


def softmax_without_a_cast(x, dim=None, **_):
    return x.softmax(dim)


@pytest.mark.parametrize("name", five.MODELS)
def test_names_of_transformers_and_back(name):
    config = five.MODELS[name]
    state_dict = five.plain_model(config).state_dict()

    back = five.from_transformers(five.to_transformers(state_dict, config), config)

    assert list(back) == list(state_dict)
    for key, tensor in state_dict.items():
        assert torch.equal(back[key], tensor), key

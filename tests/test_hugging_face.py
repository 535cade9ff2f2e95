"""Every line of code in docs/hugging_face.md, on small models with random weights."""

import re
import tempfile
from contextlib import contextmanager
from functools import partial

import claims
import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import ROOT, TORCHRUN, launch

import context_parallel
import ddp
import expert_parallel
import flash_attention
import fsdp
import tensor_parallel
import zero

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.cpu

PAGE = (ROOT / "docs" / "hugging_face.md").read_text()
SECTIONS = {text.split("**")[0]: text for text in PAGE.split("\n**")[1:]}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
QWEN3 = {"head_dim": 8}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
OPTIMIZERS = {"Zero1": zero.Zero1, "Zero2": zero.Zero2, "Zero3": zero.Zero3}
METHODS = ["ddp", *OPTIMIZERS, "fsdp", "tensor_parallel"]
sgd = partial(torch.optim.SGD, lr=0.1)
near = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
bitwise = partial(torch.testing.assert_close, rtol=0, atol=0)


def make_model(name="Llama", **options):
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name}ForCausalLM")
    config = model_class.config_class(**SIZES, **options)
    return model_class(config).train()


def make_batch(seed):
    """Return tokens and labels, which are shifted."""
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randint(3, 64, (2, 17), generator=generator)
    return texts[:, :-1], texts[:, 1:]


def loss_of(model, tokens, labels):
    logits = model(tokens).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train_on_one_device(model, seeds_of_steps):
    """In each step add up the gradients of the batches with these seeds, and take the mean."""
    optimizer = sgd(model.parameters())
    for seeds in seeds_of_steps:
        optimizer.zero_grad()
        for seed in seeds:
            loss = loss_of(model, *make_batch(seed))
            loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(seeds)
        optimizer.step()
    return model


def train(model, optimizer, steps, after_backward=lambda: None):
    """With this rank's batch, the same in each step."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, *make_batch(pool.rank()))
        loss.backward()
        after_backward()
        optimizer.step()


def code(section):
    """Return the section's block of code."""
    (block,) = re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)
    return block


def inline(section, function):
    """Return the section's calls of this function, which are in its text."""
    return re.findall(rf"`([^`]*{function}\([^`]*)`", SECTIONS[section])


@contextmanager
def names_for(model, **more):
    """What the page's code may use. The default group is that of the body's ranks."""
    names = {"transformers": transformers, "torch": torch, "F": F, "dist": dist, "partial": partial}
    names["fsdp"] = fsdp
    names["expert_parallel"] = expert_parallel
    names["tensor_parallel"] = tensor_parallel
    names["AttentionInterface"] = transformers.AttentionInterface
    names["AttentionMaskInterface"] = transformers.AttentionMaskInterface
    names["flash_attention"] = flash_attention.flash_attention
    names["ring_attention"] = context_parallel.ring_attention
    names["positions"] = context_parallel.positions
    names["vocab_parallel_cross_entropy"] = tensor_parallel.vocab_parallel_cross_entropy
    names["model"] = model
    names["config"] = getattr(model, "config", None)
    with claims.default_group(pool.group()):
        yield names | more


def shard_by_the_page(names):
    for call in inline("FSDP", "fsdp.fully_shard"):
        exec(call, names)


def parallelize_by_the_page(names):
    lines = code("Tensor parallelism").splitlines()
    is_qwen3 = names["config"].model_type == "qwen3"
    exec("\n".join(line for line in lines if is_qwen3 or "only Qwen3" not in line), names)
    return lines[-1]  # computes the loss


# ---- what works without a change


def generate(model, tokens):
    """Rank 0 stops after one token."""
    first = model.generate(tokens, max_new_tokens=1)[0, -1].item()
    end = {0: first}.get(pool.rank())
    model.generate(tokens[:1], max_new_tokens=4, eos_token_id=end, synced_gpus=True)


@pool.on(2)
@pytest.mark.parametrize("method", ["ddp", *OPTIMIZERS])
def test_options_of_transformers_without_a_change(method):
    model = make_model()
    plain = make_model()
    for each in (model, plain):
        each.model.embed_tokens.requires_grad_(False)
        each.gradient_checkpointing_enable()
    with names_for(model) as names:
        compute_loss = prepare(method, names)
        for _ in range(2):
            names["optimizer"].zero_grad()
            loss = compute_loss(names["model"], *make_batch(pool.rank()))
            loss.backward()
            names["optimizer"].step()
            generate(model, make_batch(pool.rank())[0])
        found = eval(expression(method, "state_dict"), names)

    train_on_one_device(plain, [[0, 1]] * 2)
    bitwise(dict(found), dict(plain.state_dict()))


# ---- the sections


@pool.on(2)
def test_fsdp_with_a_unit_per_block_is_bitwise_equal_and_returns_caches():
    model = make_model()
    with names_for(model) as names:
        shard_by_the_page(names)
        train(model, sgd(model.parameters()), steps=2)
        found = fsdp.full_state_dict(model)
        cache = model(make_batch(0)[0]).past_key_values
    plain = train_on_one_device(make_model(), [[0, 1]] * 2)

    assert cache.get_seq_length() == 16
    assert all(hasattr(block, "_fsdp_unit") for block in model.model.layers)
    bitwise(found, dict(plain.state_dict()))


@pool.on(2)
def test_ring_attention_in_a_model():
    plain = make_model("Qwen3")
    tokens, labels = make_batch(0)
    loss_of(plain, tokens, labels).backward()
    model = make_model("Qwen3")
    with names_for(model, tokens=tokens, labels=labels, length=16) as names:
        exec(code("Attention"), names)
        own_labels = labels[:, names["here"]]  # as the page says
        loss = F.cross_entropy(names["logits"].flatten(0, 1), own_labels.flatten())
        loss.backward()
        ddp.all_reduce_gradients(model)
    for found, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        near(found.grad, parameter.grad)


@pool.on(1)
def test_flash_attention_in_a_model():
    tokens, labels = make_batch(0)
    model = make_model()
    expected = model(tokens).logits
    with names_for(model, tokens=tokens, labels=labels, length=16) as names:
        exec(code("Attention"), names)
    model.set_attn_implementation("tiles")

    near(model(tokens, attention_mask=torch.ones_like(tokens)).logits, expected)
    near(model(tokens[:, :-1]).logits, expected[:, :-1])
    with pytest.raises(ValueError, match="padding"):
        model(tokens, attention_mask=(tokens != tokens[0, 0]).long())


@pool.on(1)
@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("Gemma2", {"head_dim": 8, "sliding_window": 4}, "sliding_window"),
        ("Gemma2", {"head_dim": 8}, "softcap"),
        ("Llama", {"attention_dropout": 0.1}, "dropout"),
    ],
    ids=["sliding window", "softcap", "dropout"],
)
def test_attention_that_is_not_supported_raises(name, options, word):
    tokens, labels = make_batch(0)
    with names_for(make_model(), tokens=tokens, labels=labels, length=16) as names:
        exec(code("Attention"), names)
    model = make_model(name, **options)
    model.set_attn_implementation("tiles")

    with pytest.raises(ValueError, match=word):
        model(tokens)


@pool.on(2)
def test_experts_in_place_of_mixtrals_block():
    plain = train_on_one_device(make_model("Mixtral", **MIXTRAL), [[0, 1]] * 2)
    model = make_model("Mixtral", **MIXTRAL)
    with names_for(model) as names:
        exec(code("Experts"), names)
        exec(inline("Experts", "expert_parallel.parallelize")[0], names)
        (average,) = inline("Experts", "expert_parallel.average_gradients")
        train(model, sgd(model.parameters()), 2, lambda: exec(average, names))
        found = expert_parallel.full_state_dict(model)

    held = sum(parameter.numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in plain.parameters())
    assert held < whole
    near(dict(found), dict(plain.state_dict()))


@pool.on(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Qwen2", {}),
        ("Qwen3", QWEN3),
    ],
    ids=["Llama", "tied Llama", "Qwen2", "Qwen3"],
)
def test_tensor_parallel_plan(name, options):
    model = make_model(name, **options)
    tokens, labels = make_batch(0)
    with names_for(model, tokens=tokens, labels=labels) as names:
        compute_loss = parallelize_by_the_page(names)
        optimizer = sgd(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            exec(compute_loss, names)
            names["loss"].backward()
            optimizer.step()
        found = tensor_parallel.full_state_dict(model)

    plain = train_on_one_device(make_model(name, **options), [[0]] * 3)
    near(found, dict(plain.state_dict()))


# ---- saving, and the average


@contextmanager
def shared_folder():
    """A temporary folder, the same on all ranks of the default group."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        yield folders[0]
        dist.barrier()  # before rank 0 removes it


def expression(method, after):
    """Return the code of the page for this method, after this text."""
    text = SECTIONS["Saving, and a moving average"].split("```")[0].split(f"`{after}`")[1]
    for found, methods in re.findall(r"`([^`]+)` \(([^)]+)\)", text):
        if method in methods.split(", "):
            return found
    raise AssertionError(f"the page has no {after} for {method}")


def prepare(method, names):
    """Split names["model"] by this method. Make the optimizer, and what returns the loss."""
    model = names["model"]
    names["full_state_dict"] = fsdp.full_state_dict
    loss = loss_of
    if method in OPTIMIZERS:
        names["optimizer"] = OPTIMIZERS[method](model, torch.optim.SGD, lr=0.1)
        return loss
    if method == "ddp":
        names["model"] = ddp.DistributedDataParallel(model)
    elif method == "fsdp":
        shard_by_the_page(names)
    else:
        names["tokens"], names["labels"] = make_batch(0)
        parallelize_by_the_page(names)
        names["full_state_dict"] = tensor_parallel.full_state_dict

        def loss(model, tokens, labels):
            return names["vocab_parallel_cross_entropy"](model(tokens).logits, labels).mean()

    names["optimizer"] = sgd(names["model"].parameters())
    return loss


def train_and_save_by_the_page(method, names, folder):
    """Train for 4 steps, and save the average of 3 in the folder. Return the whole state dict."""
    text = code("Saving, and a moving average").strip()
    average, update, exchange, sync, save = re.split(r"\n(?=\S)", text)
    if method in OPTIMIZERS:
        exchange += f"\n{sync}"
    names["plain"] = names["model"]
    compute_loss = prepare(method, names)
    names["weights"] = eval(expression(method, "weights"), names)
    exec(average, names)
    rank = 0 if method == "tensor_parallel" else pool.rank()
    for step in range(4):
        names["optimizer"].zero_grad()
        loss = compute_loss(names["model"], *make_batch(rank))
        loss.backward()
        names["optimizer"].step()
        exec(update.replace("0.001", "0.25"), names)
        if step == 2:
            exec(exchange, names)
            names["state_dict"] = eval(expression(method, "state_dict"), names)
            save = save.replace('"trained"', repr(folder))
            exec(save, names | {"model": names["plain"]})
            exec(exchange, names)
    dist.barrier()
    return eval(expression(method, "state_dict"), names)


@pool.on(2)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_saved_is_the_average_and_training_goes_on(method, tied):
    model = make_model(tie_word_embeddings=tied)
    with names_for(model) as names, shared_folder() as folder:
        whole = train_and_save_by_the_page(method, names, folder)
        saved = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()

    seeds = range(1 if method == "tensor_parallel" else pool.world_size())
    plain = make_model(tie_word_embeddings=tied)
    average = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    for _ in range(3):
        train_on_one_device(plain, [seeds])
        for name, tensor in plain.state_dict().items():
            average[name].lerp_(tensor, 0.25)
    near(dict(saved), average)
    train_on_one_device(plain, [seeds])
    near(dict(whole), dict(plain.state_dict()))


# ---- the page and the script


def test_all_code_of_the_page_runs_here():
    with_code = {name for name, text in SECTIONS.items() if "```python" in text}
    tested = {"Attention", "Experts", "Tensor parallelism", "Saving, and a moving average"}
    assert with_code == tested


def cells(text, name):
    """Return the cells of the row that has this name."""
    lines = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    (row,) = (row for row in rows if name in row[0].split(", "))
    return row


def test_the_script_prints_the_rows_of_the_page(tmp_path):
    script = [ROOT / "docs" / "architectures.py", "Qwen3", "GPT-2", "ViT"]

    done = launch([*TORCHRUN, "--nproc-per-node", "2", *script], tmp_path)

    assert done.returncode == 0, done.stderr
    assert cells(done.stdout, "") == cells(PAGE, "")  # the heads of the columns
    assert cells(done.stdout, "ViT")[1:] == cells(PAGE, "ViT")[1:]
    assert cells(done.stdout, "ViT")[0] == "GPT-2, ViT"  # with equal results
    *found, difference = cells(done.stdout, "Qwen3")
    assert found == cells(PAGE, "Qwen3")[:-1]
    assert 0 < float(difference) < 1e-6

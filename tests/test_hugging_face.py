"""Every line of code in docs/hugging_face.md, on small models with random weights."""

import re
import runpy
import tempfile
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from unittest.mock import Mock

import claims
import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import ROOT

import ddp
import expert_parallel
import fsdp
import tensor_parallel
import zero

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.cpu

PAGE = (ROOT / "docs" / "hugging_face.md").read_text()
SECTIONS = {text.split("**")[0]: text for text in PAGE.split("\n**")[1:]}
# What the code of the page takes as imported.
IMPORTS = """
from functools import partial
import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface
import expert_parallel
import fsdp
import tensor_parallel
import torch.nn.functional as F
from context_parallel import join_sequence, positions, ring_attention
from flash_attention import flash_attention
from tensor_parallel import full_state_dict, vocab_parallel_cross_entropy
"""
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
OPTIMIZERS = {"Zero1": zero.Zero1, "Zero2": zero.Zero2, "Zero3": zero.Zero3}
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


def train_on_one_device(model, steps, seeds=(0, 1)):
    """In each step take the mean of the batches with these seeds. Return the state dict."""
    optimizer = sgd(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        for seed in seeds:
            loss = loss_of(model, *make_batch(seed)) / len(seeds)
            loss.backward()
        optimizer.step()
    return dict(model.state_dict())


def code(section):
    """Return the section's block of code."""
    (block,) = re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)
    return block


def inline(section, function):
    """Return the section's calls of this function, which are in its text."""
    return re.findall(rf"`([^`]*{function}\([^`]*)`", SECTIONS[section])


@contextmanager
def names_for(model, seed=None, **more):
    """What the page's code may use. The default group is that of the body's ranks."""
    names = {"model": model, "config": model.config, "length": 16, **more}
    names.setdefault("position_ids", torch.arange(16)[None])
    names["tokens"], names["labels"] = make_batch(pool.rank() if seed is None else seed)
    exec(IMPORTS, names)
    with claims.default_group(pool.group()):
        yield names


def parallelize_by_the_page(names):
    """Return the line that computes the loss."""
    lines = code("Tensor parallelism").splitlines()
    is_qwen3 = names["config"].model_type == "qwen3"
    exec("\n".join(line for line in lines if is_qwen3 or "only Qwen3" not in line), names)
    return lines[-1]


def prepare(method, names):
    """Split names["model"] by this method, and make the optimizer. Return what trains a step."""
    model = names["model"]
    compute_loss = "loss = loss_of(model, tokens, labels)"
    names["loss_of"] = loss_of
    if method in OPTIMIZERS:
        names["optimizer"] = OPTIMIZERS[method](model, torch.optim.SGD, lr=0.1)
    elif method == "ddp":
        names["model"] = ddp.DistributedDataParallel(model)
    elif method == "fsdp":
        names["full_state_dict"] = fsdp.full_state_dict
        for call in inline("FSDP", "fsdp.fully_shard"):
            exec(call, names)
    else:
        compute_loss = parallelize_by_the_page(names)
    names.setdefault("optimizer", sgd(names["model"].parameters()))

    def step():
        names["optimizer"].zero_grad()
        exec(compute_loss, names)
        names["loss"].backward()
        names["optimizer"].step()

    return step


def evaluate(method, after, names):
    """Return the value of the page's code for this method, which follows this text."""
    text = SECTIONS["Saving, and a moving average"].split("```")[0].split(f"`{after}`")[1]
    for found, methods in re.findall(r"`([^`]+)` \(([^)]+)\)", text):
        if method in methods.split(", "):
            return eval(found, names)
    raise AssertionError(f"the page has no {after} for {method}")


@pool.on(2)
@pytest.mark.parametrize("method", ["ddp", *OPTIMIZERS, "fsdp"])
def test_a_model_trains_and_generates_without_a_change(method):
    """With a frozen layer and checkpoints. Rank 0 stops generating after one token."""
    model = make_model()
    plain = make_model()
    for each in (model, plain):
        each.model.embed_tokens.requires_grad_(False)
        each.gradient_checkpointing_enable()
    with names_for(model) as names:
        step = prepare(method, names)
        for _ in range(2):
            step()
            tokens = names["tokens"][:1]
            first = model.generate(tokens, max_new_tokens=1)[0, -1].item()
            end = None if pool.rank() else first
            model.generate(tokens, max_new_tokens=4, eos_token_id=end, synced_gpus=True)
        found = evaluate(method, "state_dict", names)
        cache = model.eval()(tokens).past_key_values
    assert cache.get_seq_length() == 16
    bitwise(dict(found), train_on_one_device(plain, 2))


@pool.on(2)
def test_ring_attention_in_a_model():
    plain = make_model("Qwen3")
    tokens, labels = make_batch(0)
    loss_of(plain, tokens, labels).backward()
    model = make_model("Qwen3")
    with names_for(model, seed=0) as names:
        exec(code("Attention"), names)
        own_labels = labels[:, names["here"]]  # as the page says
        loss = F.cross_entropy(names["logits"].flatten(0, 1), own_labels.flatten())
        loss.backward()
        ddp.all_reduce_gradients(model)
    for found, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        near(found.grad, parameter.grad)


TEXTS = [[5, 3, 8], [10, 1, 5]]  # lengths of the texts that are packed into two sequences


def logits_of_each_text(model, tokens):
    rows = []
    for row, lengths in zip(tokens, TEXTS, strict=True):
        texts = row[None].split(lengths, 1)
        rows.append(torch.cat([model(text).logits for text in texts], 1))
    return torch.cat(rows)


@pool.on(2)
@pytest.mark.parametrize("name", ["tiles", "ring"])
def test_a_packed_text_is_computed_as_alone(name):
    """With the positions of transformers' packing collator."""
    plain = make_model()
    model = make_model()
    tokens, labels = make_batch(0)
    rows = [torch.cat([torch.arange(length) for length in lengths]) for lengths in TEXTS]
    expected = logits_of_each_text(plain, tokens)
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    with names_for(model, seed=0, position_ids=torch.stack(rows)) as names:
        exec(code("Attention"), names)
        here = names["here"]
        if name == "tiles":
            here = torch.arange(16)
            model.set_attn_implementation("tiles")
            names["logits"] = model(tokens, position_ids=names["position_ids"]).logits
        F.cross_entropy(names["logits"].flatten(0, 1), labels[:, here].flatten()).backward()
        ddp.all_reduce_gradients(model)
    near(names["logits"], expected[:, here])
    for found, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        near(found.grad, parameter.grad)


@pool.on(1)
def test_flash_attention_in_a_model():
    """What it does not support is an error."""
    model = make_model()
    dropout = make_model(attention_dropout=0.1)
    windows = make_model("Gemma2", head_dim=8, sliding_window=4)
    with names_for(model) as names:
        tokens = names["tokens"]
        expected = model(tokens).logits
        exec(code("Attention"), names)
    for each in (model, dropout, windows):
        each.set_attn_implementation("tiles")
    near(model(tokens, attention_mask=torch.ones_like(tokens)).logits, expected)
    padding = (tokens != tokens[0, 0]).long()
    wrong = [(model, padding, "padding"), (dropout, None, "dropout")]
    for each, mask, word in [*wrong, (windows, None, "sliding_window")]:
        with pytest.raises(ValueError, match=word):
            each(tokens, attention_mask=mask)


@pool.on(2)
def test_experts_in_place_of_mixtrals_block():
    plain = make_model("Mixtral", **MIXTRAL)
    model = make_model("Mixtral", **MIXTRAL)
    with names_for(model) as names:
        exec(code("Experts"), names)
        exec(inline("Experts", "expert_parallel.parallelize")[0], names)
        loss_of(model, names["tokens"], names["labels"]).backward()
        exec(inline("Experts", "expert_parallel.average_gradients")[0], names)
        sgd(model.parameters()).step()
        found = expert_parallel.full_state_dict(model)
    held = sum(parameter.numel() for parameter in model.parameters())
    assert held < sum(parameter.numel() for parameter in plain.parameters())
    near(dict(found), train_on_one_device(plain, 1))


@pool.on(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [("Qwen2", {"tie_word_embeddings": True}), ("Qwen3", {"head_dim": 8})],
    ids=["tied Qwen2", "Qwen3"],
)
def test_tensor_parallel_plan(name, options):
    model = make_model(name, **options)
    with names_for(model, seed=0) as names:
        step = prepare("tensor_parallel", names)
        for _ in range(3):
            step()
        found = tensor_parallel.full_state_dict(model)
    expected = train_on_one_device(make_model(name, **options), 3, seeds=[0])
    near(found, expected)


@contextmanager
def shared_folder():
    """A temporary folder, the same on all ranks of the default group."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        yield folders[0]
        dist.barrier()  # before rank 0 removes it


def train_and_save_by_the_page(method, names, folder):
    """Train for 4 steps, and save the average of 3 in the folder. Return the whole state dict."""
    text = code("Saving, and a moving average").strip()
    average, update, exchange, sync, save = re.split(r"\n(?=\S)", text)
    if method in OPTIMIZERS:
        exchange += f"\n{sync}"
    plain = names["model"]
    step = prepare(method, names)
    names["weights"] = evaluate(method, "weights", names)
    exec(average, names)
    for number in range(4):
        step()
        exec(update.replace("0.001", "0.25"), names)
        if number == 2:
            exec(exchange, names)
            names["state_dict"] = evaluate(method, "state_dict", names)
            exec(save.replace('"trained"', repr(folder)), names | {"model": plain})
            exec(exchange, names)
    dist.barrier()
    return evaluate(method, "state_dict", names)


@pool.on(2)
@pytest.mark.parametrize("method", ["ddp", *OPTIMIZERS, "fsdp", "tensor_parallel"])
def test_what_is_saved_is_the_average_and_training_goes_on(method):
    """With tied weights."""
    seeds = [0] if method == "tensor_parallel" else [0, 1]
    model = make_model(tie_word_embeddings=True)
    with names_for(model, seed=seeds[-1] * pool.rank()) as names, shared_folder() as folder:
        whole = train_and_save_by_the_page(method, names, folder)
        saved = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()

    plain = make_model(tie_word_embeddings=True)
    average = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    for _ in range(3):
        for name, tensor in train_on_one_device(plain, 1, seeds).items():
            average[name].lerp_(tensor, 0.25)
    near(dict(saved), average)
    near(dict(whole), train_on_one_device(plain, 1, seeds))


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


@pool.on(2)
def test_the_script_prints_the_rows_of_the_page():
    path = ROOT / "tests" / "architectures.py"
    with pytest.MonkeyPatch.context() as patch, claims.default_group(pool.group()):
        patch.setattr("sys.argv", ["architectures.py", "Qwen3", "GPT-2", "ViT"])
        patch.setattr("os.environ", {})
        patch.setattr(dist, "init_process_group", Mock())  # the workers are connected
        patch.setattr(dist, "destroy_process_group", Mock())
        with redirect_stdout(StringIO()) as printed:
            runpy.run_path(path, run_name="__main__")
    if pool.rank() == 0:
        table = printed.getvalue()
        assert cells(table, "") == cells(PAGE, "")  # the heads of the columns
        assert cells(table, "ViT")[1:] == cells(PAGE, "ViT")[1:]
        assert cells(table, "ViT")[0] == "GPT-2, ViT"  # with equal results
        *found, difference = cells(table, "Qwen3")
        assert found == cells(PAGE, "Qwen3")[:-1]
        assert 0 < float(difference) < 1e-6

"""Mistakes in adapters, and the claim that catches each."""

import torch.nn as nn

import lora


def starts_changed(model, r, lora_alpha, target_modules):
    """Draws B at random, as A."""
    model = lora.inject_lora(model, r, lora_alpha, target_modules=target_modules)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def trains_the_base_too(model, **options):
    return lora.inject_lora(model, **options).requires_grad_()


def forgets_alpha_over_r(model, r, lora_alpha, target_modules):
    return lora.inject_lora(model, r, lora_alpha=r, target_modules=target_modules)


MISTAKES = {
    "lora": {
        "starts_changed": "unchanged_at_first",
        "trains_the_base_too": "base_stays",
        "forgets_alpha_over_r": "dense_equivalent",
    },
}
CAUSES = {"lora": {"forgets_alpha_over_r": "alpha_over_r_forgotten"}}

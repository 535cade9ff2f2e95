"""loralib==0.1.2: its Linear in the place of PyTorch's."""

import loralib


def lora(model, r, lora_alpha, target_modules):
    for name in target_modules:
        linear = model.get_submodule(name)
        sizes = (linear.in_features, linear.out_features)
        layer = loralib.Linear(*sizes, r, lora_alpha, bias=linear.bias is not None)
        layer.load_state_dict(linear.state_dict(), strict=False)
        model.set_submodule(name, layer)
    loralib.mark_only_lora_as_trainable(model)
    return model

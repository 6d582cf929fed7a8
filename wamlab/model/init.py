"""How parameters start that no checkpoint brings."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def init_dit(dit: nn.Module, *, silent_image: bool = False) -> None:
    """Fill every parameter of a WorldActionDiT in place, sharded or not, as a fresh public model.

    Args:
        dit: the network, its memory allocated.
        silent_image: zero the values of the image branch; a public cold start draws them at random,
            and random features enter every cross-attention from step 0.
    """
    for name, parameter in dit.named_parameters():
        init_parameter(name, parameter)
        if silent_image and "v_img" in name:
            parameter.zero_()
    bound = dit.patch_embedding.weight[0].numel() ** -0.5
    dit.patch_embedding.bias.uniform_(-bound, bound)


@torch.no_grad()
def init_parameter(name: str, parameter: Tensor) -> None:
    """Fill one parameter by its public name.

    Linear weights are Xavier-uniform and biases 0; the embeddings of text and time and the maps of
    actions and states are small normals; the head starts at 0; modulations have standard deviation
    D^-0.5; norms start as the identity.
    """
    if ".norm" in name or name.startswith(("img_emb.proj.0", "img_emb.proj.4")):
        parameter.fill_(float(name.endswith("weight")))
    elif name.endswith("modulation"):
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    elif name == "head.head.weight" or name.endswith((".bias", ".b")):
        parameter.zero_()
    elif name.startswith(("text_embedding", "time_embedding")) or name.endswith(".W"):
        parameter.normal_(std=0.02)
    else:
        bound = (6 / (parameter[0].numel() + len(parameter))) ** 0.5
        parameter.uniform_(-bound, bound)

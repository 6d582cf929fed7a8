"""Solutions of the exercises of notebook 01."""

import torch


def rmsnorm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def mask(kind, block):
    q_kind, k_kind = kind[:, None], kind[None, :]
    q_block, k_block = block[:, None], block[None, :]
    same, clean = q_block == k_block, k_kind == 0
    of_clean = (q_kind == 0) & clean & (k_block <= q_block)
    lone = (q_kind == 1) & (q_block == 0) & (k_kind == 1) & same
    moving = ((q_kind == 1) | (q_kind == 2)) & (q_block > 0)
    of_moving = moving & ((clean & (k_block < q_block)) | (~clean & same))
    of_state = (q_kind == 3) & (k_kind == 3) & same
    return of_clean | lone | of_moving | of_state


def velocity_target(clean, noise, sigma):
    s = sigma[..., None]
    return (1 - s) * clean + s * noise, noise - clean


SOLUTIONS = {"rmsnorm": rmsnorm, "mask": mask, "velocity_target": velocity_target}

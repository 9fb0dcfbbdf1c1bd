"""Names in `torch.nn.functional`."""

from __future__ import annotations

import torch.nn.functional

MODULE = torch.nn.functional

FP16_FUNCS = [
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc", "linear",
]  # fmt: skip

FP32_FUNCS = [
    # resampling
    "interpolate", "grid_sample",
    # pointwise, with exponentials inside
    "softplus", "softmin", "log_softmax", "softmax", "gelu",
    # norms
    "layer_norm", "group_norm", "local_response_norm", "normalize", "cosine_similarity",
    # losses
    "poisson_nll_loss", "cosine_embedding_loss", "cross_entropy", "hinge_embedding_loss", "kl_div", "l1_loss",
    "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "multi_margin_loss",
    "nll_loss", "binary_cross_entropy_with_logits", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss",
    "ctc_loss",
]  # fmt: skip

BANNED_FUNCS = [
    (
        "binary_cross_entropy",
        "binary_cross_entropy of fp16 numbers is banned: the logarithm of a sigmoid's output overflows where that "
        "rounds to 0 or 1.\n"
        "Give the logits themselves to torch.nn.functional.binary_cross_entropy_with_logits, or use "
        "torch.nn.BCEWithLogitsLoss, which O1 runs in float32.\n"
        "If the model has to end in a sigmoid, have that computed in float32, before amp.initialize():\n"
        "    amp.register_float_function(torch, 'sigmoid')\n"
        "and see to it that what comes between the sigmoid and the loss keeps float32.\n"
        "amp.init(allow_banned=True) lifts the ban: the loss is then computed in float32 from what it is given.",
    )
]
"""(name, what is said to who calls it with a 16-bit argument)."""

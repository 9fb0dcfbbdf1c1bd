"""A call for each operator whose rule preamp changes on the CPU: {name: function from a maker to arguments}."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Args = tuple[tuple[Any, ...], dict[str, Any]]


class Maker:
    """Makes the float tensors of a call, in one dtype or in several by turns; the same values each time."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        self._dtypes = dtypes
        self._made = 0
        self._generator = torch.Generator().manual_seed(7)

    def __call__(self, *shape: int) -> Tensor:
        return self._next(torch.randn(shape, generator=self._generator))

    def positive(self, *shape: int) -> Tensor:
        return self._next(torch.rand(shape, generator=self._generator) * 0.8 + 0.1)

    def _next(self, values: Tensor) -> Tensor:
        dtype = self._dtypes[self._made % len(self._dtypes)]
        self._made += 1
        # rounded through both 16-bit dtypes: every dtype holds the same values
        return values.bfloat16().half().to(dtype)


def _call(function: Callable[[Maker], tuple[Any, ...]], **kwargs: Any) -> Callable[[Maker], Args]:
    return lambda t: (function(t), kwargs)


def _cell(chunks: int, lstm: bool = False) -> Callable[[Maker], Args]:
    def args(t: Maker) -> Args:
        state: Any = [t(2, 3), t(2, 3)] if lstm else t(2, 3)
        return (t(2, 3), state, t(chunks * 3, 3), t(chunks * 3, 3), t(chunks * 3), t(chunks * 3)), {}

    return args


def _layer(t: Maker, chunks: int) -> list[Tensor]:
    return [t(chunks * 3, 3), t(chunks * 3, 3), t(chunks * 3), t(chunks * 3)]


def _index() -> Tensor:
    return torch.tensor([0, 1])


ONE, ZERO = torch.ones(1), torch.zeros(1)
BATCHES = torch.tensor([2, 2, 1, 1])
CONV = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)

_one = _call(lambda t: (t(4),))
_unit = _call(lambda t: (t.positive(4),))
_square = _call(lambda t: (t(3, 3),))
_pair = _call(lambda t: (t(4), t(4)))

CALLS: dict[str, Callable[[Maker], Args]] = {
    "mv": _call(lambda t: (t(3, 4), t(4))),
    "chain_matmul": _call(lambda t: ([t(2, 3), t(3, 4), t(4, 2)],)),
    "linalg_multi_dot": _call(lambda t: ([t(2, 3), t(3, 4), t(4, 2)],)),
    "einsum": _call(lambda t: ("ij,jk->ik", [t(2, 3), t(3, 4)])),
    "addmv": _call(lambda t: (t(3), t(3, 4), t(4))),
    "addr": _call(lambda t: (t(3, 4), t(3), t(4))),
    "convolution": _call(lambda t: (t(1, 2, 4, 4), t(3, 2, 2, 2), t(3), *CONV)),
    "_convolution": _call(lambda t: (t(1, 2, 4, 4), t(3, 2, 2, 2), t(3), *CONV, False, True, True, True)),
    "lstm_cell": _cell(4, lstm=True),
    "gru_cell": _cell(3),
    "rnn_tanh_cell": _cell(1),
    "rnn_relu_cell": _cell(1),
    "cat": _call(lambda t: ([t(2, 3), t(2, 3)],)),
    "stack": _call(lambda t: ([t(2, 3), t(2, 3)],)),
    "index_copy": _call(lambda t: (t(4, 3), 0, _index(), t(2, 3))),
    "gru.input": _call(lambda t: (t(4, 2, 3), t(1, 2, 3), _layer(t, 3), True, 1, 0.0, False, False, False)),
    "gru.data": _call(lambda t: (t(6, 3), BATCHES, t(1, 2, 3), _layer(t, 3), True, 1, 0.0, False, False)),
    "lstm.data": _call(
        lambda t: (t(6, 3), BATCHES, [t(1, 2, 3), t(1, 2, 3)], _layer(t, 4), True, 1, 0.0, False, False)
    ),
    "addmm_": _call(lambda t: (t(2, 4), t(2, 3), t(3, 4))),
    "addmv_": _call(lambda t: (t(3), t(3, 4), t(4))),
    "addr_": _call(lambda t: (t(3, 4), t(3), t(4))),
    "addbmm_": _call(lambda t: (t(3, 4), t(2, 3, 5), t(2, 5, 4))),
    "baddbmm_": _call(lambda t: (t(2, 3, 4), t(2, 3, 5), t(2, 5, 4))),
    "meshgrid": _call(lambda t: ([t(2), t(3)],)),
    "meshgrid.indexing": _call(lambda t: ([t(2), t(3)],), indexing="xy"),
    "isclose": _pair, "heaviside": _pair, "heaviside_": _pair, "complex": _pair,
    **{f"embedding_bag{form}": _call(lambda t, end=end: (t(4, 3), _index(), ZERO.long(), False, 0, False, t(2), *end))
       for form, end in (("", ()), (".padding_idx", (False, None)))},
    "_sparse_addmm": _call(lambda t: (t(2, 2), t(2, 2).to_sparse(), t(2, 2))),
    "histogram.bins_tensor": _call(lambda t: (t(4), torch.arange(3.0))),
    "histogram.bin_ct": _call(lambda t: (t(4), 3)),
    "histogramdd": _call(lambda t: (t(4, 2), [3, 3])),
    "histogramdd.int_bins": _call(lambda t: (t(4, 2), 3)),
    "histogramdd.TensorList_bins": _call(lambda t: (t(4, 1), [torch.arange(3.0)])),
    **{f"special_{name}": _unit for name in (
        "airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_i0", "modified_bessel_i1",
        "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1",
        "spherical_bessel_j0", "erfcx", "log_ndtr", "ndtri",
    )},
    "special_zeta": _call(lambda t: (t.positive(4), t.positive(4))),
    **{f"linalg_{name}": _square for name in (
        "lu", "lu_factor", "lu_factor_ex", "ldl_factor", "ldl_factor_ex", "det", "slogdet", "matrix_exp", "vander",
    )},
    **dict.fromkeys(("det", "slogdet", "logdet", "matrix_exp", "fft_hfft2", "fft_hfftn"), _square),
    **{f"fft_ihfft{axes}": _square for axes in "2n"},
    "linalg_pinv": _call(lambda t: (t(3, 3), 0.01)),
    "linalg_pinv.rcond_tensor": _call(lambda t: (t(3, 3), torch.tensor(0.01))),
    "linalg_pinv.atol_rtol_tensor": _square, "linalg_pinv.atol_rtol_float": _square,
    "linalg_lu_solve": _call(lambda t: (t(3, 3), torch.tensor([1, 2, 3]).int(), t(3, 2))),
    "linalg_ldl_solve": _call(lambda t: (t(3, 3), torch.tensor([1, 2, 3]).int(), t(3, 2))),
    "linalg_solve_ex": _call(lambda t: (t(3, 3), t(3, 2))),
    "linalg_solve_triangular": _call(lambda t: (t(3, 3), t(3, 2)), upper=True),
    "linalg_vecdot": _call(lambda t: (t(3, 4), t(3, 4))),
    "exp": _one, "expm1": _one, "cosh": _one, "sinh": _one, "tan": _one, "softplus": _one, "sum": _one,
    "norm.Scalar": _one, "linalg_vector_norm": _one,
    "log": _unit, "log10": _unit, "log2": _unit, "log1p": _unit, "reciprocal": _unit, "rsqrt": _unit,
    "acos": _unit, "asin": _unit, "erfinv": _unit,
    "pow.Tensor_Scalar": _call(lambda t: (t.positive(4), 1.7)),
    "pow.Tensor_Tensor": _call(lambda t: (t.positive(4), t(4))),
    "pow.Scalar": _call(lambda t: (1.7, t(4))),
    "sum.dim_IntList": _call(lambda t: (t(3, 4), [1])),
    "cumsum": _call(lambda t: (t(3, 4), 1)),
    "cumprod": _call(lambda t: (t(3, 4), 1)),
    "softmax.int": _call(lambda t: (t(3, 4), -1)),
    "_softmax": _call(lambda t: (t(3, 4), -1, False)),
    "log_softmax.int": _call(lambda t: (t(3, 4), -1)),
    "_log_softmax": _call(lambda t: (t(3, 4), -1, False)),
    "logsumexp": _call(lambda t: (t(3, 4), [1])),
    "layer_norm": _call(lambda t: (t(3, 4), [4], t(4), t(4))),
    "native_layer_norm": _call(lambda t: (t(3, 4), [4], t(4), t(4), 1e-5)),
    "group_norm": _call(lambda t: (t(3, 4), 2, t(4), t(4))),
    "rms_norm": _call(lambda t: (t(3, 4), [4], t(4))),
    "norm.ScalarOpt_dim": _call(lambda t: (t(3, 4), 2, [1])),
    "linalg_matrix_norm": _call(lambda t: (t(3, 4), 1)),
    "linalg_matrix_norm.str_ord": _call(lambda t: (t(3, 4), "fro")),
    "frobenius_norm.dim": _call(lambda t: (t(3, 4), [0, 1])),
    "nuclear_norm": _call(lambda t: (t(3, 4),)),
    "nuclear_norm.dim": _call(lambda t: (t(3, 4), [0, 1])),
    "renorm": _call(lambda t: (t(3, 4), 2, 0, 1.0)),
    "pdist": _call(lambda t: (t(3, 4),)),
    "dist": _pair,
    "cosine_similarity": _call(lambda t: (t(3, 4), t(3, 4))),
    "upsample_nearest1d": _call(lambda t: (t(1, 2, 3), [5])),
    "upsample_nearest2d": _call(lambda t: (t(1, 2, 3, 3), [5, 5])),
    "upsample_nearest3d": _call(lambda t: (t(1, 2, 2, 2, 2), [3, 3, 3])),
    "_upsample_nearest_exact1d": _call(lambda t: (t(1, 2, 3), [5])),
    "_upsample_nearest_exact2d": _call(lambda t: (t(1, 2, 3, 3), [5, 5])),
    "_upsample_nearest_exact3d": _call(lambda t: (t(1, 2, 2, 2, 2), [3, 3, 3])),
    "upsample_linear1d": _call(lambda t: (t(1, 2, 3), [5], False)),
    "upsample_bilinear2d": _call(lambda t: (t(1, 2, 3, 3), [5, 5], False)),
    "_upsample_bilinear2d_aa": _call(lambda t: (t(1, 2, 3, 3), [5, 5], False)),
    "upsample_trilinear3d": _call(lambda t: (t(1, 2, 2, 2, 2), [3, 3, 3], False)),
    "upsample_bicubic2d": _call(lambda t: (t(1, 2, 3, 3), [5, 5], False)),
    "_upsample_bicubic2d_aa": _call(lambda t: (t(1, 2, 3, 3), [5, 5], False)),
    "addcmul": _call(lambda t: (t(4), t(4), t(4))),
    "addcdiv": _call(lambda t: (t(4), t(4), t.positive(4))),
    "atan2": _pair, "dot": _pair, "vdot": _pair,
    "cross": _call(lambda t: (t(2, 3), t(2, 3), 1)),
    "tensordot": _call(lambda t: (t(2, 3), t(3, 2), [1], [0])),
    "bilinear": _call(lambda t: (t(2, 3), t(2, 3), t(2, 3, 3), t(2))),
    "fake_quantize_per_tensor_affine.tensor_qparams": _call(lambda t: (t(4), ONE, ZERO.int(), 0, 255)),
    "fake_quantize_per_channel_affine": _call(lambda t: (t(1, 4), ONE, ZERO.int(), 0, 0, 255)),
    "_fake_quantize_learnable_per_tensor_affine": _call(lambda t: (t(4), ONE, ZERO, 0, 255)),
    "_fake_quantize_learnable_per_channel_affine": _call(lambda t: (t(1, 4), ONE, ZERO, 0, 0, 255)),
    "fused_moving_avg_obs_fake_quant": _call(
        lambda t: (t(4), ONE.long(), ONE.long(), ZERO.clone(), ONE.clone(), ONE.clone(), ZERO.int(), 0.1, 0, 255, -1)
    ),
    "linalg_cross": _call(lambda t: (t(2, 3), t(2, 3))),
    "lerp.Scalar": _call(lambda t: (t(4), t(4), 0.25)),
    "lerp.Tensor": _call(lambda t: (t(4), t(4), t(4))),
    **{f"index_put{to}": _call(lambda t: (t(4), [_index()], t(2))) for to in ("", "_")},
    **{f"index_add{to}": _call(lambda t: (t(4), 0, _index(), t(2))) for to in ("", "_")},
    **{f"index_reduce{to}": _call(lambda t: (t(4), 0, _index(), t(2), "amax")) for to in ("", "_")},
    **{f"scatter{to}.src": _call(lambda t: (t(4), 0, _index(), t(2))) for to in ("", "_")},
    **{f"scatter{to}.reduce": _call(lambda t: (t(4), 0, _index(), t(2)), reduce="add") for to in ("", "_")},
    **{f"scatter_add{to}": _call(lambda t: (t(4), 0, _index(), t(2))) for to in ("", "_")},
    **{f"scatter_reduce{to}.two": _call(lambda t: (t(4), 0, _index(), t(2), "amax")) for to in ("", "_")},
    **{f"masked_scatter{to}": _call(lambda t: (t(2), torch.tensor([True, False]), t(1))) for to in ("", "_")},
    **{f"put{to}": _call(lambda t: (t(4), _index(), t(2))) for to in ("", "_")},
    "index_copy_": _call(lambda t: (t(4, 3), 0, _index(), t(2, 3))),
    "lerp_.Scalar": _call(lambda t: (t(4), t(4), 0.25)),
    "lerp_.Tensor": _call(lambda t: (t(4), t(4), t(4))),
    "select_scatter": _call(lambda t: (t(4, 3), t(3), 0, 1)),
    "slice_scatter": _call(lambda t: (t(4, 3), t(2, 3), 0, 1, 3)),
    "diagonal_scatter": _call(lambda t: (t(3, 3), t(3))),
    "as_strided_scatter": _call(lambda t: (t(4), t(2), [2], [1])),
    "grid_sampler": _call(lambda t: (t(1, 2, 3, 3), t(1, 2, 2, 2), 0, 0, False)),
    "grid_sampler_2d": _call(lambda t: (t(1, 2, 3, 3), t(1, 2, 2, 2), 0, 0, False)),
    "grid_sampler_3d": _call(lambda t: (t(1, 2, 3, 3, 3), t(1, 2, 2, 2, 3), 0, 0, False)),
    "_grid_sampler_2d_cpu_fallback": _call(lambda t: (t(1, 2, 3, 3), t(1, 2, 2, 2), 0, 0, False)),
    "binary_cross_entropy": _call(lambda t: (t.positive(4), t.positive(4))),
    "avg_pool3d": _call(lambda t: (t(1, 2, 3, 3, 3), [2, 2, 2])),
    "max_pool3d": _call(lambda t: (t(1, 2, 3, 3, 3), [2, 2, 2])),
    "adaptive_avg_pool3d": _call(lambda t: (t(1, 2, 3, 3, 3), [2, 2, 2])),
    "adaptive_max_pool3d": _call(lambda t: (t(1, 2, 3, 3, 3), [2, 2, 2])),
    "fractional_max_pool2d": _call(lambda t: (t(1, 2, 4, 4), [2, 2], [2, 2], t.positive(1, 2, 2))),
    "fractional_max_pool3d": _call(lambda t: (t(1, 2, 4, 4, 4), [2, 2, 2], [2, 2, 2], t.positive(1, 2, 3))),
    "max_unpool2d": _call(lambda t: (t(1, 2, 1, 1), torch.zeros(1, 2, 1, 1, dtype=torch.long), [2, 2])),
    "max_unpool3d": _call(
        lambda t: (t(1, 2, 1, 1, 1), torch.zeros(1, 2, 1, 1, 1, dtype=torch.long), [2, 2, 2], [2, 2, 2], [0, 0, 0])
    ),
    "reflection_pad1d": _call(lambda t: (t(1, 2, 4), [1, 1])),
    "reflection_pad2d": _call(lambda t: (t(1, 2, 4, 4), [1, 1, 1, 1])),
    "replication_pad1d": _call(lambda t: (t(1, 2, 4), [1, 1])),
    "replication_pad2d": _call(lambda t: (t(1, 2, 4, 4), [1, 1, 1, 1])),
    "replication_pad3d": _call(lambda t: (t(1, 2, 4, 4, 4), [1] * 6)),
}  # fmt: skip

NO_CALL = {
    "_scaled_dot_product_flash_attention": "needs CUDA",
    "cudnn_convolution": "needs CUDA",
    "cudnn_convolution_transpose": "needs CUDA",
    "_thnn_fused_lstm_cell": "needs CUDA",
    "_thnn_fused_gru_cell": "needs CUDA",
}
"""Operators that preamp rules on the CPU too, for one table everywhere, though the CPU has no kernel for them."""

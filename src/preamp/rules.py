"""Which operations run in which precision inside a 16-bit region, each with its reason.

The table is the same on every device. It agrees with what torch.amp does on CUDA; on the CPU, where torch.amp leaves
softmax, norms, exp and sums in 16 bits, preamp's regions follow this table instead, so that what a CPU test sees is
what a GPU does. `NATIVE_CPU` records what torch's own CPU autocast does, so that plain `torch.autocast` can go on
doing it while preamp's rules are installed.

How to add a rule: add its operator (an `aten` overload name) to a row of `TABLE`, or a row with a reason of its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, cast, get_args

import torch

from .errors import PolicyError

Category = Literal["low", "full", "promote", "banned", "as-is"]
"""*low*: inputs go to the region's 16-bit dtype. *full*: inputs go to float32. *promote*: all inputs go to the widest
of their dtypes; a tensor that is written in place keeps its own, as a table of embeddings does, and the others go to
that. *banned*: an error when an input is 16-bit. *as-is*: no cast, whatever comes in."""

CATEGORIES: tuple[str, ...] = get_args(Category)


@dataclass(frozen=True, slots=True)
class OpRule:
    """One row: a family of operators that are ruled together, and why."""

    family: str
    category: Category
    ops: tuple[str, ...]
    reason: str


_TENSOR_CORES = "tensor cores: 16-bit factors, sums kept in float32 by the hardware"
_RANGE = "leaves the range of float16 for ordinary inputs (exp(12) is already infinite)"
_STEEP = "steep near its poles: 16-bit rounding of the input becomes a large error of the output"
_LONG_SUM = "adds many terms: a 16-bit result saturates or stops growing"
_LOSS = "a loss reduces a whole batch to one number, and its gradient starts every other"
_NORM = "divides by a root of a sum of squares; squares overflow float16 above 255"
_MIXED = "combines tensors that may differ in dtype: the widest wins, nothing is lost"
_IN_PLACE = "writes into a tensor, as `x[mask] = y` does: it keeps its dtype, and what is written is cast to it"
_INTERPOLATION = "weighted sums of neighbours; torch.amp runs them full on CUDA"
_FACTORISATION = "factorisations and spectra have no 16-bit kernels worth having"
_NO_KERNEL = "torch has no 16-bit kernel"
_MOVES = "moves or compares values and adds none: 16 bits lose nothing"


def _row(category: Category, family: str, *ops: str, reason: str) -> OpRule:
    return OpRule(family, category, ops or (family,), reason)


_low, _full = partial(_row, "low", reason=_TENSOR_CORES), partial(_row, "full")
_promote, _as_is = partial(_row, "promote", reason=_MIXED), partial(_row, "as-is", reason=_MOVES)

TABLE: tuple[OpRule, ...] = (
    # -- low: where the time goes, and where the hardware is fast and accumulates in float32
    _low("matmul", "matmul", "mm", "bmm", "mv", "linalg_vecdot", "chain_matmul", "linalg_multi_dot", "einsum"),
    _low("addmm", "addmm", "addmv", "addr", "addbmm", "baddbmm", "_addmm_activation"),
    _low("linear"),
    _low("conv", "conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding", "conv_tbc",
         "convolution", "_convolution", "_convolution.deprecated", "cudnn_convolution"),
    _low("conv_transpose", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input",
         "cudnn_convolution_transpose"),
    _low("scaled_dot_product_attention", "scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
         "_native_multi_head_attention", reason="two matrix products; the softmax between them is float32 inside"),
    _low("rnn", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_thnn_fused_lstm_cell",
         "_thnn_fused_gru_cell", "mkldnn_rnn_layer", "gru.input", "gru.data", "lstm.data",
         reason="matrix products with bounded activations between them"),
    _low("prelu", reason="a learned slope: kept in the dtype of the products around it"),
    # -- full: range
    _full("exp", "exp", "expm1", reason=_RANGE),
    _full("pow", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", reason=_RANGE),
    _full("cosh", "cosh", "sinh", reason=_RANGE),
    _full("softplus", reason=_RANGE),
    # -- full: steepness
    _full("log", "log", "log10", "log2", "log1p", reason=_STEEP),
    _full("reciprocal", "reciprocal", "rsqrt", reason=_STEEP),
    _full("tan", reason=_STEEP),
    _full("acos", "acos", "asin", reason=_STEEP),
    _full("erfinv", reason=_STEEP),
    # -- full: sums
    _full("sum", "sum", "sum.dim_IntList", reason=_LONG_SUM),
    _full("prod", "prod", "prod.dim_int", reason=_RANGE),
    _full("cumsum", "cumsum", reason=_LONG_SUM),
    _full("cumprod", "cumprod", reason=_RANGE),
    _full("trace", reason=_LONG_SUM),
    # vmap takes softmax.int apart before autocast sees it, hence the inner operators
    _full("softmax", "softmax.int", "_softmax", reason="exponentials and their sum"),
    _full("log_softmax", "log_softmax.int", "_log_softmax", reason="exponentials, their sum, and its logarithm"),
    _full("logsumexp", reason="exponentials, their sum, and its logarithm"),
    # -- full: norms
    _full("layer_norm", "layer_norm", "native_layer_norm", reason=_NORM),
    _full("group_norm", reason=_NORM),
    _full("rms_norm", reason=_NORM),
    _full("norm", "norm.Scalar", "norm.ScalarOpt_dim", "linalg_vector_norm", "linalg_matrix_norm",
          "linalg_matrix_norm.str_ord", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "renorm",
          reason=_NORM),
    _full("distance", "cdist", "pdist", "dist", "cosine_similarity", reason=_NORM),
    # -- full: losses
    _full("cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss2d", reason=_LOSS),
    _full("binary_cross_entropy_with_logits", reason=_LOSS),
    _full("mse_loss", reason=_LOSS + "; squares overflow float16 above 255"),
    _full("l1_loss", "l1_loss", "smooth_l1_loss", "huber_loss", reason=_LOSS),
    _full("kl_div", reason=_LOSS),
    _full("ctc_loss", "ctc_loss.IntList", "ctc_loss.Tensor", reason=_LOSS),
    _full("poisson_nll_loss", reason=_LOSS),
    _full("margin_loss", "margin_ranking_loss", "multilabel_margin_loss", "multilabel_margin_loss_forward",
          "multi_margin_loss", "soft_margin_loss", "triplet_margin_loss", "hinge_embedding_loss",
          "cosine_embedding_loss", reason=_LOSS),
    # -- full: interpolation, spectra, factorisations
    _full("interpolate", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
          "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
          "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
          reason=_INTERPOLATION),
    _full("fft", "fft_fft", "fft_ifft", "fft_fft2", "fft_ifft2", "fft_fftn", "fft_ifftn", "fft_rfft", "fft_irfft",
          "fft_rfft2", "fft_irfft2", "fft_rfftn", "fft_irfftn", "fft_hfft", "fft_ihfft", "fft_hfft2", "fft_ihfft2",
          "fft_hfftn", "fft_ihfftn", "stft", "stft.center",
          reason=_FACTORISATION),
    _full("complex", "complex", "polar", "view_as_complex", reason="complex32 has few kernels"),
    _full("linalg", "cholesky", "cholesky_inverse", "cholesky_solve", "inverse", "pinverse", "qr", "svd", "geqrf",
          "orgqr", "ormqr", "lu_solve", "_lu_with_info", "triangular_solve", "linalg_cholesky", "linalg_cholesky_ex",
          "linalg_cond", "linalg_cond.p_str", "linalg_eig", "linalg_eigh", "linalg_eigvals", "linalg_eigvalsh",
          "linalg_householder_product", "linalg_inv", "linalg_inv_ex", "linalg_lstsq", "linalg_matrix_rank",
          "linalg_matrix_rank.atol_rtol_float", "linalg_matrix_rank.atol_rtol_tensor",
          "linalg_matrix_rank.tol_tensor", "linalg_matrix_sqrth", "linalg_qr", "linalg_solve", "linalg_svd",
          "linalg_svdvals", "linalg_tensorinv", "linalg_tensorsolve", "linalg_lu", "linalg_lu_factor",
          "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_ldl_factor", "linalg_ldl_factor_ex", "linalg_ldl_solve",
          "linalg_solve_ex", "linalg_solve_triangular", "linalg_pinv", "linalg_pinv.rcond_tensor",
          "linalg_pinv.atol_rtol_float", "linalg_pinv.atol_rtol_tensor", "linalg_det", "det", "linalg_slogdet",
          "slogdet", "logdet", "linalg_matrix_exp", "matrix_exp", "linalg_vander", reason=_FACTORISATION),
    _full("quantile", "quantile", "quantile.scalar", "nanquantile", "nanquantile.scalar",
          reason=f"interpolates between order statistics; {_NO_KERNEL}"),
    _full("sparse.mm", "_sparse_addmm", reason="its backward pass refuses a matrix that a region has cast"),
    _full("histogram", "histogram.bins_tensor", "histogram.bin_ct", "histogramdd", "histogramdd.int_bins",
          "histogramdd.TensorList_bins", reason=_NO_KERNEL),
    _full("special", *(f"special_{name}" for name in (
        "airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_i0", "modified_bessel_i1",
        "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1",
        "spherical_bessel_j0", "erfcx", "log_ndtr", "ndtri", "zeta",
    )), reason=_NO_KERNEL),
    _full("fake_quantize", "fake_quantize_per_tensor_affine", "fake_quantize_per_tensor_affine.tensor_qparams",
          "fake_quantize_per_channel_affine", "_fake_quantize_learnable_per_tensor_affine",
          "_fake_quantize_learnable_per_channel_affine", "fused_moving_avg_obs_fake_quant",
          reason="emulates a grid finer than bfloat16's"),
    # -- promote
    _promote("cat", "cat", "stack", "meshgrid", "meshgrid.indexing"),
    _promote("addcmul", "addcmul", "addcdiv"),
    _promote("atan2"),
    _promote("compare", "isclose", "heaviside"),
    _promote("heaviside_", reason=_IN_PLACE),
    _promote("dot", "dot", "vdot", "cross", "linalg_cross", "tensordot"),
    _promote("addmm_", "addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_",
             reason="adds a product to a tensor in place: it keeps its dtype, and the factors are cast to it"),
    _promote("bilinear"),
    _promote("embedding_bag", "embedding_bag", "embedding_bag.padding_idx",
             reason="the table of embeddings keeps its dtype, and the weights of its rows are cast to it"),
    _promote("grid_sample", "grid_sampler"),
    _promote("index", "index_put", "index_copy", "index_add", "index_reduce", "scatter.src", "scatter.reduce",
             "scatter_add", "scatter_reduce.two", "masked_scatter", "put", "select_scatter", "slice_scatter",
             "diagonal_scatter", "as_strided_scatter"),
    _promote("index_", "index_put_", "index_copy_", "index_add_", "index_reduce_", "scatter_.src", "scatter_.reduce",
             "scatter_add_", "scatter_reduce_.two", "masked_scatter_", "put_", reason=_IN_PLACE),
    _promote("lerp", "lerp.Scalar", "lerp.Tensor"),
    _promote("lerp_", "lerp_.Scalar", "lerp_.Tensor", reason=_IN_PLACE),
    # -- banned
    OpRule("binary_cross_entropy", "banned", ("binary_cross_entropy",),
           "a 16-bit sigmoid reaches exactly 0 or 1, whose logarithm is infinite: write "
           "binary_cross_entropy_with_logits (BCEWithLogitsLoss), or call .float() on the probabilities first"),
    # -- as-is
    _as_is("pool", "avg_pool3d", "max_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "fractional_max_pool2d",
           "fractional_max_pool3d", "max_unpool2d", "max_unpool3d",
           reason="pooling windows are small; torch.amp on CUDA leaves them alone"),
    _as_is("pad", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d",
           "replication_pad3d"),
    _as_is("grid_sampler_kernel", "grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback",
           reason="the kernels under grid_sample, which already promoted their inputs"),
    _as_is("batch_norm",
           reason="takes 16-bit activations with float32 weights and keeps its statistics in float32 by itself"),
)  # fmt: skip

NATIVE_CPU: Mapping[str, Category] = {
    **dict.fromkeys((
        "conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding", "bmm", "mm",
        "linalg_vecdot", "baddbmm", "addmm", "_addmm_activation", "addbmm", "linear", "_convolution.deprecated",
        "matmul", "conv_tbc", "mkldnn_rnn_layer", "conv_transpose1d", "conv_transpose2d.input",
        "conv_transpose3d.input", "prelu", "scaled_dot_product_attention", "_native_multi_head_attention",
    ), "low"),
}  # fmt: skip
"""What torch's CPU autocast does by itself, for the operators that are not *full* there."""


RULED_BY_PARTS = frozenset({
    "conv1d.padding", "conv2d.padding", "conv3d.padding", "cat", "stack", "_addmm_activation",
})  # fmt: skip
"""Operators that need no kernel of ours where torch has none either: their parts are ruled, or they promote anyway.

Not cross_entropy_loss, which CUDA's autocast has no kernel for: it asks log_softmax for the dtype of its input, and the
rule there leaves a dtype that is asked for. So torch.amp on CUDA keeps log-probabilities in 16 bits.
"""


RULED_ON_CPU = frozenset({"gru.input", "gru.data", "lstm.data"})
"""Recurrent layers that are one ruled kernel on other devices, and many operators on the CPU: ruled by their parts
alone they would give back the dtype of the state, float32.
"""

Native = Category | Literal["refused", "promote one dtype"]


def native_category(op: str, device_type: str) -> Native | None:
    """What torch's own autocast does with `op` on a device type; None: it has no rule and casts nothing.

    Which operators are ruled is read off the dispatcher of this very torch; in which way is a documented fact that
    the dispatcher does not tell: on every device but the CPU it is the way of `TABLE`, which follows CUDA.
    "refused" is an error whatever the inputs, which is how torch.amp bans binary_cross_entropy on CUDA; "promote one
    dtype" is cat and its kin on the CPU, which take float32 and the region's dtype and fail for the other 16-bit one.
    """
    if not has_kernel(op, device_type):
        return _DEFAULT.get(op) if op in RULED_BY_PARTS else None
    if device_type == "cpu":
        if op in ("cat", "stack", "index_copy"):
            return "promote one dtype"
        return NATIVE_CPU.get(op, "full")
    return "refused" if op == "binary_cross_entropy" else _DEFAULT.get(op, "full")


def has_kernel(op: str, device_type: str) -> bool:
    """Whether torch's autocast itself has a kernel for `op` on a device type."""
    return op in _natively_ruled(device_type)


@lru_cache
def _natively_ruled(device_type: str) -> frozenset[str]:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(autocast_key(device_type))
    return frozenset(name.removeprefix("aten::") for name in registered)


def autocast_key(device_type: str) -> str:
    """The name of the dispatch key of autocast on a device type: "AutocastCPU" for "cpu"."""
    if device_type == "privateuseone":
        return "AutocastPrivateUse1"
    return "Autocast" + device_type.upper()


_DEFAULT: dict[str, Category] = {op: row.category for row in TABLE for op in row.ops}
_FAMILIES: dict[str, tuple[str, ...]] = {row.family: row.ops for row in TABLE}


@dataclass(frozen=True, slots=True)
class OpRules:
    """The rules of a region: preamp's table with changes of yours.

    >>> OpRules().category("softmax")
    'full'
    >>> OpRules().with_low("softmax").category("softmax")
    'low'

    Names are families of the table ("softmax", "conv"), `aten` operators ("gelu", "softmax.int"), operators of your own
    ("mylib::attention"), or the functions themselves (`torch.exp`). An unknown name is a `PolicyError`.
    """

    changes: tuple[tuple[str, Category], ...] = ()

    def with_low(self, *names: str | Callable[..., Any]) -> OpRules:
        """These operations take the region's 16-bit dtype."""
        return self._with("low", names)

    def with_full(self, *names: str | Callable[..., Any]) -> OpRules:
        """These operations run in float32."""
        return self._with("full", names)

    def with_promote(self, *names: str | Callable[..., Any]) -> OpRules:
        """These operations take the widest dtype among their inputs."""
        return self._with("promote", names)

    def with_banned(self, *names: str | Callable[..., Any]) -> OpRules:
        """These operations raise when an input is 16-bit."""
        return self._with("banned", names)

    def without(self, *names: str | Callable[..., Any]) -> OpRules:
        """These operations are left as they are: no cast."""
        return self._with("as-is", names)

    def _with(self, category: Category, names: tuple[str | Callable[..., Any], ...]) -> OpRules:
        changed = dict(self.changes)
        for name in names:
            for op in resolve(name):
                changed.pop(op, None)
                if _DEFAULT.get(op) != category:
                    changed[op] = category
        return OpRules(tuple(sorted(changed.items())))

    def category(self, name: str) -> Category | None:
        """The category of an operator or family; None where no rule touches it."""
        ops = resolve(name)
        changed = dict(self.changes)
        found = {changed.get(op) or _DEFAULT.get(op) for op in ops}
        if len(found) > 1:
            raise PolicyError(f"the operators of {name!r} have different rules: ask for one of {', '.join(ops)}")
        return found.pop()

    def ruled(self) -> Iterator[tuple[str, Category]]:
        """Every ruled operator with its category, changes included."""
        yield from {**_DEFAULT, **dict(self.changes)}.items()

    def rows(self) -> tuple[OpRule, ...]:
        """The table to print: default rows without the operators you changed, then your changes."""
        changed = dict(self.changes)
        kept = [replace(row, ops=tuple(op for op in row.ops if op not in changed)) for row in TABLE]
        own = [OpRule(op, category, (op,), "changed by OpRules") for op, category in self.changes]
        return (*(row for row in kept if row.ops), *own)

    def __str__(self) -> str:
        return "; ".join(f"op {_spelt(op)} -> {category}" for op, category in self.changes)


def _spelt(op: str) -> str:
    """An operator's name for a rule in a string: one that stands for it alone, and for no family or other overload."""
    try:
        return op if resolve(op) == (op,) else f"{op}.default"
    except PolicyError:  # of a library that is not imported now
        return op


def category_named(name: str) -> Category:
    """`name` as a category, or a `PolicyError` that lists the legal ones."""
    if name not in CATEGORIES:
        raise PolicyError(f"{name!r} is not a category of rules; write one of {', '.join(CATEGORIES)}")
    return cast(Category, name)


def resolve(name: str | Callable[..., Any]) -> tuple[str, ...]:
    """The operator overloads that a name stands for: a family's, or every functional overload of one operator."""
    text = name if isinstance(name, str) else getattr(name, "__name__", repr(name))
    text = text.removeprefix("aten::")
    if text in _FAMILIES:
        return _FAMILIES[text]
    if text in _DEFAULT:
        return (text,)
    overloads = _overloads(text)
    if not overloads:
        close = difflib.get_close_matches(text, {*_FAMILIES, *_DEFAULT, *dir(torch.ops.aten)}, n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise PolicyError(f"no family of rules and no operator is called {text!r}{hint} (`preamp rules` lists them)")
    return overloads


def _overloads(text: str) -> tuple[str, ...]:
    """Functional overloads of "gelu", "gelu.default", or "mylib::attention", spelt as the dispatcher wants them."""
    namespace, _, rest = text.rpartition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), base, None) if base.isidentifier() else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return ()
    prefix = f"{namespace}::" if namespace else ""
    names = []
    for candidate in packet.overloads():
        schema = getattr(packet, candidate)._schema
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        takes_tensor = any("Tensor" in str(a.type) for a in schema.arguments)
        if writes or not takes_tensor or (overload and candidate != overload):
            continue
        names.append(prefix + (base if candidate == "default" else f"{base}.{candidate}"))
    return tuple(names)

"""Compile the Triton kernels of a training step for Hopper, which needs no GPU: the interpreter checks no types.

Run by test_compiles.py in a process of its own, without TRITON_INTERPRET.
"""

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from coati_ext.kernel import (
    copy_matrices_triton,
    factor_gradient_triton,
    moe_rows_triton,
    softmax_rows_triton,
    sort_rows_triton,
)

ROWS, FP32, INT32, INT64 = "*bf16", "*fp32", "*i32", "*i64"
LOW = {
    "factor": ROWS, "low": ROWS, "start": INT32, "first_tile": INT32, "group_of": INT32, "num_groups": "i32",
    "width": "i32", "width2": "i32", "q": "i32", "spare": "i32", "factor_group": "i64", "factor_q": "i32",
    "factor_k": "i32", "scaling": "fp32",
}  # fmt: skip
COMMON = {
    "source": ROWS, "index": INT64, "out": ROWS, "rows": ROWS, "position": INT64, "stride": "i32", "gate_up": ROWS,
    "weight": FP32, "order": INT64, "grad": ROWS, "grad_gate_up": ROWS, "grad_weight": FP32, "act_out": ROWS,
    "ends": INT32, **LOW,
}  # fmt: skip
GRADIENT = {"x": ROWS, "K": "i32", "low_row": "i32", "x_row": "i32", "out_k": "i32", "out_q": "i32"}
COPY = {
    "sources": (ROWS,) * 2, "targets": (ROWS,) * 2, "sizes": (("i32", "i32"),) * 2,
    "source_strides": (("i64", "i32", "i32"),) * 2, "target_strides": (("i64", "i32", "i32"),) * 2,
}  # fmt: skip
SORT = {
    "counts_BE": INT32, "first_BE": INT32, "total_E": INT64, "ends_E": INT32, "token": INT64,
    "num_rows": "i32", "num_experts": "i32", "num_chunks": "i32", "top_k": "i32",
}  # fmt: skip
SOFTMAX = {
    "logits": FP32, "target_of": INT64, "out_max": FP32, "out_sum": FP32, "out_target": FP32, "out_weighted": FP32,
    "maxima": FP32, "log_sums": FP32, "grads": FP32, "num_words": "i32",
}  # fmt: skip
TILE = {"Q": 16, "SPARE": 64, "ROWS": 64, "BLOCK": 128}
KERNELS = {
    "_tiles": {"GROUPS": 256, "ROWS": 64},
    "_gather_rows": {"BLOCK": 2048},
    "_gather_rows_low": TILE,
    "_sum_rows": {"K": 8, "BLOCK": 1024},
    "_swiglu_rows": {"BLOCK": 2048},
    "_swiglu_rows_low": TILE,
    "_swiglu_rows_backward": {"BLOCK": 1024},
    "_swiglu_rows_backward_low": {**TILE, "BLOCK": 64},
    "_factor_gradient": {"INDEXED": True, "Q": 16, "ROWS": 64, "BLOCK": 128},
    "_copy_matrices": {"BLOCK": 1024},
    "_count_rows": {"EXPERTS": 512, "CHUNK": 512},
    "_first_rows": {"EXPERTS": 512, "CHUNKS": 1024},
    "_place_rows": {"CHUNK": 512, "LANES": 32},
    "_softmax_sums": {"WEIGHTED": True, "BLOCK": 4096},
    "_softmax_gradient": {"BLOCK": 4096},
}
WITH_LOW = ("_gather_rows_low", "_swiglu_rows_low", "_swiglu_rows_backward_low")

MODULES = (moe_rows_triton, factor_gradient_triton, copy_matrices_triton, softmax_rows_triton, sort_rows_triton)
others = [(name, {**KERNELS[name], **changed}) for name in WITH_LOW for changed in ({"SPARE": 0}, {"ROWS": 16})]

for name, constants in [*KERNELS.items(), *others]:
    kernel = next(vars(module)[name] for module in MODULES if name in vars(module))
    types = {**COMMON, **GRADIENT, **COPY, **SORT, **SOFTMAX}
    signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
    values = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
    compiled = compile(ASTSource(kernel, signature, values, {}), target=GPUTarget("cuda", 90, 32))
    assert ".target sm_90" in compiled.asm["ptx"]
    print(name)

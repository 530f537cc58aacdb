"""Artifacts that compute a trained model's scores without its code.

Each takes the tensors of a batch, in the order and shapes of ``batch_spec.BatchSpec``.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torchrec.fx import symbolic_trace
from torchrec.inference.modules import quantize_inference_model

from lightning_pipe._compat.torch import (
    allow_dynamic_sizes_below_two,
    compile_and_package,
    trace_compiled_functions_as_plain,
)
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.serving.batch_spec import BatchSpec, Scorer, unsharded_table_configs

_WIDTHS = {8: torch.qint8, 4: torch.quint4x2}


def export_program(model: nn.Module, batch: Any) -> tuple[ExportedProgram, BatchSpec]:
    """Trace a model with ``torch.export``, for any batch size."""
    form = BatchSpec(batch)
    if form.rows < 2:
        raise SetupError(f"expected a batch of at least 2 rows to export a model for any batch size, got {form.rows}")
    try:
        program = _trace_with_export(model, form, batch)
    except Exception as error:  # of any type: the model's code is run
        raise SetupError(
            f"torch.export cannot trace {type(model).__name__} for any batch size: {str(error).strip()[:600]}. Avoid"
            " Python loops over rows and branches on values in its predict_step or forward, or use --to quantized"
        ) from error
    if unread := _find_unread_inputs(program, form):
        smaller = BatchSpec(batch, unread)
        # Unused code of the model may need a tensor that the scores do not depend on.
        with suppress(Exception):
            return _trace_with_export(model, smaller, batch), smaller
    return program, form


def _find_unread_inputs(program: ExportedProgram, form: BatchSpec) -> list[str]:
    """Names of the inputs that no output depends on. Unused results and checks of sizes may."""
    read = {node for node in program.graph.nodes if node.op == "output"}
    for node in reversed(program.graph.nodes):
        if node in read:
            read.update(node.all_input_nodes)
    names = {node.name for node in read}
    inputs = zip(form.names, program.graph_signature.user_inputs, strict=True)
    return [name for name, node in inputs if str(node) not in names]


def _trace_with_export(model: nn.Module, form: BatchSpec, batch: Any) -> ExportedProgram:
    scorer, inputs = Scorer(model, form), tuple(form.flatten(batch))
    with torch.no_grad(), allow_dynamic_sizes_below_two():  # a batch can have one id, or none
        return torch.export.export(scorer, inputs, dynamic_shapes=(form.dynamic_shapes(),), strict=False)


def write_torch_export(model: nn.Module, batch: Any, file: str | Path) -> BatchSpec:
    """Write a program that ``torch.export.load`` reads; see :func:`export_program`."""
    program, form = export_program(model, batch)
    torch.export.save(program, file)
    return form


def write_aoti(model: nn.Module, batch: Any, file: str | Path) -> BatchSpec:
    """Compile a program ahead of time to a package for this kind of machine; see :func:`export_program`.

    Needs a C++ compiler. ``torch._inductor.aoti_load_package`` loads the package in Python.
    """
    program, form = export_program(model, batch)
    try:
        compile_and_package(program, file)
    except OSError:
        raise
    except Exception as error:
        raise SetupError(
            f"the program of {type(model).__name__} cannot be compiled: {str(error).strip()[:600]}. Install a C++"
            " compiler, or use --to torch_export"
        ) from error
    return form


def write_quantized(model: nn.Module, batch: Any, file: str | Path, bits: int = 8) -> BatchSpec:
    """Write a TorchScript program with tables of TorchRec's quantized modules, whose values have 8 or 4 bits.

    ``torch.jit.load`` reads it after ``import fbgemm_gpu``. Each row has a scale and an offset.
    """
    if bits not in _WIDTHS:
        raise SetupError(f"bits must be 8 or 4, got {bits!r}")
    for config in unsharded_table_configs(model):
        if config.embedding_dim * bits % 16:
            raise SetupError(
                f"table {config.name} has embedding_dim {config.embedding_dim}, but FBGEMM quantizes tables to {bits}"
                f" bits only if it is a multiple of {16 // bits}. Use such a number, or --to torch_export or aoti"
            )
    form = BatchSpec(batch)
    quantized = quantize_inference_model(copy.deepcopy(model), quantization_dtype=_WIDTHS[bits])
    try:
        with torch.no_grad(), trace_compiled_functions_as_plain():
            traced = _trace_with_fx(copy.deepcopy(quantized), form)  # a module can be traced once
            traced.graph.eliminate_dead_code()
            inputs = zip(form.names, (node for node in traced.graph.nodes if node.op == "placeholder"), strict=True)
            if unread := [name for name, node in inputs if not node.users]:
                form = BatchSpec(batch, unread)
                traced = _trace_with_fx(quantized, form)
            torch.jit.script(traced).save(str(file))
    except Exception as error:  # of any type: the model's code is run
        raise SetupError(
            f"{type(model).__name__} cannot be traced for TorchScript: {str(error).strip()[:600]}. Avoid branches on"
            " values and loops over rows in its predict_step or forward"
        ) from error
    return form


def _trace_with_fx(model: nn.Module, form: BatchSpec) -> GraphModule:
    """Trace a quantized model, with an argument for each tensor: TorchScript knows none with a star."""
    names = ", ".join(f"input_{index}" for index in range(len(form.names)))
    space: dict[str, Any] = {}
    exec(f"def forward(self, {names}):\n    return self.scorer({names})", space)
    module = type("NamedInputs", (nn.Module,), {"forward": space["forward"]})()
    module.scorer = Scorer(model, form).eval()
    return symbolic_trace(module, leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"])

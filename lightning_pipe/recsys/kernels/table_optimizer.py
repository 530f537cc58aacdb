"""Optimizers of embedding tables, with every hyper-parameter of their fused kernels explicit.

FBGEMM steps a table inside the backward of its lookup. Its defaults differ from those of ``torch.optim`` (Adagrad's
``eps`` is 1e-8 in FBGEMM and 1e-10 in torch), and it ignores, or fails on, hyper-parameters that its kernel does not
support. Every hyper-parameter is therefore resolved before a table is sharded, or the user gets an error that names the
hyper-parameter and the table. An argument that the user omits takes the kernel's default if the optimizer comes from
``apply_optimizer_in_backward``, as under TorchRec's ``DistributedModelParallel``, so that a script moved from there
gives the same results. It takes the class's default if the optimizer is the strategy's ``sparse_optimizer``.
"""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec import optim as torchrec_optim

from lightning_pipe._compat.torch import get_optimizers_in_backward
from lightning_pipe.engine.common.errors import SetupError

Kind = TypeVar("Kind")

_IMPLEMENTATION_CHOICES = {"foreach", "fused"}  # affect how torch computes a step, but not its result


@dataclass(frozen=True)
class _FusedOptimizerSupport:
    """Support of one optimizer class by the fused kernels.

    Attributes:
        reference: class whose signature defines the hyper-parameters and their defaults, and which steps replicated
            tables. TorchRec's own SGD, Adagrad and Adam are placeholders that do neither.
        passed: hyper-parameters that the kernel supports; all others must have their defaults.
        explicit: hyper-parameters that ``sparse_optimizer`` must set, since kernel and class have different defaults,
            or the class has none.
        cpu: True if FBGEMM has a CPU kernel.
        row_local: True if a step leaves rows without a gradient unchanged. Otherwise a step of a whole replicated table
            differs from a step of the rows that were looked up.
        row_wise_state: True if the state is one number per row; column sharding then multiplies the state.
        row_adam: True if :class:`~lightning_pipe.recsys.kernels.row_adam.RowAdam` replaces a missing CPU kernel, for
            dynamic tables.
    """

    reference: type[torch.optim.Optimizer] | None
    passed: tuple[str, ...]
    explicit: tuple[str, ...] = ()
    cpu: bool = False
    row_local: bool = False
    row_wise_state: bool = False
    row_adam: bool = False


# The kernel's names of hyper-parameters that the classes name differently; TorchRec's users may use either.
_KERNEL_NAMES = {"lr": ("learning_rate",), "betas": ("beta1", "beta2")}
_ADAM = ("lr", "betas", "eps")
_SUPPORTED: dict[type[torch.optim.Optimizer], _FusedOptimizerSupport] = {
    torch.optim.SGD: _FusedOptimizerSupport(torch.optim.SGD, ("lr",), cpu=True, row_local=True),
    torchrec_optim.SGD: _FusedOptimizerSupport(torch.optim.SGD, ("lr",), ("lr",), cpu=True, row_local=True),
    torch.optim.Adagrad: _FusedOptimizerSupport(torch.optim.Adagrad, ("lr", "eps"), cpu=True, row_local=True),
    torchrec_optim.Adagrad: _FusedOptimizerSupport(
        torch.optim.Adagrad, ("lr", "eps"), ("lr", "eps"), cpu=True, row_local=True
    ),
    torchrec_optim.RowWiseAdagrad: _FusedOptimizerSupport(
        torchrec_optim.RowWiseAdagrad, ("lr", "eps"), cpu=True, row_local=True, row_wise_state=True
    ),
    torch.optim.Adam: _FusedOptimizerSupport(torch.optim.Adam, _ADAM, _ADAM, row_adam=True),
    torchrec_optim.Adam: _FusedOptimizerSupport(torch.optim.Adam, _ADAM, _ADAM, row_adam=True),
    torchrec_optim.PartialRowWiseAdam: _FusedOptimizerSupport(
        None, (*_ADAM, "weight_decay"), _ADAM, row_wise_state=True
    ),
    torchrec_optim.LAMB: _FusedOptimizerSupport(None, (*_ADAM, "weight_decay"), _ADAM),
    torchrec_optim.PartialRowWiseLAMB: _FusedOptimizerSupport(
        None, (*_ADAM, "weight_decay"), _ADAM, row_wise_state=True
    ),
    torchrec_optim.LarsSGD: _FusedOptimizerSupport(
        None, ("lr", "eta", "momentum", "weight_decay"), ("lr", "eta", "momentum")
    ),
}


def class_name(optimizer_class: type) -> str:
    """Return the class as a user would write it in YAML, if that is known: ``torch.optim.SGD``."""
    module = optimizer_class.__module__
    for package, public in (("torch.optim", torch.optim), ("torchrec.optim", torchrec_optim)):
        if module.startswith(package) and getattr(public, optimizer_class.__name__, None) is optimizer_class:
            return f"{package}.{optimizer_class.__name__}"
    return f"{module}.{optimizer_class.__qualname__}"


def parse_class_config(option: str, config: Any, kind: type[Kind], example: str) -> tuple[type[Kind], dict[str, Any]]:
    """Read a class and its arguments: ``{"class_path": "torch.optim.Adagrad", "init_args": {"lr": 0.1}}``."""
    keys = set(config) if isinstance(config, Mapping) else set()
    arguments = config.get("init_args") or {} if keys else {}
    if "class_path" not in keys or keys - {"class_path", "init_args"} or not isinstance(arguments, Mapping):
        raise SetupError(
            f"{option} must be a mapping with class_path and, if the class takes arguments, a mapping init_args, got"
            f" {config!r}. Set these keys only, for example class_path: {example}."
        )
    path = configured = config["class_path"]
    if isinstance(path, str):
        module, _, name = path.rpartition(".")
        try:
            configured = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise SetupError(
                f"{option} has class_path {path!r}, which cannot be imported ({error}). Use a full path such as"
                f" {example}."
            ) from error
    if not (isinstance(configured, type) and issubclass(configured, kind)):
        raise SetupError(f"class_path of {option} must be a subclass of {kind.__name__}, got {path!r}. Use {example}.")
    return configured, dict(arguments)


def _has_fused_optimizer_kernel(support: _FusedOptimizerSupport, device: torch.device, is_dynamic: bool) -> bool:
    return support.cpu or device.type != "cpu" or (is_dynamic and support.row_adam)


def _list_usable_optimizers(device: torch.device, is_dynamic: bool) -> str:
    return ", ".join(
        class_name(optimizer_class)
        for optimizer_class, support in _SUPPORTED.items()
        if _has_fused_optimizer_kernel(support, device, is_dynamic)
    )


@dataclass(frozen=True)
class SparseOptimizerConfig:
    """Optimizer of every table that has no other optimizer.

    Args:
        optimizer_class: optimizer class that FBGEMM has a fused kernel for.
        arguments: its arguments, without the parameters.
    """

    optimizer_class: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]

    @classmethod
    def from_config(cls, config: SparseOptimizerConfig | Mapping[str, Any]) -> SparseOptimizerConfig:
        """Read the argument ``sparse_optimizer``; see :func:`parse_class_config`."""
        if isinstance(config, SparseOptimizerConfig):
            return config
        return cls(*parse_class_config("sparse_optimizer", config, torch.optim.Optimizer, "torch.optim.Adagrad"))


@dataclass(frozen=True)
class TableOptimizerSpec:
    """Optimizer of one table, with every hyper-parameter explicit.

    Attributes:
        optimizer_class: the class that the user chose.
        hyper_parameters: all hyper-parameters of the fused kernel, by the class's names.
        unfused_class: class that steps a replicated table; None if only a fused kernel can.
        row_wise_state: True if its state is one number per row.
        left_out: hyper-parameters that the user omitted and for which kernel and class have different defaults: the
            kernel's, which is used, and the class's.
    """

    optimizer_class: type[torch.optim.Optimizer]
    hyper_parameters: Mapping[str, Any]
    unfused_class: type[torch.optim.Optimizer] | None
    row_wise_state: bool
    left_out: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def learning_rate(self) -> float:
        """The base learning rate, before any schedule."""
        return float(self.hyper_parameters["lr"])

    @property
    def name(self) -> str:
        """The class as a user would write it."""
        return class_name(self.optimizer_class)

    def optimizer_kwargs(self) -> dict[str, Any]:
        """Return the hyper-parameters by FBGEMM's names, as TorchRec reads them from ``_optimizer_kwargs``."""
        arguments: dict[str, Any] = {}
        for key, value in self.hyper_parameters.items():
            names = _KERNEL_NAMES.get(key, (key,))
            arguments |= zip(names, value if len(names) > 1 else (value,), strict=True)
        return arguments

    def describe(self) -> str:
        """Return one line that is equal on two ranks exactly if the optimizers are equal."""
        arguments = (f"{key}={value}" for key, value in sorted(self.hyper_parameters.items()))
        return f"{self.name}({', '.join(arguments)})"


def _find_configured_optimizer(
    table: str, parameter: nn.Parameter, default: SparseOptimizerConfig | None
) -> tuple[type[torch.optim.Optimizer], Mapping[str, Any], bool] | None:
    """Return the user's class and arguments for a table, and True if given in TorchRec's way; None without any."""
    optimizers = get_optimizers_in_backward(parameter)
    if len(optimizers) > 1:
        raise SetupError(
            f"table {table} must have one in-backward optimizer, got {len(optimizers)}"
            f" ({', '.join(class_name(optimizer_class) for optimizer_class, _ in optimizers)}). Call"
            " apply_optimizer_in_backward once."
        )
    if optimizers:
        return *optimizers[0], True
    if default is not None:
        return default.optimizer_class, default.arguments, False
    return None


def resolve_table_optimizer(
    table: str,
    parameter: nn.Parameter,
    default: SparseOptimizerConfig | None,
    device: torch.device,
    is_dynamic: bool = False,
) -> TableOptimizerSpec | None:
    """Return the optimizer applied to a table's parameter, or else the default, or else None."""
    chosen = _find_configured_optimizer(table, parameter, default)
    if chosen is None:
        return None
    optimizer_class, arguments, in_backward = chosen
    name = class_name(optimizer_class)
    support = _SUPPORTED.get(optimizer_class)
    if support is None:
        raise SetupError(
            f"table {table} has the optimizer {name}, which has no fused kernel. Use one of"
            f" {_list_usable_optimizers(device, is_dynamic)}."
        )
    if not _has_fused_optimizer_kernel(support, device, is_dynamic):
        raise SetupError(
            f"table {table} has the optimizer {name}, for which FBGEMM has no CPU kernel. On CPU, use one of"
            f" {_list_usable_optimizers(device, is_dynamic)}."
        )
    arguments = {key: value for key, value in arguments.items() if key != "optimizer"}
    defaults = _get_optimizer_class_defaults(support.reference) or dict.fromkeys(support.passed, 0.0)
    left_out: dict[str, tuple[Any, Any]] = {}
    if in_backward:
        arguments = _rename_kernel_to_class_arguments(table, name, support, arguments)
        of_kernel = {key: value for key, value in _get_kernel_optimizer_defaults().items() if key in support.passed}
        left_out = {
            key: (value, defaults[key])
            for key, value in of_kernel.items()
            if key not in arguments and support.reference is not None and value != defaults[key]
        }
        defaults |= of_kernel
    unknown = sorted(set(arguments) - set(defaults))
    if unknown:
        raise SetupError(
            f"table {table}: the optimizer {name} has no argument {', '.join(unknown)}. Remove it; expected"
            f" {', '.join(sorted(defaults))}."
        )
    missing = [] if in_backward else [key for key in support.explicit if key not in arguments]
    if missing:
        raise SetupError(
            f"table {table}: the optimizer {name} requires {', '.join(missing)}, since the defaults of the fused kernel"
            " and the class differ. Set its value."
        )
    _refuse_unsupported_hyper_parameters(table, name, support, arguments)
    hyper_parameters = {key: arguments.get(key, defaults[key]) for key in support.passed if key in defaults}
    _check_hyper_parameters(table, name, support, hyper_parameters)
    return TableOptimizerSpec(
        optimizer_class,
        hyper_parameters,
        support.reference if support.row_local else None,
        support.row_wise_state,
        left_out,
    )


@cache
def _get_kernel_optimizer_defaults() -> Mapping[str, Any]:
    """Return the defaults of FBGEMM's kernels for hyper-parameters that TorchRec omits, by the classes' names."""
    arguments = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
    defaults = {key: arguments[key].default for key in ("eps", "momentum", "weight_decay", "eta")}
    for key, names in _KERNEL_NAMES.items():
        values = tuple(arguments[name].default for name in names)
        defaults[key] = values if len(values) > 1 else values[0]
    return defaults


def _rename_kernel_to_class_arguments(
    table: str, name: str, support: _FusedOptimizerSupport, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments by the class's names. TorchRec passes them by the kernel's names where these differ."""
    by_class_name = dict(arguments)
    for key, names in _KERNEL_NAMES.items():
        by_kernel_name = {
            kernel_name: by_class_name.pop(kernel_name)
            for kernel_name in names
            if key in support.passed and kernel_name in by_class_name
        }
        if not by_kernel_name:
            continue
        if key in by_class_name:
            raise SetupError(
                f"table {table}: the optimizer {name} got {key} and {', '.join(by_kernel_name)}, which have the same"
                f" meaning. Remove {key}."
            )
        default = _get_kernel_optimizer_defaults()[key]
        defaults = default if len(names) > 1 else (default,)
        values = tuple(
            by_kernel_name.get(kernel_name, value) for kernel_name, value in zip(names, defaults, strict=True)
        )
        by_class_name[key] = values if len(names) > 1 else values[0]
    return by_class_name


def _get_optimizer_class_defaults(reference: type[torch.optim.Optimizer] | None) -> dict[str, Any]:
    if reference is None:
        return {}
    return {
        key: argument.default
        for key, argument in inspect.signature(reference).parameters.items()
        if key != "params" and argument.kind is not inspect.Parameter.VAR_KEYWORD
    }


def _refuse_unsupported_hyper_parameters(
    table: str, name: str, support: _FusedOptimizerSupport, arguments: Mapping[str, Any]
) -> None:
    for key, default in _get_optimizer_class_defaults(support.reference).items():
        if key in support.passed or key in _IMPLEMENTATION_CHOICES or arguments.get(key, default) == default:
            continue
        raise SetupError(
            f"table {table}: the optimizer {name} got {key}={arguments[key]!r}, which the fused kernel does not"
            f" support. Leave it at {default!r}."
        )


def _check_hyper_parameters(
    table: str, name: str, support: _FusedOptimizerSupport, hyper_parameters: Mapping[str, Any]
) -> None:
    """Refuse values that turn rows into NaN within a few steps or reverse the step; the class checks the others."""
    for key, value in hyper_parameters.items():
        if key == "betas":
            valid = (
                isinstance(value, Sequence)
                and len(value) == 2
                and all(_is_nonnegative_number(entry, below=1) for entry in value)
            )
            needed = "a pair of numbers from 0 to below 1. Set betas such as (0.9, 0.999)"
        else:
            valid, needed = _is_nonnegative_number(value), f"a finite number of at least 0. Set {key} to another value"
        if not valid:
            raise SetupError(f"table {table}: the optimizer {name} got {key}={value!r}, expected {needed}.")
    try:
        if support.reference is not None:
            support.reference([nn.Parameter(torch.zeros(1, 1))], **hyper_parameters)
    except (TypeError, ValueError) as error:
        raise SetupError(
            f"table {table}: the optimizer {name} does not accept {dict(hyper_parameters)}: {error}. Correct the value."
        ) from error


def _is_nonnegative_number(value: Any, below: float = math.inf) -> bool:
    """Return True for a number, or a tensor of one number, from 0 to below a limit. Text is not a number."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and _is_nonnegative_number(value.item(), below)
    return isinstance(value, numbers.Real) and 0 <= float(value) < below

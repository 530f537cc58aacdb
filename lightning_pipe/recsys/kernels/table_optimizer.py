"""The optimisers of embedding tables: what a fused kernel can do, said in full.

FBGEMM steps a table inside the backward of its lookup. Its defaults are not those of ``torch.optim`` (Adagrad's
``eps`` is 1e-8 in FBGEMM and 1e-10 in torch), and it ignores, or dies on, hyper-parameters it has no kernel for. So
every hyper-parameter is resolved here before a table is sharded, or the user gets an error that names the
hyper-parameter and the table. An argument that the user left out has the kernel's default where the optimiser was given
by ``apply_optimizer_in_backward``, as under TorchRec's ``DistributedModelParallel``, so that a script moved from there
keeps its numbers; and the class's default where it is the strategy's ``sparse_optimizer``.
"""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec import optim as torchrec_optim

from lightning_pipe._compat.torch import optimizers_in_backward
from lightning_pipe.engine.common.errors import SetupError

__all__ = ["SparseOptimizer", "TableOptimizer", "class_name", "resolve_table_optimizer"]

_IMPLEMENTATION_CHOICES = {"foreach", "fused"}  # say how torch computes a step, not what it computes


@dataclass(frozen=True)
class _Support:
    """What the fused kernel of one optimiser class takes.

    Attributes:
        reference: the class whose signature says which hyper-parameters exist and their defaults, and which steps
            replicated tables. TorchRec's own SGD, Adagrad and Adam are placeholders without either.
        passed: hyper-parameters that the kernel takes; every other one must be at its default.
        explicit: hyper-parameters that ``sparse_optimizer`` must give, since kernel and class differ in their defaults,
            or the class has none.
        cpu: whether FBGEMM has a CPU kernel.
        row_local: whether a step leaves rows without a gradient as they are. Where it does not, stepping a whole
            replicated table is another optimiser than stepping the rows that were looked up.
        row_wise_state: whether one number per row is kept: splitting rows by columns makes several of it.
        row_adam: whether :class:`~lightning_pipe.recsys.kernels.row_adam.RowAdam` stands in where there is no CPU
            kernel, for dynamic tables.
    """

    reference: type[torch.optim.Optimizer] | None
    passed: tuple[str, ...]
    explicit: tuple[str, ...] = ()
    cpu: bool = False
    row_local: bool = False
    row_wise_state: bool = False
    row_adam: bool = False


# The kernel's names of what the classes name otherwise; TorchRec's users may give either.
_KERNEL_NAMES = {"lr": ("learning_rate",), "betas": ("beta1", "beta2")}
_ADAM = ("lr", "betas", "eps")
_SUPPORTED: dict[type[torch.optim.Optimizer], _Support] = {
    torch.optim.SGD: _Support(torch.optim.SGD, ("lr",), cpu=True, row_local=True),
    torchrec_optim.SGD: _Support(torch.optim.SGD, ("lr",), ("lr",), cpu=True, row_local=True),
    torch.optim.Adagrad: _Support(torch.optim.Adagrad, ("lr", "eps"), cpu=True, row_local=True),
    torchrec_optim.Adagrad: _Support(torch.optim.Adagrad, ("lr", "eps"), ("lr", "eps"), cpu=True, row_local=True),
    torchrec_optim.RowWiseAdagrad: _Support(
        torchrec_optim.RowWiseAdagrad, ("lr", "eps"), cpu=True, row_local=True, row_wise_state=True
    ),
    torch.optim.Adam: _Support(torch.optim.Adam, _ADAM, _ADAM, row_adam=True),
    torchrec_optim.Adam: _Support(torch.optim.Adam, _ADAM, _ADAM, row_adam=True),
    torchrec_optim.PartialRowWiseAdam: _Support(None, (*_ADAM, "weight_decay"), _ADAM, row_wise_state=True),
    torchrec_optim.LAMB: _Support(None, (*_ADAM, "weight_decay"), _ADAM),
    torchrec_optim.PartialRowWiseLAMB: _Support(None, (*_ADAM, "weight_decay"), _ADAM, row_wise_state=True),
    torchrec_optim.LarsSGD: _Support(None, ("lr", "eta", "momentum", "weight_decay"), ("lr", "eta", "momentum")),
}


def class_name(optimizer_class: type) -> str:
    """The class as a user would write it in YAML, as far as that is known: ``torch.optim.SGD``."""
    module = optimizer_class.__module__
    for package, public in (("torch.optim", torch.optim), ("torchrec.optim", torchrec_optim)):
        if module.startswith(package) and getattr(public, optimizer_class.__name__, None) is optimizer_class:
            return f"{package}.{optimizer_class.__name__}"
    return f"{module}.{optimizer_class.__qualname__}"


def _has_kernel(support: _Support, device: torch.device, is_dynamic: bool) -> bool:
    return support.cpu or device.type != "cpu" or (is_dynamic and support.row_adam)


def _usable(device: torch.device, is_dynamic: bool) -> str:
    return ", ".join(
        class_name(optimizer_class)
        for optimizer_class, support in _SUPPORTED.items()
        if _has_kernel(support, device, is_dynamic)
    )


@dataclass(frozen=True)
class SparseOptimizer:
    """An optimiser for every table that has none of its own.

    Args:
        optimizer_class: an optimiser class that FBGEMM has a fused kernel for.
        arguments: its arguments, without the parameters.
    """

    optimizer_class: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]

    @classmethod
    def from_config(cls, config: SparseOptimizer | Mapping[str, Any]) -> SparseOptimizer:
        """Reads ``{"class_path": "torch.optim.Adagrad", "init_args": {"lr": 0.1}}``, as YAML gives it.

        Raises:
            SetupError: another key, a class that cannot be imported, or one that is no optimiser.
        """
        if isinstance(config, SparseOptimizer):
            return config
        if not isinstance(config, Mapping):
            raise SetupError(
                f"sparse_optimizer is {config!r}; needed is a mapping with class_path and init_args, for example"
                " {'class_path': 'torch.optim.Adagrad', 'init_args': {'lr': 0.1}}"
            )
        unknown = sorted(set(config) - {"class_path", "init_args"})
        if unknown or "class_path" not in config:
            raise SetupError(
                f"sparse_optimizer has the keys {sorted(config)}; needed are class_path and, where the class takes"
                f" arguments, init_args{f'; take out {unknown}' if unknown else ''}"
            )
        path = config["class_path"]
        found = path
        if isinstance(path, str):
            module_name, _, name = path.rpartition(".")
            try:
                found = getattr(importlib.import_module(module_name), name)
            except (ImportError, AttributeError, ValueError) as error:
                raise SetupError(
                    f"sparse_optimizer names the class {path!r}, which cannot be imported ({error}); needed is a"
                    " full path such as torch.optim.Adagrad"
                ) from error
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            raise SetupError(f"sparse_optimizer names {path!r}, which is no torch.optim.Optimizer class")
        return cls(found, dict(config.get("init_args") or {}))


@dataclass(frozen=True)
class TableOptimizer:
    """The optimiser of one table, every hyper-parameter said.

    Attributes:
        optimizer_class: the class the user named.
        hyper_parameters: all that the fused kernel takes, in the class's own names.
        step_class: the class that steps a replicated table, None where only a fused kernel can.
        row_wise_state: whether its state is one number per row.
        left_out: hyper-parameters that the user left out, and of which kernel and class have other defaults: the
            kernel's, which is used, and the class's.
    """

    optimizer_class: type[torch.optim.Optimizer]
    hyper_parameters: Mapping[str, Any]
    step_class: type[torch.optim.Optimizer] | None
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

    def fused_arguments(self) -> dict[str, Any]:
        """The hyper-parameters in FBGEMM's names, as TorchRec reads them from a parameter's ``_optimizer_kwargs``."""
        arguments: dict[str, Any] = {}
        for key, value in self.hyper_parameters.items():
            names = _KERNEL_NAMES.get(key, (key,))
            arguments |= zip(names, value if len(names) > 1 else (value,), strict=True)
        return arguments

    def describe(self) -> str:
        """One line that is the same on two ranks exactly if the optimisers are."""
        arguments = (f"{key}={value}" for key, value in sorted(self.hyper_parameters.items()))
        return f"{self.name}({', '.join(arguments)})"


def _chosen(
    table: str, parameter: nn.Parameter, default: SparseOptimizer | None
) -> tuple[type[torch.optim.Optimizer], Mapping[str, Any], bool] | None:
    """The class and arguments that the user gave this table, and whether in TorchRec's way; None without any."""
    given = optimizers_in_backward(parameter)
    if len(given) > 1:
        raise SetupError(
            f"table {table} has {len(given)} in-backward optimisers"
            f" ({', '.join(class_name(one) for one, _ in given)}); one table takes one: call"
            " apply_optimizer_in_backward once"
        )
    if given:
        return *given[0], True
    if default is not None:
        return default.optimizer_class, default.arguments, False
    return None


def resolve_table_optimizer(
    table: str,
    parameter: nn.Parameter,
    default: SparseOptimizer | None,
    device: torch.device,
    is_dynamic: bool = False,
) -> TableOptimizer | None:
    """The optimiser of one table: the one applied to its parameter, else the default, else None.

    Args:
        table: name of the table, for messages.
        parameter: the table as the user's module holds it, unsharded.
        default: optimiser of tables that have none of their own.
        device: where the table will live.
        is_dynamic: whether the table has no size.

    Raises:
        SetupError: a class or hyper-parameter that FBGEMM's kernel on this device does not do as the class does.
    """
    chosen = _chosen(table, parameter, default)
    if chosen is None:
        return None
    optimizer_class, arguments, in_backward = chosen
    name = class_name(optimizer_class)
    support = _SUPPORTED.get(optimizer_class)
    if support is None:
        raise SetupError(
            f"table {table} asks for the optimiser {name}, for which there is no fused kernel; use one of"
            f" {_usable(device, is_dynamic)}"
        )
    if not _has_kernel(support, device, is_dynamic):
        raise SetupError(
            f"table {table} asks for the optimiser {name}, which FBGEMM has no CPU kernel for; on CPU use one of"
            f" {_usable(device, is_dynamic)}"
        )
    arguments = {key: value for key, value in arguments.items() if key != "optimizer"}
    defaults = _defaults(support.reference) or dict.fromkeys(support.passed, 0.0)
    left_out: dict[str, tuple[Any, Any]] = {}
    if in_backward:
        arguments = _in_names_of_class(table, name, support, arguments)
        of_kernel = {key: value for key, value in _kernel_defaults().items() if key in support.passed}
        left_out = {
            key: (value, defaults[key])
            for key, value in of_kernel.items()
            if key not in arguments and support.reference is not None and value != defaults[key]
        }
        defaults |= of_kernel
    unknown = sorted(set(arguments) - set(defaults))
    if unknown:
        raise SetupError(
            f"table {table}: the optimiser {name} has no argument {', '.join(unknown)}; it takes"
            f" {', '.join(sorted(defaults))}"
        )
    missing = [] if in_backward else [key for key in support.explicit if key not in arguments]
    if missing:
        raise SetupError(
            f"table {table}: give the optimiser {name} its {', '.join(missing)}; the fused kernel's defaults are not"
            " the class's, so none is assumed"
        )
    _refuse_what_no_kernel_does(table, name, support, arguments)
    hyper_parameters = {key: arguments.get(key, defaults[key]) for key in support.passed if key in defaults}
    _check_values(table, name, support, hyper_parameters)
    return TableOptimizer(
        optimizer_class,
        hyper_parameters,
        support.reference if support.row_local else None,
        support.row_wise_state,
        left_out,
    )


@cache
def _kernel_defaults() -> Mapping[str, Any]:
    """What FBGEMM's kernels take for hyper-parameters that TorchRec does not pass, in the classes' names."""
    arguments = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
    found = {key: arguments[key].default for key in ("eps", "momentum", "weight_decay", "eta")}
    for key, names in _KERNEL_NAMES.items():
        values = tuple(arguments[name].default for name in names)
        found[key] = values if len(values) > 1 else values[0]
    return found


def _in_names_of_class(table: str, name: str, support: _Support, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as the class names them; TorchRec hands on what the kernel names otherwise."""
    found = dict(arguments)
    for key, names in _KERNEL_NAMES.items():
        given = {one: found.pop(one) for one in names if key in support.passed and one in found}
        if not given:
            continue
        if key in found:
            raise SetupError(
                f"table {table}: the optimiser {name} is given {key} and {', '.join(given)}, which say the same; leave"
                f" {key} out"
            )
        default = _kernel_defaults()[key]
        defaults = default if len(names) > 1 else (default,)
        values = tuple(given.get(one, value) for one, value in zip(names, defaults, strict=True))
        found[key] = values if len(names) > 1 else values[0]
    return found


def _defaults(reference: type[torch.optim.Optimizer] | None) -> dict[str, Any]:
    if reference is None:
        return {}
    return {
        key: argument.default
        for key, argument in inspect.signature(reference).parameters.items()
        if key != "params" and argument.kind is not inspect.Parameter.VAR_KEYWORD
    }


def _refuse_what_no_kernel_does(table: str, name: str, support: _Support, arguments: Mapping[str, Any]) -> None:
    for key, default in _defaults(support.reference).items():
        if key in support.passed or key in _IMPLEMENTATION_CHOICES or arguments.get(key, default) == default:
            continue
        raise SetupError(
            f"table {table}: the optimiser {name} is given {key}={arguments[key]!r}, which the fused kernel does not"
            f" do; leave it at {default!r}"
        )


def _check_values(table: str, name: str, support: _Support, hyper_parameters: Mapping[str, Any]) -> None:
    """Refuses what makes rows NaN in a step or two, or steps them upwards; the rest the class itself may judge."""
    for key, value in hyper_parameters.items():
        if key == "betas":
            valid = isinstance(value, Sequence) and len(value) == 2 and all(_is_number(one, below=1) for one in value)
            needed = "a pair of numbers from 0 to below 1: give betas such as (0.9, 0.999)"
        else:
            valid, needed = _is_number(value), f"a finite number, 0 or more: give {key} another value"
        if not valid:
            raise SetupError(f"table {table}: the optimiser {name} is given {key}={value!r}; needed is {needed}")
    try:
        if support.reference is not None:
            support.reference([nn.Parameter(torch.zeros(1, 1))], **hyper_parameters)
    except (TypeError, ValueError) as error:
        raise SetupError(
            f"table {table}: the optimiser {name} cannot take {dict(hyper_parameters)}: {error}; mend the value"
        ) from error


def _is_number(value: Any, below: float = math.inf) -> bool:
    """Whether it is one from 0 to below a limit; a tensor of one is, text is not."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and _is_number(value.item(), below)
    return isinstance(value, numbers.Real) and 0 <= float(value) < below

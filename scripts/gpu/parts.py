"""The parts of ``make gpu``, in the order in which they run: the most important results come first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scripts.gpu.comparison import Rule

__all__ = ["Command", "Part", "parts"]


@dataclass(frozen=True)
class Command:
    """A program of a part. In its arguments, ``{folder}`` is the part's folder.

    Attributes:
        module: module that is run.
        arguments: arguments of the command line.
        ranks: number of processes that torchrun starts (default 0: none).
        tool: command line of a tool that runs the program (default: none).
        marks: texts that the output must contain.
        environment: additional variables.
    """

    module: str
    arguments: tuple[str, ...] = ()
    ranks: int = 0
    tool: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def line(self, folder: str) -> list[str]:
        """Command line."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        launcher = torchrun if self.ranks else []
        line = [*self.tool, sys.executable, *launcher, "-m", self.module, *self.arguments]
        return [argument.replace("{folder}", folder) for argument in line]


@dataclass(frozen=True)
class Part:
    """Programs with one result.

    Attributes:
        name: name of its result and folder.
        shows: subject of the part, for the report.
        commands: programs, run one after the other.
        rules: comparisons of the values that they save.
        needs: "gpu", "torchrec", "stages" (of language models), "package NAME", or names of tools on PATH.
        possible: program that fails, with a reason in its last line, if this machine cannot run the part.
        look_at: for a part that may differ, where to look if it does.
        seconds: time limit of all programs together.
    """

    name: str
    shows: str
    commands: tuple[Command, ...]
    rules: tuple[Rule, ...] = ()
    needs: tuple[str, ...] = ()
    possible: Command | None = None
    look_at: str = ""
    seconds: float = 90


_EXACT = ("base", "threaded_input", "prefetch", "early_prefetch", "fused_sparse_dist")
_ROWS = ("prefetch:device", "early_prefetch:device", "prefetch:host_rows", "prefetch:resumed", "prefetch:profiled")
_MANAGED = ("base", "threaded_input", "prefetch", "early_prefetch", "prefetch:resumed")
_TORCHREC = ("TrainPipelineBase", "TrainPipelineSparseDist")
_ON_GPU = ("PrefetchTrainPipelineSparseDist", "TrainPipelineFusedSparseDist")
_SCHEDULES = (
    *("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"),
)
_FLOAT32, _BF16, _KERNELS_BF16 = 1e-5, 2.0**-8, 2.0**-4  # bf16 rounds by 2**-9; other kernels round other sums
_BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
_CACHE = (
    "FBGEMM must protect the cached rows of batches in flight (prefetch_pipeline, which the tables are made with)."
    " EmbPrefetch does not declare that it"
    " writes tables, although it moves rows between cache and host. If only the plans that prefetch ahead differ,"
    " look at the order of EmbPrefetch and EmbBackward and at their streams; if TorchRec's pipeline differs too, look"
    " at FBGEMM."
)


def _id_tables(dry: bool, program: Callable[..., Command], possible: Command) -> list[Part]:
    """Parts with dynamic tables and with managed collision. The host chooses rows to evict, or a map on the device."""
    figures = ("--json", "{folder}/figures.json")
    batch, steps = ("64", "6") if dry else ("512", "20")

    def trains(tables: str, *ways: str, more: tuple[str, ...] = (), **options: Any) -> Command:
        size = ("--tables", tables, "--batch", batch, "--steps", steps, *more)
        return program("id_tables", *ways, size=size, **options)

    def on_cpu(tables: str, *ways: str, **options: Any) -> tuple[tuple[Command, ...], tuple[Rule, ...]]:
        """Program and rules of a comparison with the CPU; none in a dry run."""
        if dry:
            return (), ()
        rules = (Rule(way, (way,), "close", reference_file="cpu.pt", terms=int(batch)) for way in ways)
        return (trains(tables, *ways, file="cpu.pt", on="cpu", **options),), tuple(rules)

    pairs, both = ("adam", "fp16"), ("prefetch:device", "prefetch:resumed")
    dynamic, maps = ("serial", "semi_sync"), ("serial", "serial:window")
    (dynamic_cpu, dynamic_close), (maps_cpu, maps_close) = on_cpu("dynamic", *dynamic), on_cpu("managed", *maps)
    ranks_cpu, ranks_close = on_cpu("dynamic", "serial", ranks=2)
    return [
        Part(
            "recsys_dynamic",
            "dynamic tables: plans, ids on the device, rows on the host, background commits, resume, profile, Adam",
            (
                trains(
                    "dynamic",
                    *("serial", *_EXACT, *_ROWS, "semi_sync"),
                    *(f"{plan}:{pair}" for pair in pairs for plan in ("serial", "prefetch")),
                    more=figures,
                ),
                *dynamic_cpu,
            ),
            (
                Rule("serial", (*_EXACT, *_ROWS)),
                *(Rule(f"serial:{pair}", (f"prefetch:{pair}",)) for pair in pairs),
                Rule("serial", ("semi_sync",), "different"),
                *dynamic_close,
            ),
            ("torchrec",),
            seconds=150,
        ),
        Part(
            "recsys_dynamic_ranks",
            "dynamic tables on two ranks on one device, with a resumed run",
            (trains("dynamic", "serial", *both, ranks=2), *ranks_cpu),
            (Rule("serial", both), *ranks_close),
            ("torchrec",),
            possible,
            seconds=150,
        ),
        Part(
            "recsys_collisions",
            "managed collision: plans, resume, random filters, and accumulate_tables='window'",
            (
                trains(
                    "managed",
                    *("serial", *_MANAGED, "serial:micro_batch"),
                    *(f"{plan}:{variant}" for variant in ("filtered", "window") for plan in ("serial", "prefetch")),
                    more=figures,
                ),
                *maps_cpu,
            ),
            (
                Rule("serial", _MANAGED),
                *(Rule(f"serial:{variant}", (f"prefetch:{variant}",)) for variant in ("filtered", "window")),
                Rule("serial", ("serial:filtered",), "different"),
                Rule("serial:window", ("serial:micro_batch",), "different"),
                *maps_close,
            ),
            ("torchrec",),
        ),
    ]


def _language(dry: bool, program: Callable[..., Command], probe: Command) -> list[Part]:
    """Parts with language models. Ranks that share a GPU send messages through the host, so most parts have one."""
    device = ("--device", "cpu" if dry else "cuda")
    figures = ("--json", "{folder}/figures.json")
    steps = ("--steps", "6") if dry else ("--steps", "12")
    rows = ("--steps", "3", "--length", "32") if dry else ("--steps", "4", "--length", "256")
    two = ("1f1b", "zbv_zero_bubble")

    def close(reference: str, ways: tuple[str, ...], within: float = _FLOAT32) -> Rule:
        return Rule(reference, ways, "close", within=within, part=True)

    def variants(name: str, *schedules: str) -> tuple[str, ...]:
        return tuple(f"{schedule}:{name}" for schedule in schedules)

    bf16, compiled, sharded = (
        variants("bf16", *_SCHEDULES),
        variants("compiled", *two),
        variants("sharded", *_SCHEDULES),
    )
    # On a CPU, the other two have no backward; varlen_attn has no float32.
    kernels = ("sdpa",) if dry else ("sdpa", "flex_attention")
    packed = tuple(f"{schedule}+{kernel}" for kernel in kernels for schedule in two)
    packed_bf16 = variants("bf16", *packed, *(() if dry else ("1f1b+varlen_attn", "zbv_zero_bubble+varlen_attn")))
    adapted = variants("lora", "1f1b+sdpa", "zbv_zero_bubble+sdpa")
    step: tuple[str, ...] = ("--micro-batches", "4", "--schedules", "1f1b", "--rounds", "2", "--steps", "2")
    step += ("--width", "64", "--rows", "8", "--length", "16")
    memory: tuple[str, ...] = ("--schedules", "1f1b", "--width", "64", "--layers", "4", "--length", "64")
    if not dry:
        step = ("--micro-batches", "4", "--schedules", *two, "--rounds", "6", "--steps", "10")
        step += ("--width", "512", "--layers", "8", "--length", "256")
        memory = ("--schedules", *two, "--width", "1024", "--length", "512")
    speed = Command("benchmarks.llm_step_time", (*device, *step, *figures), ranks=1)
    return [
        Part(
            "language",
            "LLM strategies against a plain loop, two ranks on one device: all schedules, bf16, resume",
            (program("language", "whole", "whole:bf16", *_SCHEDULES, *bf16, "1f1b:resumed", size=steps, ranks=2),),
            (
                close("whole", _SCHEDULES),
                close("whole:bf16", bf16, _BF16),
                Rule("1f1b", ("1f1b:resumed",)),
                Rule("whole", ("whole:bf16",), "different"),
            ),
            ("stages",),
        ),
        Part(
            "language_compiled",
            "compiled layers, also with the backward in two parts, against a plain loop",
            (program("language", "whole", *compiled, size=steps),),
            (close("whole", compiled),),
            ("stages", *(() if dry else ("package triton",))),
            seconds=120,
        ),
        Part(
            "language_kernels",
            "packed documents with FlexAttention and varlen_attn against the documents one by one, also in bf16"
            + (". Left out on a CPU: both kernels, which have no backward there; sdpa runs instead" if dry else ""),
            (program("hugging_face", "documents", *packed, "documents:bf16", *packed_bf16, size=rows),),
            (close("documents", packed), close("documents:bf16", packed_bf16, _KERNELS_BF16)),
            ("stages", "package transformers"),
            seconds=120,
        ),
        Part(
            "language_sharded",
            "stages that FSDP2 shards over one rank, against a plain loop",
            (program("language", "whole", *sharded, size=steps),),
            (close("whole", sharded),),
            ("stages",),
        ),
        Part(
            "language_lora",
            "LoRA adapters in stages against peft in a plain loop",
            (program("hugging_face", "documents:lora", *adapted, size=rows),),
            (close("documents:lora", adapted),),
            ("stages", "package transformers", "package peft"),
        ),
        Part(
            "language_memory",
            "memory in training / the figure of lightning-pipe llm estimate",
            (Command("benchmarks.llm_estimate", (*device, "--by-rank", *memory, *figures), ranks=1),),
            needs=("stages", "package transformers"),
        ),
        Part(
            "language_speed",
            "step time against a plain loop and PyTorch's schedule driven by hand, in turns, and tokens a second",
            (speed,),
            needs=("stages",),
            seconds=120,
        ),
        Part(
            "language_devices",
            "two stages on two GPUs with NCCL" + (" (here two processes with Gloo)" if dry else ""),
            (
                program("language", "whole", *two, size=steps, ranks=2),
                *(() if dry else (replace(speed, ranks=2),)),
            ),
            (close("whole", two),),
            ("stages",),
            probe,
        ),
    ]


def parts(dry: bool) -> list[Part]:
    """All parts. A dry run has tiny sizes, and trains on the CPU what does not require a GPU."""
    kind = "cpu" if dry else "cuda"
    device, sizes = ("--device", kind), ("--steps", "6") if dry else ("--steps", "20", "--batch", "512")
    precisions = ("bf16",) if dry else ("bf16", "fp16")
    largest = 64 if dry else 512

    def program(
        module: str, *ways: str, file: str = "values.pt", on: str = "", size: tuple[str, ...] = (), **more: object
    ) -> Command:
        saved = ("--save", f"{{folder}}/{file}")
        arguments = (*(("--device", on) if on else device), *(size or sizes), *saved, "--ways", *ways)
        return Command(f"scripts.gpu.{module}", arguments, **more)  # type: ignore[arg-type]

    def probe(*arguments: str) -> Command:
        return Command("scripts.gpu.probe", (*device, *arguments), ranks=2)

    steps = ("--steps", "6") if dry else ("--steps", "12")
    recsys = ("serial", *_EXACT, *_TORCHREC, "serial:pageable", "prefetch:pageable", "semi_sync", "semi_sync:pageable")
    on_gpu = () if dry else _ON_GPU
    exact = [Rule("serial", (*recsys[1:-2], *on_gpu)), Rule("semi_sync", ("semi_sync:pageable",))]
    exact.append(Rule("serial", ("semi_sync",), "different"))
    commands = [program("training", *recsys, *on_gpu, *(() if dry else ("TrainPipelineSemiSync",)))]
    if not dry:
        exact.append(Rule("semi_sync", ("TrainPipelineSemiSync",)))
        exact.append(Rule("serial", ("serial",), "close", reference_file="cpu.pt", terms=largest))
        exact.append(Rule("semi_sync", ("semi_sync",), "close", reference_file="cpu.pt", terms=largest))
        commands.append(program("training", "serial", "semi_sync", file="cpu.pt", on="cpu"))
    fits = ("serial", "prefetch", "prefetch:resumed")
    types = [f"{plan}:{precision}" for precision in precisions for plan in ("serial", "prefetch")]
    evaluated = tuple(f"{plan}:evaluated" for plan in ("serial", "prefetch", "fused_sparse_dist"))
    cached = ("serial", *_EXACT, *evaluated, "PrefetchTrainPipelineSparseDist")
    clipped = tuple(f"{plan}:clipped" for plan in ("serial", *_EXACT))
    three = ("base", "prefetch", "fused_sparse_dist")
    tiny = ("--steps", "3", "--batch", "16")
    figures = ("--json", "{folder}/figures.json")
    step: tuple[str, ...] = ("--sizes", "tiny", "--plans", "base", "--rounds", "2", "--steps", "2")
    if not dry:
        step = ("--sizes", "small", "large", "--plans", "base", "serial", "--rounds", "6", "--steps", "20")
    live = ("--steps", "3", "--batch", "32", "--plans", "base", "prefetch") if dry else ()
    return [
        *_language(dry, program, probe("all_to_all", "--own-devices")),
        Part(
            "recsys",
            "every plan against serial and TorchRec's pipelines, one rank, pinned and pageable batches",
            tuple(commands),
            tuple(exact),
            ("torchrec",),
        ),
        Part(
            "recsys_fits",
            "plans under a Trainer: checkpoint and resume, bf16 and fp16",
            (program("fitting", *fits, *types),),
            (
                Rule("serial", fits[1:]),
                *(Rule(f"serial:{precision}", (f"prefetch:{precision}",)) for precision in precisions),
                *(Rule("serial", (f"serial:{precision}",), "different") for precision in precisions),
            ),
            ("torchrec",),
        ),
        Part(
            "recsys_two_ranks",
            "every plan against serial and TorchRec's pipelines, two ranks on one device",
            (program("training", "serial", *_EXACT, "compute_ahead", *_TORCHREC, ranks=2),),
            (Rule("serial", (*_EXACT, "compute_ahead", *_TORCHREC)),),
            ("torchrec",),
            probe("all_to_all"),
        ),
        *(
            Part(
                f"recsys_{name}",
                f"tables in {where}",
                (program("training", *cached, *clipped, size=(*sizes, "--kernel", kernel)),),
                (
                    Rule("serial", cached[1:]),
                    Rule("serial:clipped", clipped[1:]),
                    Rule("serial", ("serial:clipped",), "different"),
                ),
                ("gpu", "torchrec"),
                look_at=_CACHE,
                seconds=150,
            )
            for name, where, kernel in (
                ("cached", "unified memory with a cache on the GPU (managed caching)", "fused_uvm_caching"),
                ("unified", "unified memory without a cache (UVM)", "fused_uvm"),
            )
        ),
        *_id_tables(dry, program, probe("all_to_all")),
        Part(
            "pipe",
            "in_process_pipeline: two partitions on one device, CPU + device, resume, half precision",
            (
                program(
                    "pipes",
                    "whole",
                    "one",
                    "two",
                    "mixed",
                    "two:resumed",
                    *(f"{way}:{precision}" for precision in precisions for way in ("one", "two")),
                    size=steps,
                ),
            ),
            (
                Rule("one", ("two",)),
                Rule("two", ("two:resumed",)),
                Rule("whole", ("one", "two", "mixed"), "close", terms=64),
                *(Rule(f"one:{precision}", (f"two:{precision}",)) for precision in precisions),
                *(Rule("one", (f"one:{precision}",), "different") for precision in precisions),
            ),
        ),
        Part(
            "blocking",
            "CUDA_LAUNCH_BLOCKING=1 changes no value",
            (
                program("training", "serial", *three, file="free.pt"),
                program("training", "serial", *three, environment=_BLOCKING),
            ),
            tuple(Rule(way, (way,), reference_file="free.pt") for way in ("serial", *three)),
            ("gpu", "torchrec"),
        ),
        Part(
            "speed",
            "step time against TorchRec's train pipelines, in turns",
            (Command("benchmarks.recsys_step", (*step, *figures), ranks=1),),
            needs=("torchrec",),
            seconds=120,
        ),
        Part(
            "timing",
            "auto, exposed time of each task, and a trace with streams (trace.json, for ui.perfetto.dev)",
            (program("fitting", "prefetch:traced", "prefetch:profiled", "auto", size=(*sizes, *figures)),),
            needs=("torchrec",),
        ),
        Part(
            "memory",
            "bytes of batches in flight under each plan",
            (Command("benchmarks.recsys_live_bytes", (*live, *figures), ranks=1),),
            needs=("torchrec",),
        ),
        Part(
            "speed_torchrec",
            "step time with the sizes of TorchRec's benchmark of train pipelines, in turns",
            (
                Command(
                    "benchmarks.recsys_step",
                    ("--sizes", "torchrec", "--plans", "base", "--rounds", "4", "--steps", "5", *figures),
                    ranks=1,
                ),
            ),
            needs=("gpu", "torchrec"),
            seconds=150,
        ),
        *(
            Part(
                tool,
                f"compute-sanitizer {tool} on a step of three plans",
                (
                    program(
                        "training",
                        *three,
                        size=tiny,
                        tool=("compute-sanitizer", "--tool", tool, *quiet, "--error-exitcode", "86"),
                        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
                        marks=("ERROR SUMMARY: 0 errors" if tool == "memcheck" else "RACECHECK SUMMARY: 0 hazards",),
                    ),
                ),
                (Rule("base", three[1:]),),
                needs=("gpu", "torchrec", "compute-sanitizer"),
                seconds=150,
            )
            # NCCL tries which of its kernels the GPU can run.
            for tool, quiet in (("memcheck", ("--report-api-errors", "no")), ("racecheck", ()))
        ),
        Part(
            "nsight",
            "ranges named by tasks in Nsight Systems (nsight.nsys-rep)",
            (
                program(
                    "fitting",
                    "prefetch:traced",
                    tool=(
                        *["nsys", "profile", "--stats=true", "--trace=cuda,nvtx", "--force-overwrite=true", "-o"],
                        "{folder}/nsight",
                    ),
                    marks=("EmbPrefetch", "DenseForward", "DenseBackward"),
                ),
            ),
            needs=("gpu", "torchrec", "nsys"),
        ),
    ]

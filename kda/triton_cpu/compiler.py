# SPDX-License-Identifier: Apache-2.0
"""Triton's first door to the backend: options, and the stages ttir, llir, asm (for dumps) and obj."""
from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import sys
from types import ModuleType

if "triton" not in sys.modules:
    raise ImportError(f"import triton before {__name__}: Triton imports it while it looks for backends")

from triton import knobs
from triton._C.libtriton import ir, passes
from triton.backends.compiler import BaseBackend, GPUTarget, Language

from kda.triton_cpu import VERSION, objects, other_backend, runtime

# Options of the GPU backends that a launch may name and that mean nothing here.
_IGNORED = dict(
    maxnreg=None, ptx_version=None, ptx_options=None, ir_override=None, waves_per_eu=0, matrix_instr_nonkdim=0, kpack=1,
    schedule_hint="", cluster_dims=(1, 1, 1), launch_pdl=False, num_buffers_warp_spec=0, num_consumer_groups=0,
    reg_dec_producer=0, reg_inc_consumer=0, minRegAutoWS=None, maxRegAutoWS=None, allow_flush_denorm=False,
    instrumentation_mode="", fpsan_homomorphic_casts=False,
)  # fmt: skip


def _truthy(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "on", "yes", "y")


@dataclasses.dataclass(frozen=True)
class CPUOptions:
    """Options of a compilation: what Triton's frontend reads, and what the lowering does.

    `bounds` compiles every access with a check against the tensors passed in (KDA_CPU_BOUNDS=1). The options that
    only shape GPU code (`num_warps`, `num_stages`, ..) are accepted and change nothing.
    """

    num_warps: int = 4
    num_ctas: int = 1
    num_stages: int = 1
    warp_size: int = 1
    shared: int = 0
    launch_cooperative_grid: bool = False
    enable_fp_fusion: bool = True
    supported_fp8_dtypes: tuple[str, ...] = ("fp8e4nv", "fp8e5", "fp8e4b8", "fp8e5b16")
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "ieee"
    allowed_dot_input_precisions: tuple[str, ...] = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")
    max_num_imprecise_acc_default: int = 0
    extern_libs: dict | None = None
    debug: bool = False
    sanitize_overflow: bool = True
    arch: str | None = None
    backend_name: str = "cpu"
    bounds: bool = False

    def hash(self) -> str:
        shaping = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)
                   if field.name not in _NOT_SHAPING]  # fmt: skip
        return hashlib.sha256(repr(shaping).encode()).hexdigest()


# Neither the TTIR nor the code depends on these (num_warps can reach the TTIR: a kernel may ask for it).
_NOT_SHAPING = ("num_stages", "launch_cooperative_grid", "extern_libs", "shared", "backend_name")


@functools.cache
def _sources() -> str:
    """A digest of this package's source files: other code may come of the same TTIR when they change."""
    digest = hashlib.sha256(VERSION.encode())
    for path in sorted(pathlib.Path(__file__).parent.rglob("*.py")):
        try:
            digest.update(path.read_bytes())
        except OSError:
            continue
    return digest.hexdigest()


class CPUBackend(BaseBackend):
    """Compiles TTIR to object code for this machine's processor.

    A target is `GPUTarget("cpu", isa, 1)` with a processor path of `runtime.ISAS`; any other `arch` stands for the
    path that is selected on this machine.
    """

    supports_native_tensor_specialization = True
    binary_ext = "obj"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def __init__(self, target: GPUTarget) -> None:
        super().__init__(target)
        self.isa = target.arch if target.arch in runtime.ISAS else runtime.selected_isa()

    @functools.lru_cache  # noqa: B019 - Triton makes few backends and keeps them
    def hash(self) -> str:
        import llvmlite

        of = runtime.features(self.isa)
        parts = ("cpu", VERSION, _sources(), llvmlite.__version__, of.isa, of.cpu, of.features, str(of.vector_bytes))
        return hashlib.sha256("-".join(parts).encode()).hexdigest()

    def parse_options(self, opts: dict) -> CPUOptions:
        known = {field.name for field in dataclasses.fields(CPUOptions)}
        args = {name: value for name, value in opts.items() if name in known and value is not None}
        args = {name: tuple(value) if isinstance(value, list) else value for name, value in args.items()}
        args["arch"] = self.isa
        args.setdefault("bounds", _truthy("KDA_CPU_BOUNDS"))
        options = CPUOptions(**args)
        # Triton refuses a launch option that the parsed options do not hold.
        for name, value in _IGNORED.items():
            options.__dict__.setdefault(name, opts.get(name, value))
        return options

    def pack_metadata(self, metadata) -> tuple:
        return (metadata.num_warps, metadata.num_ctas, metadata.shared)

    def get_codegen_implementation(self, options: CPUOptions) -> dict:
        return {"min_dot_size": lambda lhs, rhs: (1, 1, 1)}

    def get_module_map(self) -> dict[str, ModuleType]:
        from kda.triton_cpu import libdevice

        return {"triton.language.extra.libdevice": libdevice}

    def load_dialects(self, context) -> None:
        pass

    # -- stages

    def add_stages(self, stages: dict, options: CPUOptions, language: Language) -> None:
        if language != Language.TRITON:
            raise NotImplementedError("the cpu backend compiles Triton kernels; Gluon kernels are for GPUs")
        from kda.triton_cpu import codegen

        features = runtime.features(self.isa)
        # The optimised module, so that later stages need not parse its text again.
        made: dict[str, object] = {}

        def make_llir(module, metadata):
            made["llir"], made["module"] = self.make_llir(module, metadata, options, features)
            return made["llir"]

        def make_asm(llir, metadata):
            module = made["module"] if llir is made.get("llir") else codegen.parse(llir)
            made["obj"] = codegen.object_code(module, features)
            return codegen.assembly(module, features)

        def make_obj(source, metadata):
            code = made.get("obj")
            if code is None:
                module = made["module"] if source is made.get("llir") else codegen.parse(source)
                code = codegen.object_code(module, features)
            return objects.seal(code, metadata["hash"], self.isa)

        stages["ttir"] = lambda module, metadata: self.make_ttir(module, metadata, options)
        stages["llir"] = make_llir
        if knobs.compilation.dump_ir:
            stages["asm"] = make_asm
        stages["obj"] = make_obj
        if knobs.runtime.add_stages_inspection_hook is not None:
            knobs.runtime.add_stages_inspection_hook(self, stages, options, language, None)

    @staticmethod
    def make_ttir(module, metadata: dict, options: CPUOptions):
        manager = ir.pass_manager(module.context)
        manager.enable_debug()
        passes.common.add_inliner(manager)
        if hasattr(passes.ttir, "add_rewrite_tensor_pointer"):  # block pointers, gone after 3.6
            passes.ttir.add_rewrite_tensor_pointer(manager)
        passes.ttir.add_rewrite_tensor_descriptor_to_pointer(manager)
        passes.common.add_canonicalizer(manager)
        passes.ttir.add_combine(manager)
        passes.ttir.add_reorder_broadcast(manager)
        passes.common.add_cse(manager)
        passes.ttir.add_triton_licm(manager)
        passes.common.add_symbol_dce(manager)
        passes.ttir.add_loop_unroll(manager)
        manager.run(module, "make_ttir")
        return module

    @staticmethod
    def make_llir(module, metadata: dict, options: CPUOptions, features: runtime.Features):
        from kda.triton_cpu import codegen, lowering, ttir

        graph = ttir.parse(module if isinstance(module, str) else str(module))
        kernel = graph.kernel
        metadata["name"] = kernel.name
        metadata["parameters"] = [str(value.type) for value in kernel.args]
        metadata["parameter_names"] = [value.name for value in kernel.args]
        text = lowering.lower(graph, features=features, options=options)
        metadata["shared"] = int(re.search(r"\.arena = constant i64 (\d+)", text)[1])  # a thread's scratch memory
        optimised = codegen.optimize(codegen.join(text, runtime.launch_code()), features)
        return str(optimised), optimised


if _other := other_backend("compiler", BaseBackend):
    CPUBackend = _other

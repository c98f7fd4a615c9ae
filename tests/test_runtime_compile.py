"""Device compilers: what they make, what they report, and what they say when they cannot.  No GPU is needed."""
import os
import stat

import pytest

from eqsat_neptune.errors import CompilationError, CompilerNotFound, EqsatError, TargetError
from eqsat_neptune.runtime import compile_cuda, compile_hip, hipcc, nvrtc
from eqsat_neptune.runtime.compiled import ptxas_report
from eqsat_neptune.runtime.hipcc import amdgpu_report

CUDA = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
__device__ __noinline__ float lookup(float x, int n) { float t[32]; for (int i = 0; i < 32; i++) t[i] = x * i; return t[n & 31]; }
extern "C" __global__ void __launch_bounds__(128) mirror(float* y, const float* x, int n) {
  __shared__ float s[128];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[127 - threadIdx.x] + lookup(x[0], n);
}
extern "C" __global__ void to_half(__half* y, const __nv_bfloat16* x) {
  y[threadIdx.x] = __float2half(__bfloat162float(x[threadIdx.x]));
}
extern "C" __global__ void __launch_bounds__(1024, 2) crowded(float* y, const float* x) {
  float a[64];
  for (int i = 0; i < 64; i++) a[i] = x[i * 1024 + threadIdx.x];
  for (int k = 0; k < 8; k++) for (int i = 0; i < 64; i++) a[i] = a[i] * a[(i * 7 + k) % 64] + a[(i * 5 + 3) % 64];
  for (int i = 0; i < 64; i++) y[i * 1024 + threadIdx.x] = a[i];
}
"""

HIP = r"""
#ifndef __HIP_PLATFORM_AMD__
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(n) __attribute__((amdgpu_flat_work_group_size(1, n)))
#endif
typedef float f4 __attribute__((ext_vector_type(4)));
typedef short s4 __attribute__((ext_vector_type(4)));
extern "C" __global__ void __launch_bounds__(256) multiply(f4* c, const s4* a, const s4* b) {
  __shared__ s4 t[256];
  int i = __builtin_amdgcn_workitem_id_x();
  t[i] = a[i];
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
#if defined(__gfx942__) || defined(__gfx90a__)
  c[i] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(t[i ^ 1], b[i], c[i], 0, 0, 0);
#else
  c[i] = c[i] + (float)t[i ^ 1][0];
#endif
}
"""


def cuda(compiler):
    """Skips where this compiler is absent."""
    try:
        nvrtc.compiler_version("sm_90a", compiler)
    except CompilerNotFound as e:
        pytest.skip(str(e))
    return compiler


def hip_or_skip():
    try:
        hipcc.find_compiler("gfx942")
    except CompilerNotFound as e:
        pytest.skip(str(e))


@pytest.mark.parametrize("compiler", ["nvrtc", "nvcc"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_cuda_reports_resources(compiler, arch):
    done = compile_cuda(CUDA, arch, compiler=cuda(compiler))
    assert done.cubin[:4] == b"\x7fELF"
    assert set(done.kernels) == {"mirror", "to_half", "crowded"}            # `lookup` is no kernel
    mirror, crowded = done.kernels["mirror"], done.kernels["crowded"]
    assert mirror.shared_bytes == 512 and mirror.stack >= 128 and mirror.spill_bytes == 0 and 8 <= mirror.registers <= 64
    assert crowded.registers <= 64 and crowded.spill_bytes > 0 and crowded.stack > 0


@pytest.mark.parametrize("compiler", ["nvrtc", "nvcc"])
def test_cuda_options_reach_the_compiler(compiler):
    source = 'extern "C" __global__ void k(int* y) { y[0] = VALUE; }'
    with pytest.raises(CompilationError, match="VALUE"):
        compile_cuda(source, "sm_80", compiler=cuda(compiler))
    one, two = (compile_cuda(source, "sm_80", options=[f"-DVALUE={v}"], compiler=compiler).cubin for v in (1, 2))
    assert one != two and one == compile_cuda(source, "sm_80", options=["-DVALUE=1"], compiler=compiler).cubin


@pytest.mark.parametrize("compiler", ["nvrtc", "nvcc"])
def test_cuda_errors_show_the_place_but_no_temporary_path(compiler):
    with pytest.raises(CompilationError) as e:
        compile_cuda("\n\nint x = ;", "sm_80", name="mine.cu", compiler=cuda(compiler))
    assert "mine.cu(3)" in str(e.value) and "expression" in str(e.value) and "/tmp" not in str(e.value)


def test_cuda_architectures():
    for wrong in ("gfx942", "sm_9", "90a", "sm_80; rm"):
        with pytest.raises(TargetError, match="sm_90a"):
            compile_cuda("", wrong)
    with pytest.raises(CompilerNotFound, match="not for sm_30"):
        compile_cuda("", "sm_30", compiler=cuda("nvrtc"))


def test_no_cuda_compiler(monkeypatch):
    monkeypatch.setattr(nvrtc, "nvrtc_paths", lambda: [])
    monkeypatch.setattr(nvrtc, "find_nvcc", lambda: None)
    with pytest.raises(CompilerNotFound, match="pip install nvidia-cuda-nvrtc"):
        compile_cuda(CUDA, "sm_80")


def test_nvcc_serves_where_nvrtc_is_missing(monkeypatch):
    cuda("nvcc")
    monkeypatch.setattr(nvrtc, "nvrtc_paths", lambda: ["/nonexistent/libnvrtc.so.13"])
    assert nvrtc.compiler_version("sm_80").startswith("nvcc")
    assert "mirror" in compile_cuda(CUDA, "sm_80").kernels


def test_missing_headers_are_explained(monkeypatch):
    cuda("nvrtc")
    monkeypatch.setattr(nvrtc, "include_folder", lambda library: None)
    with pytest.raises(CompilationError, match="pip install nvidia-cuda-runtime"):
        compile_cuda(CUDA, "sm_80", compiler="nvrtc")


def test_toolkit_folders_are_searched(monkeypatch, tmp_path):
    lib = tmp_path / "lib64" / "libnvrtc.so.12"
    nvcc = tmp_path / "bin" / "nvcc"
    for f in (lib, tmp_path / "lib64" / "libnvrtc-builtins.so.12.4", nvcc, tmp_path / "include" / "cuda_fp16.h"):
        f.parent.mkdir(exist_ok=True)
        f.write_text("")
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert nvrtc.nvrtc_paths()[0] == str(lib) and not any("builtins" in p for p in nvrtc.nvrtc_paths())
    assert nvrtc.find_nvcc() == str(nvcc)
    assert nvrtc.include_folder(str(lib)) == str(tmp_path / "include")
    assert nvrtc._load(str(lib)) is None                    # not a library: passed over, not a crash


def test_ptxas_report_of_old_and_new_logs():
    log = """ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
    24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 4 barriers, 512+16 bytes smem, 400 bytes cmem[0]
ptxas info    : Function properties for helper
    99 bytes stack frame, 99 bytes spill stores, 99 bytes spill loads
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas info    : Used 10 registers, 1 barriers
"""
    a, b = ptxas_report(log)["a"], ptxas_report(log)["b"]
    assert (a.registers, a.spill_bytes, a.shared_bytes, a.stack) == (168, 20, 528, 24)
    assert (b.registers, b.spill_bytes, b.shared_bytes, b.stack) == (10, 0, 0, 0)


# ------------------------------------------------------------------ HIP

@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1100"])
def test_hip(arch):
    hip_or_skip()
    done = compile_hip(HIP, arch)
    info = done.kernels["multiply"]
    assert done.cubin[:4] == b"\x7fELF" and list(done.kernels) == ["multiply"]
    assert info.shared_bytes == 2048 and info.spill_bytes == 0 and info.stack == 0 and 4 <= info.registers <= 32
    assert ("v_mfma_f32_16x16x16" in done.assembly) == (arch != "gfx1100")
    assert compile_hip(HIP, arch).cubin == done.cubin       # nothing of the temporary folder is in it


def test_hip_with_zig():
    pytest.importorskip("ziglang", reason="the package ziglang is not installed")
    zig = next(c for c in hipcc._candidates() if c.linker)
    done = compile_hip(HIP, "gfx942", compiler=zig)
    assert done.cubin[:4] == b"\x7fELF" and "v_mfma" in done.assembly and done.kernels["multiply"].shared_bytes == 2048


def test_hip_errors(monkeypatch):
    with pytest.raises(TargetError, match="gfx90a"):
        compile_hip(HIP, "sm_80")
    hip_or_skip()
    with pytest.raises(CompilationError, match=r"mine.hip:2:9: error") as e:
        compile_hip("\nint x = ;", "gfx942", name="mine.hip")
    assert "/tmp" not in str(e.value)
    with pytest.raises(CompilerNotFound, match="knows gfx9fff"):
        compile_hip(HIP, "gfx9fff")


def test_no_hip_compiler(monkeypatch):
    monkeypatch.setattr(hipcc, "_candidates", lambda: iter(()))
    with pytest.raises(CompilerNotFound, match="apt-get install"):
        compile_hip(HIP, "gfx950")                          # an architecture that no other test asks for: the answer is kept
    assert issubclass(CompilerNotFound, EqsatError)


def test_amdgpu_report():
    text = """
	.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     128
    .args:
      - .name:           x
        .size:           8
    .group_segment_fixed_size: 65536
    .name:           first
    .private_segment_fixed_size: 48
    .sgpr_spill_count: 1
    .vgpr_count:     256
    .vgpr_spill_count: 11
  - .args:           []
    .group_segment_fixed_size: 0
    .name:           second
    .private_segment_fixed_size: 0
    .sgpr_spill_count: 0
    .vgpr_count:     7
    .vgpr_spill_count: 0
amdhsa.version:
  - 1
  - 2
...
	.end_amdgpu_metadata
"""
    first, second = (amdgpu_report(text)[n] for n in ("first", "second"))
    assert (first.registers, first.spill_bytes, first.shared_bytes, first.stack) == (256, 48, 65536, 48)
    assert (second.registers, second.spill_bytes, second.shared_bytes, second.stack) == (7, 0, 0, 0)


def test_compilers_leave_no_files_behind(tmp_path, monkeypatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for compile_one in (lambda: compile_hip(HIP, "gfx942"), lambda: compile_cuda(CUDA, "sm_80", compiler="nvcc")):
        try:
            compile_one()
        except CompilerNotFound:
            continue
        assert os.listdir(tmp_path) == []

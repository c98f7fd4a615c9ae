"""The runtime on an NVIDIA GPU: run with `pytest -m gpu tests/test_runtime_gpu.py`."""
import statistics
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from eqsat_neptune.errors import DeviceError, WrongDevice
from eqsat_neptune.runtime import GpuModule, Launch, TensorMap, available, compile_cuda
from eqsat_neptune.runtime import module as runtime_module
from eqsat_neptune.runtime.arrays import empty_like, stream_handle, stream_of, view
from eqsat_neptune.runtime.driver import device_arch, driver

pytestmark = pytest.mark.gpu

SOURCE = r"""
struct alignas(64) Map { char bytes[128]; };

// y = a·x + y, any strides
extern "C" __global__ void axpy(int a, const float* x, float* y, int n, long long step_x, long long step_y) {
  int i = blockIdx.x * 128 + threadIdx.x;
  if (i < n) y[i * step_y] = a * x[i * step_x] + y[i * step_y];
}

// *out = Σ x by the last block to arrive; `part` and `count` are workspace, zero before and after
extern "C" __global__ void total(const float* x, float* out, float* part, int* count, int n) {
  extern __shared__ float s[];
  int i = blockIdx.x * 128 + threadIdx.x;
  s[threadIdx.x] = i < n ? x[i] : 0;
  __syncthreads();
  for (int w = 64; w; w /= 2) { if (threadIdx.x < w) s[threadIdx.x] += s[threadIdx.x + w]; __syncthreads(); }
  if (threadIdx.x == 0) {
    part[blockIdx.x] = s[0];
    __threadfence();
    if (atomicAdd(count, 1) == gridDim.x - 1) {
      __threadfence();
      float sum = 0;
      for (int b = 0; b < gridDim.x; b++) sum += ((volatile float*)part)[b];
      *out = sum;
      *count = 0;
    }
  }
}

extern "C" __global__ void spin(int* out, long long clocks) {
  long long start = clock64();
  while (clock64() - start < clocks) {}
  if (threadIdx.x == 0) out[blockIdx.x] = 5;
}

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void after(int* out, const int* in) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x == 0) out[blockIdx.x] = in[blockIdx.x] + 1;
}

extern "C" __global__ void cluster_size(int* out) {
  unsigned n;
  asm("mov.u32 %0, %cluster_nctaid.x;" : "=r"(n));
  if (threadIdx.x == 0) out[blockIdx.x] = n;
}

// the 8×32 tile at (row, column) of a matrix, through TMA
extern "C" __global__ void tile(const __grid_constant__ Map map, float* out, int row, int column) {
  __shared__ alignas(128) float t[8 * 32];
  __shared__ alignas(8) unsigned long long arrived;
  unsigned bar = (unsigned)__cvta_generic_to_shared(&arrived), to = (unsigned)__cvta_generic_to_shared(t);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" :: "r"(bar) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(bar) : "memory");
  }
  __syncthreads();
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n@!p bra again;\n}"
               :: "r"(bar) : "memory");
  for (int i = threadIdx.x; i < 256; i += 128) out[i] = t[i];
}
#endif
"""

@pytest.fixture(scope="module")
def torch():
    if reason := available():
        pytest.skip(reason)
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def cubin(torch):
    return compile_cuda(SOURCE, device_arch(0)).cubin


@pytest.fixture
def hopper(torch):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")


def axpy(cubin, n):
    return GpuModule(cubin, [Launch("axpy", (-(-n // 128), 1, 1), 128, 0, (3, "x", "y", n, "step_x", "step_y"))])


def total(cubin, n):
    blocks = -(-n // 128)
    launch = Launch("total", (blocks, 1, 1), 128, 512, ("x", "out", "part", "count", n))
    return GpuModule(cubin, [launch], {"part": 4 * blocks, "count": 4})


def run(module, x, y, stream=None):
    vx, vy = view(x, "x"), view(y, "y")
    module.run({"x": vx.pointer, "y": vy.pointer, "step_x": (*vx.strides, 1)[0], "step_y": (*vy.strides, 1)[0]},
               stream_of(x, vx.device) if stream is None else stream, vx.device)


def slow(torch, x):
    """Keeps the current stream busy for some milliseconds, then fills x with 1 to n."""
    torch.cuda._sleep(20_000_000)
    x.copy_(torch.arange(1, x.numel() + 1, device="cuda", dtype=torch.float32).view_as(x))


def test_strided_tensors_on_the_callers_stream(torch, cubin):
    side = torch.cuda.Stream()
    x, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, 2, device="cuda")[:, 1]
    slow(torch, x)                                  # once, for the first time loads code and may synchronise
    x.zero_()
    torch.cuda.synchronize()
    module = axpy(cubin, 1000)
    module.load()
    with torch.cuda.stream(side):
        slow(torch, x)
        run(module, x, y)                           # wrong unless it waits for what is in the side stream
        assert not side.query()                     # and it did not synchronise
    side.synchronize()
    assert torch.equal(y, 3 * torch.arange(1, 1001, device="cuda", dtype=torch.float32))
    half = axpy(cubin, 500)
    z = torch.zeros(500, device="cuda")
    run(half, x[::2], z)
    assert torch.equal(z, 3 * x[::2])
    run(half, x[7].expand(500), z)                  # stride 0
    assert torch.equal(z, 3 * x[::2] + 24)
    flat = view(x, "x")
    half.run({"x": flat.pointer + 4 * 999, "y": view(z, "z").pointer, "step_x": -2, "step_y": 1})
    assert torch.equal(z, 3 * x[::2] + 24 + 3 * x.flip(0)[::2])


def test_explicit_streams(torch, cubin):
    module, side = axpy(cubin, 256), torch.cuda.Stream()
    x, y = torch.ones(256, device="cuda"), torch.zeros(256, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        slow(torch, x)
    run(module, x, y, stream_handle(side))
    side.synchronize()
    assert y[255].item() == 3 * 256
    out = empty_like(x, (256,), "bfloat16", 0, stream_handle(side))
    assert out.dtype == torch.bfloat16 and out.is_cuda and empty_like(x, (3,), "bool", 0, 0).dtype == torch.bool


@pytest.mark.parametrize("first_run_is_captured", [False, True])
def test_cuda_graph(torch, cubin, first_run_is_captured, monkeypatch):
    monkeypatch.setattr(runtime_module, "_code", {})        # nothing is loaded yet
    n = 5000
    sums, update = total(cubin, n), axpy(cubin, n)
    x, y, out = torch.zeros(n, device="cuda"), torch.zeros(n, device="cuda"), torch.zeros(1, device="cuda")

    def step():
        run(update, x, y)
        v = {"x": view(y, "y").pointer, "out": view(out, "out").pointer}
        sums.run(v, stream_of(out, 0))

    if not first_run_is_captured:
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for k in (1, 2, 5):
        x.fill_(k)
        y.zero_()
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        assert out.item() == 2 * 3 * k * n          # exact in float32


def test_overlapping_streams_do_not_share_workspaces(torch, cubin):
    n = 128 * 300
    module = total(cubin, n)
    streams = [torch.cuda.Stream() for _ in range(4)]
    xs = [torch.full((n,), float(i + 1), device="cuda") for i in range(4)]
    outs = torch.zeros(4, 50, device="cuda")
    torch.cuda.synchronize()
    for j in range(50):
        for i, s in enumerate(streams):
            module.run({"x": xs[i].data_ptr(), "out": outs[i, j].data_ptr()}, s.cuda_stream)
    torch.cuda.synchronize()
    assert torch.equal(outs, torch.tensor([[n * (i + 1.0)] * 50 for i in range(4)], device="cuda"))


def test_threads(torch, cubin):
    """Threads without a context, all on one module; each must get its own arguments."""
    n, module, failures = 512, axpy(cubin, 512), []
    xs = [torch.full((n,), float(i), device="cuda") for i in range(8)]
    ys = [torch.zeros(n, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()

    def work(i):
        try:
            for _ in range(200):
                module.run({"x": xs[i].data_ptr(), "y": ys[i].data_ptr(), "step_x": 1, "step_y": 1})
        except Exception as e:                      # shown by the assertion below
            failures.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    torch.cuda.synchronize()
    assert not failures
    assert [y[n - 1].item() for y in ys] == [600.0 * i for i in range(8)]


def test_clusters_and_programmatic_launch(torch, cubin, hopper):
    a, b = (torch.zeros(32, dtype=torch.int32, device="cuda") for _ in range(2))
    GpuModule(cubin, [Launch("cluster_size", (32, 1, 1), 32, 0, ("a",), cluster=4)]).run({"a": a.data_ptr()})
    assert a.tolist() == [4] * 32
    GpuModule(cubin, [Launch("cluster_size", (32, 1, 1), 32, 0, ("a",), cluster=16)]).run({"a": a.data_ptr()})
    assert a.tolist() == [16] * 32                  # beyond the portable 8
    grid = (32, 1, 1)
    pair = GpuModule(cubin, [Launch("spin", grid, 32, 0, ("a", 2_000_000)), Launch("after", grid, 32, 0, ("b", "a"), pdl=True)])
    pair.run({"a": a.data_ptr(), "b": b.data_ptr()})
    assert b.tolist() == [6] * 32


def test_tensor_maps(torch, cubin, hopper):
    m = torch.arange(50 * 100, device="cuda", dtype=torch.float32).view(50, 100)
    out = torch.zeros(8, 32, device="cuda")
    padded = torch.zeros(58, 132, device="cuda")
    padded[:50, :100] = m
    for row, column in ((0, 0), (8, 32), (45, 80)):         # the last one reaches over both edges: zeros there
        map_ = TensorMap("m", "float32", ("columns", 50), ("columns",), (32, 8), swizzle=0)
        GpuModule(cubin, [Launch("tile", (1, 1, 1), 128, 0, (map_, "out", row, column))]).run(
            {"m": m.data_ptr(), "out": out.data_ptr(), "columns": 100})
        assert torch.equal(out, padded[row:row + 8, column:column + 32])
    with pytest.raises(DeviceError, match="multiples of 16 bytes"):
        GpuModule(cubin, [Launch("tile", (1, 1, 1), 128, 0, (map_, "out", 0, 0))]).run(
            {"m": m.data_ptr() + 4, "out": out.data_ptr(), "columns": 100})


def test_large_shared_memory(torch, cubin):
    x, out = torch.ones(128, device="cuda"), torch.zeros(1, device="cuda")
    values = {"x": x.data_ptr(), "out": out.data_ptr()}
    args, spaces = ("x", "out", "part", "count", 128), {"part": 4, "count": 4}
    GpuModule(cubin, [Launch("total", (1, 1, 1), 128, 96 * 1024, args)], spaces).run(values)
    assert out.item() == 128
    with pytest.raises(DeviceError, match="4194304 bytes of shared memory"):
        GpuModule(cubin, [Launch("total", (1, 1, 1), 128, 4 << 20, args)], spaces).run(values)


def test_errors(torch, cubin):
    with pytest.raises(WrongDevice, match="x is a NumPy array"):
        view(np.zeros(3), "x")
    with pytest.raises(DeviceError, match="no kernel 'absent'"):
        GpuModule(cubin, [Launch("absent", (1, 1, 1), 32, 0, ())]).run({})
    with pytest.raises(DeviceError, match=r"launching axpy \(grid \(1, 1, 1\), block 4096"):
        GpuModule(cubin, [Launch("axpy", (1, 1, 1), 4096, 0, (1, 0, 0, 0, 0, 0))]).run({})
    with pytest.raises(DeviceError, match="there is no CUDA device 99"):
        axpy(cubin, 1).run({}, device=99)
    other = "sm_80" if torch.cuda.get_device_capability()[0] > 8 else "sm_90"
    with pytest.raises(DeviceError, match="compiled for another GPU"):
        GpuModule(compile_cuda("", other).cubin, [Launch("k", (1, 1, 1), 32, 0, ())]).run({})
    x, y = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    run(axpy(cubin, 4), x, y)                       # none of it has harmed the context
    assert y.tolist() == [3.0] * 4


def test_cupy(torch, cubin):
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Stream(non_blocking=True) as s:
        x, y = cupy.arange(64, dtype=cupy.float32)[::-2], cupy.zeros((32, 3), cupy.float32)[:, 1]
        v = view(x, "x", stream_of(x, 0))
        assert v[1:5] == ((32,), (-2,), "float32", 0) and stream_of(x, 0) == s.ptr
        run(axpy(cubin, 32), x, y)
        assert cupy.array_equal(y, 3 * x)
    for dtype in ("float16", "int64", "bool"):
        out = empty_like(x, (2, 3), dtype, 0, 0)
        assert isinstance(out, cupy.ndarray) and out.dtype == dtype and out.shape == (2, 3)


def test_pycuda_and_dlpack(torch, cubin):
    class ByDlpack:
        def __init__(self, t):
            self.t, self.__dlpack_device__ = t, t.__dlpack_device__

        def __dlpack__(self, **options):
            return self.t.__dlpack__(**options)

    t = torch.arange(10, device="cuda", dtype=torch.float32)[3:]
    x = ByDlpack(t)
    v = view(x, "x")
    assert v[:5] == (t.data_ptr(), (7,), (1,), "float32", 0)
    y = empty_like(x, (7,), "float32", 0)
    assert type(y).__module__ == "pycuda.gpuarray"
    with driver().activate(0):
        y.set(np.ones(7, np.float32))
        run(axpy(cubin, 7), x, y)
        assert y.get().tolist() == (3 * t.cpu() + 1).tolist()
        assert view(empty_like(x, (2, 3), "bfloat16", 0), "b")[1:4] == ((2, 3), (3, 1), "bfloat16")


def test_several_devices(torch, cubin):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    module = axpy(cubin, 8)
    for d in (0, 1, 0):                             # the current device stays 0
        x, y = torch.ones(8, device=f"cuda:{d}"), torch.zeros(8, device=f"cuda:{d}")
        run(module, x, y)
        assert y.tolist() == [3.0] * 8 and torch.cuda.current_device() == 0


def test_without_other_libraries(torch):
    """PyCUDA alone, in its own context and in the primary one; nothing may be complained about at exit."""
    script = textwrap.dedent("""
        import sys
        import numpy as np
        sys.path[:0] = {path!r}
        if {own}:
            import pycuda.autoinit
        import pycuda.gpuarray as gpuarray
        from eqsat_neptune.runtime import GpuModule, Launch, compile_cuda
        from eqsat_neptune.runtime.arrays import empty_like, view
        from eqsat_neptune.runtime.driver import device_arch, driver
        source = '''
            extern "C" __global__ void k(float* y, const float* x, int* w) {{ y[threadIdx.x] = 2 * x[threadIdx.x] + w[0]; }}
        '''
        m = GpuModule(compile_cuda(source, device_arch(0)).cubin, [Launch("k", (1, 1, 1), 8, 0, ("y", "x", "w"))], {{"w": 4}})
        with driver().activate(0):
            x = gpuarray.to_gpu(np.arange(8, dtype=np.float32))
            y = empty_like(x, (8,), "float32", 0)
            m.run({{"x": view(x).pointer, "y": view(y).pointer}})
            print(y.get().tolist())
        assert "torch" not in sys.modules and "cupy" not in sys.modules
    """)
    for own in (True, False):
        done = subprocess.run([sys.executable, "-c", script.format(path=sys.path, own=own)], capture_output=True, text=True)
        assert (done.stdout.strip(), done.stderr) == (str([2.0 * i for i in range(8)]), ""), done.stderr


def per_call(f, calls=400, rounds=25):
    """Median host microseconds of a call; the GPU is idle at the start of each round."""
    import torch
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            f()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def test_host_time_of_a_launch(torch, cubin, capsys):
    x, y, out = torch.ones(128, device="cuda"), torch.zeros(128, device="cuda"), torch.zeros(1, device="cuda")
    module, sums = axpy(cubin, 128), total(cubin, 128)
    values = {"x": x.data_ptr(), "y": y.data_ptr(), "step_x": 1, "step_y": 1}
    stream = torch.cuda.Stream().cuda_stream
    module.run(values, stream)
    call, launch = module._ready[0][-1].calls[0], driver().launch
    figures = {
        "driver alone": per_call(lambda: launch(call.config_ref, call.function, call.parameters, None)),
        "launch": per_call(lambda: module.run(values, stream)),
        "launch with workspace": per_call(lambda: sums.run({"x": x.data_ptr(), "out": out.data_ptr()}, stream)),
        "three views": per_call(lambda: (view(x, "x"), view(y, "y"), view(out, "out"))),
        "stream": per_call(lambda: stream_of(x, 0)),
        "output": per_call(lambda: empty_like(x, (128,), "float32", 0)),
        "torch.add for comparison": per_call(lambda: torch.add(x, y, out=y)),
    }
    with capsys.disabled():
        print("\nhost µs: " + ", ".join(f"{k} {v:.2f}" for k, v in figures.items()))
    # The aim is 5 in all.  The driver's share is the machine's (4.6 on one of them), and timings are noisy.
    assert figures["launch"] <= 10 and figures["launch"] - figures["driver alone"] <= 3

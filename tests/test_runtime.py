"""What of the runtime can be checked without a GPU: reading foreign arrays, laying out arguments, workspaces, errors."""
import ctypes as C
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest

from eqsat_neptune.errors import DeviceError, DriverNotFound, InputError, WrongDevice
from eqsat_neptune.runtime import GpuModule, Launch, TensorMap, arrays, available, driver, module
from eqsat_neptune.runtime.arrays import require_host, stream_handle, view, view_capsule

# ------------------------------------------------------------------ arrays


def test_structures_have_the_drivers_layout():
    assert C.sizeof(driver.LaunchAttribute) == 72 and C.sizeof(driver.LaunchConfig) == 56
    config = driver.launch_config((3, 4, 5), 128, 1000, cluster=2, programmatic=True)
    assert (*config.grid, *config.block, config.shared, config.count) == (3, 4, 5, 128, 1, 1, 1000, 2)
    assert [(config.attributes[i].id, *config.attributes[i].value[:3]) for i in range(2)] == [(4, 2, 1, 1), (6, 1, 0, 0)]


@pytest.mark.parametrize("make", [
    lambda: np.arange(24, dtype=np.float32).reshape(2, 3, 4), lambda: np.arange(24, dtype=np.int16)[::-3],
    lambda: np.broadcast_to(np.float64(3), (4, 5)), lambda: np.zeros((3, 0), np.uint8), lambda: np.array(True),
    lambda: np.zeros((8, 6), np.float16).T[1:, ::2]])
def test_dlpack_capsules(make):
    a = make()
    capsules = [a.__dlpack__(max_version=(1, 1))]           # read-only arrays come in versioned capsules only
    if a.flags.writeable:
        capsules.append(a.__dlpack__())
    for capsule in capsules:
        v = view_capsule(capsule, "a")
        assert (v.pointer, v.shape, v.dtype) == (a.ctypes.data, a.shape, a.dtype.name)
        assert all(s == t // a.itemsize for s, t, n in zip(v.strides, a.strides, a.shape) if n > 1)


def test_dlpack_capsule_of_another_library_stays_alive():
    torch = pytest.importorskip("torch")
    for dtype in ("bfloat16", "float16", "int64", "bool", "uint8"):
        t = torch.zeros(6, 4, dtype=getattr(torch, dtype))[::2]
        v = view_capsule(t.__dlpack__(), "t")
        assert v[:4] == (t.data_ptr(), (3, 4), (8, 1), dtype)
    t = torch.full((1000,), 7.0)
    pointer, v = t.data_ptr(), view_capsule(t.__dlpack__(), "t")
    del t
    others = [torch.zeros(1000) for _ in range(20)]         # would take the memory, were it free
    assert v.pointer == pointer and (C.c_float * 1000).from_address(v.pointer)[999] == 7.0
    assert all(o.data_ptr() != pointer for o in others)
    with pytest.raises(InputError, match="code 5"):
        view_capsule(torch.zeros(3, dtype=torch.complex64).__dlpack__(), "z")


class FakeDriver:
    """Stands in for the driver: it records launches, with the arguments as the real one would copy them."""

    def __init__(self, widths=()):
        self.widths, self.launches, self.waits, self.capture, self.context = widths, [], [], 0, 7

    def device_of(self, pointer):
        return pointer >> 40

    def current_device(self):
        return 0

    def wait_stream(self, stream, other):
        self.waits.append((stream, other))

    def current_context(self):
        return self.context

    def get_context(self, out):
        out._obj.value = self.context
        return 0

    @contextmanager
    def activate(self, device):
        yield

    @contextmanager
    def uncaptured(self):
        yield

    def capture_id(self, stream):
        return self.capture

    def load_module(self, image):
        return C.c_void_p(1)

    def function(self, code, name, shared, cluster):
        return name

    def encode_tensor_map(self, destination, dtype, address, dims, strides, box, swizzle, itemsize):
        assert destination % 64 == 0
        C.memmove(destination, f"{dtype} {address} {dims} {strides} {box} {swizzle} {itemsize}".encode().ljust(128, b"\0"), 128)

    def launch(self, config_ref, function, parameters, extra):
        config = config_ref._obj
        values = []
        for address, width in zip(parameters, self.widths):
            if width == 128:
                assert address % 64 == 0
                values.append(C.string_at(address, 128).rstrip(b"\0").decode())
            else:
                values.append(int.from_bytes(C.string_at(address, width), "little", signed=True))
        self.launches.append((function, tuple(config.grid), config.block[0], config.shared, config.stream or 0, values))
        return 0


@pytest.fixture
def fake(monkeypatch):
    d = FakeDriver()
    for m in (arrays, module, driver):
        monkeypatch.setattr(m, "driver", lambda: d)
    monkeypatch.setattr(module, "_code", {})
    return d


class Foreign:
    def __init__(self, dtype=None, **interface):
        self.__cuda_array_interface__ = {"version": 3, "typestr": "<f4", "data": (1 << 40, False), "strides": None, **interface}
        if dtype:
            self.dtype = dtype


def test_cuda_array_interface(fake):
    assert view(Foreign(shape=(2, 3)))[:5] == (1 << 40, (2, 3), (3, 1), "float32", 1)
    assert view(Foreign(shape=(2, 3), strides=(-16, 0)))[2] == (-4, 0)
    assert view(Foreign(shape=(), data=(0, False)))[:5] == (0, (), (), "float32", 0)
    assert view(Foreign(np.dtype(ml_dtypes.bfloat16), shape=(5,), typestr="<V2", strides=(4,)))[2:4] == ((2,), "bfloat16")
    assert view(Foreign(np.dtype(ml_dtypes.float8_e4m3fn), shape=(5,), typestr="|V1"))[3] == "float8_e4m3fn"
    a = Foreign(shape=(1,))
    assert view(a).keep is a and fake.waits == []


def test_cuda_array_interface_orders_streams(fake):
    view(Foreign(shape=(1,), stream=1), stream=0)           # both are the default stream
    view(Foreign(shape=(1,), stream=99), stream=99)
    assert fake.waits == []
    view(Foreign(shape=(1,), stream=99), stream=0)
    view(Foreign(shape=(1,), stream=1), stream=55)
    assert fake.waits == [(0, 99), (55, 1)]


def test_cuda_array_interface_that_cannot_be_read(fake):
    for a, message in ((Foreign(shape=(2,), strides=(6,)), "no multiples"), (Foreign(shape=(2,), typestr=">f4"), "big-endian"),
                       (Foreign(shape=(2,), typestr="<c8"), "complex64"), (Foreign(shape=(2,), typestr="|V2"), "cannot read"),
                       (Foreign(shape=(2,), mask=Foreign(shape=(2,))), "masked")):
        with pytest.raises(InputError, match=message):
            view(a, "k")


class ByDlpack:
    """A producer that has nothing but DLPack, and does not know versions."""

    def __init__(self, array, kind):
        self.array, self.kind, self.streams = array, kind, []

    def __dlpack_device__(self):
        return self.kind, 0

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        return self.array.__dlpack__()


def test_dlpack_producers(fake):
    a = ByDlpack(np.arange(6.0).reshape(2, 3), arrays._CUDA)
    v = view(a, "a", stream=0)
    assert v[:4] == (a.array.ctypes.data, (2, 3), (3, 1), "float64") and a in v.keep
    view(a, "a", stream=123)
    assert a.streams == [1, 123]                            # DLPack forbids 0: the default stream is 1
    with pytest.raises(WrongDevice, match="host memory"):
        view(ByDlpack(a.array, arrays._CPU), "a")
    with pytest.raises(WrongDevice, match="type 10"):
        view(ByDlpack(a.array, 10), "a")


def test_host_arrays_are_refused_with_the_remedy():
    for x in (np.zeros(3), np.float32(1), 2.0, [1.0]):
        with pytest.raises(WrongDevice, match=r"query is a .*cupy.asarray\(query\)"):
            view(x, "query")
    with pytest.raises(InputError, match="not a GPU array"):
        view("text", "query")
    torch = pytest.importorskip("torch")
    with pytest.raises(WrongDevice, match=r"query is a PyTorch tensor on cpu.*query.cuda\(\)"):
        view(torch.zeros(3), "query")


def test_gpu_arrays_are_refused_on_the_host():
    require_host(np.zeros(3))
    for x in (Foreign(shape=(3,)), ByDlpack(np.zeros(3), arrays._CUDA)):
        with pytest.raises(WrongDevice, match=r"this kernel runs on the CPU.*key.get\(\)"):
            require_host(x, "key")
    require_host(ByDlpack(np.zeros(3), arrays._CPU))
    torch = pytest.importorskip("torch")
    require_host(torch.zeros(3))
    with pytest.raises(WrongDevice, match="on meta"):
        require_host(torch.zeros(3, device="meta"))


def test_stream_handles():
    class Holder:
        def __init__(self, **fields):
            self.__dict__.update(fields)

    class Protocol:
        def __cuda_stream__(self):
            return 0, 17

    assert [stream_handle(s) for s in (
        0, 5, np.int64(6).item(), Holder(cuda_stream=7), Holder(ptr=8), Holder(handle=9), Holder(handle=C.c_void_p(10)),
        Holder(handle=C.c_void_p(0)), Protocol())] == [0, 5, 6, 7, 8, 9, 10, 0, 17]
    for wrong in ("main", True, 1.5):
        with pytest.raises(InputError, match="no CUDA stream"):
            stream_handle(wrong)


# ------------------------------------------------------------------ launches

def test_arguments_reach_the_driver_in_order(fake):
    fake.widths = (8, 4, 128, 8, 4, 128)
    m = TensorMap("y", "bfloat16", (64, "n"), ("step",), (64, 16))
    launch = Launch("f", (3, 2, 1), 256, 4096, ("x", -1, m, "step", "n", TensorMap("x", "float32", (8, 8), (8,), (4, 4), 0)))
    values = {"x": 1 << 40, "y": (1 << 48) + 64, "n": 9, "step": -77}
    GpuModule(b"code", [launch]).run(values, stream=12)
    assert fake.launches == [("f", (3, 2, 1), 256, 4096, 12, [
        1 << 40, -1, f"bfloat16 {(1 << 48) + 64} (64, 9) (-77,) (64, 16) 128 2", -77, 9,
        f"float32 {1 << 40} (8, 8) (8,) (4, 4) 0 4"])]


def test_values_change_from_run_to_run(fake):
    fake.widths = (8, 128)
    g = GpuModule(b"code", [Launch("f", (1, 1, 1), 32, 0, ("x", TensorMap("x", "uint8", (16,), (), (16,), 0)))])
    for i in [*range(300), 0, 299]:                         # more than the descriptors that are kept
        g.run({"x": 4096 * i}, stream=i)
    assert [(s, v[0] // 4096, v[1].split()[1]) for *_, s, v in fake.launches] == [
        (i, i, str(4096 * i)) for i in [*range(300), 0, 299]]


def test_kernels_without_arguments_and_empty_grids(fake):
    one = (1, 1, 1)
    GpuModule(b"code", [Launch("a", one, 32, 0, ()), Launch("b", (4, 0, 1), 32, 0, ()), Launch("c", one, 32, 0, ())]).run({})
    assert [k[0] for k in fake.launches] == ["a", "c"]


def test_overlapping_runs_have_arguments_of_their_own(fake):
    """The driver may hand the interpreter to another thread before it has read the arguments; here it runs within the launch."""
    g = GpuModule(b"code", [Launch(name, (1, 1, 1), 32, 0, ("x", constant)) for name, constant in (("f", 7), ("g", 8))])
    fake.widths, inner, depth = (8, 4), fake.launch, []

    def launch(*args):
        if len(depth) < 3:
            depth.append(None)
            g.run({"x": 100 * len(depth)}, stream=9)
        return inner(*args)

    fake.launch = launch
    for i in range(3):
        fake.launches.clear()
        depth[:] = [None] * i
        g.run({"x": 1})
        assert [v for *_, stream, v in fake.launches if stream == 0] == [[1, 7], [1, 8]]
        assert sorted(v for *_, stream, v in fake.launches if stream == 9) == [
            [100 * d, c] for d in range(i + 1, 4) for c in (7, 8)]
    assert len(g._ready[0]) <= 4


def test_other_contexts_and_devices(fake):
    fake.widths, g = (8,), GpuModule(b"code", [Launch("f", (1, 1, 1), 32, 0, ("x",))])
    for context, device in ((7, 0), (8, 0), (7, 0), (9, 1), (8, 0)):
        fake.context = context
        g.run({"x": context}, device=device)
    assert [v for *_, v in fake.launches] == [[7], [8], [7], [9], [8]]
    assert {d: sorted(r.context for r in pool) for d, pool in g._ready.items()} == {0: [7, 8], 1: [9]}


def test_a_failed_launch_says_which_and_leaves_the_module_usable(fake):
    fake.widths, g = (8,), GpuModule(b"code", [Launch("f", (5, 1, 1), 32, 48, ("x",))])
    inner = fake.launch
    fake.error = lambda code, doing: DeviceError(f"{doing}: {code}")
    fake.launch = lambda *args: 701
    with pytest.raises(DeviceError, match=r"launching f \(grid \(5, 1, 1\), block 32, 48 bytes of shared memory\): 701"):
        g.run({"x": 1})
    fake.launch = inner
    g.run({"x": 2})
    assert fake.launches[-1][-1] == [2]


def test_each_stream_and_capture_has_its_own_workspace(fake, monkeypatch):
    made = []

    class Memory:
        def __init__(self, size):
            made.append(size)
            self.address = 1000000 * len(made)

    monkeypatch.setattr(module, "DeviceMemory", Memory)
    monkeypatch.setattr(module, "_captured", captured := [])
    fake.widths = (8, 8, 8)
    g = GpuModule(b"code", [Launch("f", (1, 1, 1), 32, 0, ("x", "part", "count"))], {"part": 1000, "count": 4})

    def run(stream, capture=0):
        fake.capture = capture
        g.run({"x": 1}, stream)
        return tuple(fake.launches[-1][-1][1:])

    first = run(0)
    assert first == (1000000, 1001024) and made == [1280]   # aligned to 256 bytes
    assert run(0) == first
    assert run(5) == (2000000, 2001024)
    assert run(5, capture=1) == run(5, capture=1) == (3000000, 3001024)
    assert run(5, capture=2) == (4000000, 4001024)
    assert run(5) == (2000000, 2001024)
    assert [w.memory.address for w in captured] == [3000000, 4000000]
    fake.context = 8                                        # another context: loaded again, nothing shared
    assert run(0) == (5000000, 5001024)


@pytest.mark.skipif(available() is None, reason="this machine has a CUDA driver")
def test_without_a_driver_the_reason_is_given():
    with pytest.raises(DriverNotFound) as e:
        GpuModule(b"code", [Launch("f", (1, 1, 1), 32, 0, ())]).run({})
    assert str(e.value) == available() and e.value.hint

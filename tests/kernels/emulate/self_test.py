#!/usr/bin/env python3
"""Does the emulated device find what it promises to find? Small wrong kernels and wrong calls, each with its error.

    python3 tests/kernels/emulate/self_test.py

Each check runs in a process of its own: after a fault a context is lost, as on a GPU. Exit status 1 when one is wrong.
"""

import ctypes
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PTX = os.path.join(HERE, "..", "..", "..", "kernels", "ptx.cuh")
KERNELS = """
KERNEL(64) twice(const float *x, float *y, int count) {
    int i = blockIdx.x * 64 + threadIdx.x;
    if (i < count) y[i] = 2.0f * x[i];
}
KERNEL(64) past_the_end(float *y, int count) { y[count + threadIdx.x] = 1.0f; }
KERNEL(64) before_the_start(float *y) { if (threadIdx.x == 0) y[-1] = 1.0f; }
KERNEL(64) barrier_for_some() { if (threadIdx.x < 32) block_sync(); }
KERNEL(64) misaligned(const char *x) {
    DYNAMIC_SHARED(memory);
    copy_async_16(shared_address(memory), x + 1, 16);
    copy_async_commit();
    copy_async_wait<0>();
}
KERNEL(64) divided_by(int *y) { y[1] = y[0] / (y[0] - y[0]); }
"""
FOUR_KIB = 4096


class Device:
    """The driver as the crate calls it; `call` gives the error's name."""

    def __init__(self):
        self.cuda, self.architecture, context = ctypes.CDLL("libcuda.so.1"), "sm_90", ctypes.c_void_p()
        self.expect("SUCCESS", "cuInit", 0)
        self.expect("SUCCESS", "cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.expect("SUCCESS", "cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        text = ctypes.c_char_p()
        self.cuda.cuGetErrorName(code, ctypes.byref(text))
        return text.value.decode().removeprefix("CUDA_").removeprefix("ERROR_")

    def expect(self, expected, name, *arguments):
        got = self.call(name, *arguments)
        assert got == expected, f"{name} gave {got}, {expected} was expected"

    def alloc(self, size):
        address = ctypes.c_uint64()
        self.expect("SUCCESS", "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address

    def free_bytes(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.expect("SUCCESS", "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def compile(self):
        nvrtc = ctypes.CDLL(os.environ["KVSIEVE_NVRTC"])
        with open(PTX, encoding="utf-8") as header:
            text = header.read().replace("#pragma once", "") + KERNELS
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"test.cu", 0, None, None)
        options = (ctypes.c_char_p * 2)(f"--gpu-architecture={self.architecture}".encode(), b"-std=c++17")
        status = nvrtc.nvrtcCompileProgram(program, 2, options)
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        assert status == 0, log.value.decode()
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        return code

    def function(self, name):
        self.module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.expect("SUCCESS", "cuModuleLoadData", ctypes.byref(self.module), self.compile())
        self.expect("SUCCESS", "cuModuleGetFunction", ctypes.byref(function), self.module, name.encode())
        return function

    def launch(self, function, *arguments, blocks=1, threads=64, shared=0, expected="SUCCESS"):
        pointers = (ctypes.c_void_p * max(1, len(arguments)))(*[ctypes.addressof(argument) for argument in arguments])
        self.expect(expected, "cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, shared, None, pointers, None)


def runs_and_runs_late(device):
    """A kernel's result is there after a wait, and not before."""
    count = 100
    x, y = device.alloc(4 * count), device.alloc(4 * count)
    values = (ctypes.c_float * count)(*range(count))
    device.expect("SUCCESS", "cuMemcpyHtoD_v2", x, values, ctypes.c_size_t(4 * count))
    device.launch(device.function("twice"), x, y, ctypes.c_int(count), blocks=2)
    assert ctypes.c_float.from_address(y.value).value != 0.0, "new memory is NaN, and nothing has run"
    device.expect("SUCCESS", "cuMemcpyDtoH_v2", values, y, ctypes.c_size_t(4 * count))
    assert list(values) == [2.0 * i for i in range(count)]
    device.expect("SUCCESS", "cuMemFree_v2", y)
    device.expect("INVALID_VALUE", "cuMemFree_v2", y)
    device.expect("INVALID_VALUE", "cuMemcpyDtoH_v2", values, y, ctypes.c_size_t(4))
    device.expect("INVALID_VALUE", "cuMemcpyHtoD_v2", x, values, ctypes.c_size_t(4 * count + 1))
    device.expect("SUCCESS", "cuModuleUnload", device.module)


def fault(kernel, expected, *arguments, **launch):
    """A launch succeeds; the wait and everything after it give the kernel's fault."""

    def check(device):
        memory = device.alloc(FOUR_KIB)
        device.launch(device.function(kernel), memory, *arguments, **launch)
        device.expect(expected, "cuCtxSynchronize")
        device.expect(expected, "cuMemFree_v2", memory)

    check.__name__ = kernel
    return check


def written_guard(device):
    """What lies within an allocation's last 16 bytes but not in it is found when it is freed."""
    memory = device.alloc(4 * 63)
    device.launch(device.function("past_the_end"), memory, ctypes.c_int(0))
    device.expect("SUCCESS", "cuCtxSynchronize")
    device.expect("ILLEGAL_ADDRESS", "cuMemFree_v2", memory)


def memory_ends(device):
    """Memory is a ledger: what was taken is not free, what was freed is, and more than there is is refused."""
    before = device.free_bytes()
    large = device.alloc(before // 2)
    assert before - device.free_bytes() >= before // 2
    address = ctypes.c_uint64()
    device.expect("OUT_OF_MEMORY", "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(before - before // 2 + 1))
    device.expect("SUCCESS", "cuMemFree_v2", large)
    assert device.free_bytes() == before
    device.expect("SUCCESS", "cuMemFree_v2", device.alloc(before))


def launches_are_checked(device):
    function = device.function("barrier_for_some")
    device.launch(function, threads=128, expected="LAUNCH_OUT_OF_RESOURCES")
    device.launch(function, threads=2048, expected="INVALID_VALUE")
    device.launch(function, blocks=0, expected="INVALID_VALUE")
    device.launch(function, shared=49153, expected="INVALID_VALUE")
    device.expect("INVALID_VALUE", "cuFuncSetAttribute", function, 8, 227 * 1024 + 1)
    device.expect("SUCCESS", "cuFuncSetAttribute", function, 8, 227 * 1024)
    device.expect("NOT_FOUND", "cuModuleGetFunction", ctypes.byref(ctypes.c_void_p()), device.module, b"no_such_kernel")
    device.expect("INVALID_IMAGE", "cuModuleLoadData", ctypes.byref(ctypes.c_void_p()), b"//\n.version 8.0\n" + bytes(64))


def code_for_another_gpu(device):
    for architecture, expected in [("sm_80", "NO_BINARY_FOR_GPU"), ("sm_100a", "NO_BINARY_FOR_GPU"), ("sm_90a", "SUCCESS")]:
        device.architecture = architecture
        device.expect(expected, "cuModuleLoadData", ctypes.byref(ctypes.c_void_p()), device.compile())


def order_of_calls(device):
    device.expect("SUCCESS", "cuCtxSetCurrent", None)
    device.expect("INVALID_CONTEXT", "cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(4))
    device.expect("INVALID_DEVICE", "cuDeviceGet", ctypes.byref(ctypes.c_int()), 1)


def events(device):
    """An event is ready when its stream was waited for; streams that do not block pass each other."""
    start, end, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    milliseconds = ctypes.c_float()
    for event in (start, end):
        device.expect("SUCCESS", "cuEventCreate", ctypes.byref(event), 0)
    elapsed = ("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
    device.expect("INVALID_HANDLE", *elapsed)
    device.expect("SUCCESS", "cuStreamCreate", ctypes.byref(stream), 1)
    for event in (start, end):
        device.expect("SUCCESS", "cuEventRecord", event, stream)
    device.expect("SUCCESS", "cuStreamSynchronize", None)
    device.expect("NOT_READY", *elapsed)
    device.expect("SUCCESS", "cuEventSynchronize", start)
    device.expect("NOT_READY", *elapsed)
    device.expect("SUCCESS", "cuStreamSynchronize", stream)
    device.expect("SUCCESS", *elapsed)
    assert milliseconds.value >= 0.0


def tensor_maps(device):
    """A map holds its fields where abi.hpp says, and the driver's rules are kept."""
    space = ctypes.create_string_buffer(192)
    target = ctypes.c_void_p((ctypes.addressof(space) + 63) // 64 * 64)
    memory = device.alloc(128 * 1000 * 2)

    def encode(expected, stride=256, box=64, swizzle=3, address=memory.value):
        lengths, strides = (ctypes.c_uint64 * 2)(128, 1000), (ctypes.c_uint64 * 1)(stride)
        sides, steps = (ctypes.c_uint32 * 2)(box, 32), (ctypes.c_uint32 * 2)(1, 1)
        bf16, plain = 9, 0
        where = ctypes.c_void_p(address)
        device.expect(expected, "cuTensorMapEncodeTiled", target, bf16, 2, where, lengths, strides, sides, steps, plain, swizzle, 0, 0)

    encode("SUCCESS")
    assert ctypes.c_uint64.from_address(target.value).value == memory.value
    assert ctypes.string_at(target.value + 124, 4) == b"tile"
    for wrong in [{"stride": 250}, {"box": 72}, {"box": 257, "swizzle": 0}, {"swizzle": 9}, {"address": memory.value + 2}]:
        encode("INVALID_VALUE", **wrong)


def a_reset_is_a_new_beginning(device):
    """Resetting the context ends a fault and whatever was made before it."""
    memory = device.alloc(FOUR_KIB)
    device.launch(device.function("before_the_start"), memory)
    device.expect("ILLEGAL_ADDRESS", "cuCtxSynchronize")
    device.expect("SUCCESS", "cuDevicePrimaryCtxReset_v2", 0)
    device.expect("INVALID_VALUE", "cuMemFree_v2", memory)
    runs_and_runs_late(device)


def faults_that_are_asked_for(device):
    os.environ["KVSIEVE_EMULATED_FAULTS"] = "launch=twice@2,load@2,alloc@3"  # read when the first of them may strike
    runs_and_runs_late(device)
    device.expect("OUT_OF_MEMORY", "cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(4))
    device.expect("OUT_OF_MEMORY", "cuModuleLoadData", ctypes.byref(ctypes.c_void_p()), device.compile())
    x = device.alloc(4)
    device.launch(device.function("twice"), x, x, ctypes.c_int(1))
    device.expect("ILLEGAL_ADDRESS", "cuCtxSynchronize")


CHECKS = [
    runs_and_runs_late, written_guard, memory_ends, launches_are_checked, code_for_another_gpu, order_of_calls, events,
    tensor_maps, a_reset_is_a_new_beginning, faults_that_are_asked_for,
    fault("past_the_end", "ILLEGAL_ADDRESS", ctypes.c_int(FOUR_KIB // 4)),
    fault("before_the_start", "ILLEGAL_ADDRESS"),
    fault("barrier_for_some", "LAUNCH_TIMEOUT"),
    fault("misaligned", "MISALIGNED_ADDRESS", shared=1024),
    fault("divided_by", "LAUNCH_FAILED"),
]  # fmt: skip


def main():
    if len(sys.argv) > 1:
        next(check for check in CHECKS if check.__name__ == sys.argv[1])(Device())
        return 0
    failed = False
    for check in CHECKS:
        command = [sys.executable, os.path.join(HERE, "device.py"), "--", sys.executable, __file__, check.__name__]
        result = subprocess.run(command, capture_output=True, text=True)
        said = "" if result.returncode == 0 else f" WRONG (status {result.returncode})\n{result.stderr}"
        print(f"{check.__name__:24}{said or ' ok'}", flush=True)
        failed |= result.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

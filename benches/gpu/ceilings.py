"""What the GPU can do at best, by the driver and cuBLAS alone: bytes copied and products of bf16 matrices per second.

Everything is random: on zeros a product is up to 13% faster, as less is switched and clocks stay higher. A step of plan.py.
"""

import ctypes
import glob
import json
import os
import sys

import tensors

ROUNDS = 15


class Driver:
    """The CUDA driver with one device's primary context."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status:
            raise OSError(f"{name} gave status {status}")

    def alloc(self, size):
        """Memory full of normally distributed bf16 numbers."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        # A block of an odd length over and over: no row of a matrix is as the one before.
        block = tensors.normal(999_983).tobytes()
        for at in range(0, size, len(block)):
            part = min(len(block), size - at)
            self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address.value + at), block, ctypes.c_size_t(part))
        return address

    def free(self, *addresses):
        for address in addresses:
            self.call("cuMemFree_v2", address)

    def median_s(self, work):
        """Median time of `work` by events."""
        start, end = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (start, end):
            self.call("cuEventCreate", ctypes.byref(event), 0)
        samples = []
        for _ in range(ROUNDS + 3):
            self.call("cuEventRecord", start, None)
            work()
            self.call("cuEventRecord", end, None)
            self.call("cuEventSynchronize", end)
            milliseconds = ctypes.c_float()
            self.call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
            samples.append(milliseconds.value / 1e3)
        return sorted(samples[3:])[ROUNDS // 2]


def copy_bytes_per_s(driver, size):
    """Bytes read and written per second by the driver's copy within the GPU's memory."""
    source, target = driver.alloc(size), driver.alloc(size)
    seconds = driver.median_s(lambda: driver.call("cuMemcpyDtoDAsync_v2", target, source, ctypes.c_size_t(size), None))
    driver.free(source, target)
    return 2 * size / seconds


def cublas():
    """cuBLAS beside the system's libraries or in a Python package of NVIDIA's; None without it."""
    names = ["libcublas.so.13", "libcublas.so.12", "libcublas.so.11", "libcublas.so"]
    for folder in sys.path:
        names += sorted(glob.glob(os.path.join(folder, "nvidia", "*", "lib", "libcublas.so.*")))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def product_flops_per_s(driver, size):
    """Operations per second of cuBLAS's product of two square bf16 matrices, summed in f32."""
    library = cublas()
    if library is None:
        return None
    handle = ctypes.c_void_p()
    if library.cublasCreate_v2(ctypes.byref(handle)):
        return None
    a, b, c = (driver.alloc(2 * size * size) for _ in range(3))
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    bf16, compute_f32, default, stride = 14, 68, -1, ctypes.c_longlong(0)

    def product():
        # The function that kvsieve calls too (`naive`, linear layers); a batch of one.
        status = library.cublasGemmStridedBatchedEx(
            handle, 0, 0, size, size, size, ctypes.byref(one), a, bf16, size, stride, b, bf16, size, stride, ctypes.byref(zero),
            c, bf16, size, stride, 1, compute_f32, default,
        )  # fmt: skip
        if status:
            raise OSError(f"cublasGemmStridedBatchedEx gave status {status}")

    seconds = driver.median_s(product)
    library.cublasDestroy_v2(handle)
    driver.free(a, b, c)
    return 2 * size**3 / seconds


def main(tiny):
    driver = Driver()
    found = {"copy_bytes_per_s": copy_bytes_per_s(driver, 1 << 20 if tiny else 1 << 31)}
    print(json.dumps(found), flush=True)
    print(json.dumps({"cublas_bf16_flops_per_s": product_flops_per_s(driver, 64 if tiny else 8192)}))


if __name__ == "__main__":
    main(sys.argv[1] == "tiny")

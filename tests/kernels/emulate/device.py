#!/usr/bin/env python3
"""Runs a command on an emulated CUDA device: the crate's own host code, with kernels on the CPU. Needs g++ 12 on x86-64.

    python3 tests/kernels/emulate/device.py -- cargo test --release --test cuda -- --ignored
    python3 tests/kernels/emulate/device.py -- target/release/kvsieve attend --device cuda --kernel tiled --input qkv.safetensors

Builds libcuda.so.1 and libnvrtc.so.13 from this folder once, under target/, and gives the command an environment in
which they are found; with --cublas a libcublas.so.13 too. KVSIEVE_EMULATED_BYTES is the device's memory (2 GiB), KVSIEVE_EMULATED_CAPABILITY its compute
capability (9.0). See docs/testing-kernels.md for what this shows and what it cannot.
"""

import argparse
import glob
import hashlib
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.normpath(os.path.join(HERE, "..", "..", ".."))


def build(cxx):
    """The folder with both libraries; a new one for each state of the sources and each compiler."""
    version = subprocess.run([cxx, "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(version)
    # The machine is part of every kernel that the emulated NVRTC compiles, and kernels are kept beside the libraries.
    for name in sorted(glob.glob(os.path.join(HERE, "**", "*.?pp"), recursive=True)):
        with open(name, "rb") as source:
            key.update(name.encode() + b"\0" + source.read())
    folder = os.path.join(ROOT, "target", "emulated-device", key.hexdigest()[:16])
    if os.path.isdir(folder):
        return folder
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    flags = ["-std=c++17", "-O2", "-g1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as work:
        made = os.path.join(work, "made")
        os.mkdir(made)
        driver = sorted(glob.glob(os.path.join(HERE, "driver", "*.cpp")))
        subprocess.run([cxx, *flags, *driver, "-ldl", "-Wl,-soname,libcuda.so.1", "-o", f"{made}/libcuda.so.1"], check=True)
        macros = [f'-DFOLDER="{HERE}"', f'-DCXX="{cxx}"']
        subprocess.run([cxx, *flags, *macros, os.path.join(HERE, "nvrtc.cpp"), "-o", f"{made}/libnvrtc.so.13"], check=True)
        os.mkdir(f"{made}/cublas")  # found only where it is asked for
        cublas = os.path.join(HERE, "cublas.cpp")
        subprocess.run([cxx, *flags, cublas, f"{made}/libcuda.so.1", "-o", f"{made}/cublas/libcublas.so.13"], check=True)
        os.symlink("libcuda.so.1", f"{made}/libcuda.so")  # the name that is tried first
        os.symlink("libcuda.so.1", f"{made}/libnvidia-ml.so.1")  # driver/nvml.cpp
        try:
            os.rename(made, folder)
        except OSError:  # another process was faster
            if not os.path.isdir(folder):
                raise
    return folder


def environment(folder, cublas):
    found = dict(os.environ)
    folders = [folder, os.path.join(folder, "cublas") if cublas else None, found.get("LD_LIBRARY_PATH")]
    found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    found["KVSIEVE_NVRTC"] = os.path.join(folder, "libnvrtc.so.13")
    found["KVSIEVE_CACHE"] = os.path.join(folder, "kernels")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cxx", default="g++", help="compiler")
    parser.add_argument("--cublas", action="store_true", help="with an emulated cuBLAS")
    parser.add_argument("command", nargs="+", help="what to run, after --")
    arguments = parser.parse_args()
    folder = build(arguments.cxx)
    sys.stdout.flush()
    try:
        os.execvpe(arguments.command[0], arguments.command, environment(folder, arguments.cublas))
    except OSError as error:
        parser.error(f"{arguments.command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()

"""Runtimes as anyone installs them: onnxruntime-web (WASM) from npm in a headless Chromium, and the oldest ONNX Runtime
that understands our files, in an environment of its own. `Missing` tells why one cannot be had here."""

import functools
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Sequence
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

import browser as chromium

WEB = "1.30.0"  # onnxruntime-web
WASM = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
# The first ONNX Runtime with opset 18 is 1.14.0; it has wheels up to Python 3.10. Python 3.x: the oldest for it.
OLDEST = {8: "1.14.0", 9: "1.14.0", 10: "1.14.0", 11: "1.15.0", 12: "1.17.0", 13: "1.20.0"}
Inputs = dict[str, np.ndarray]


class Missing(Exception):
    """A runtime that cannot be had on this machine."""


def _call(words: Sequence[str | Path], what: str, folder: Path) -> str:
    try:
        return subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True, timeout=300).stdout
    except FileNotFoundError:
        raise Missing(f"{what}: {words[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise Missing(f"{what}: not there after 5 minutes") from None
    except subprocess.CalledProcessError as error:
        raise Missing(f"{what}: {(error.stderr.strip().splitlines() or ['no reason told'])[-1][:200]}") from None


# --- in a browser ---


def fetch_web(folder: Path) -> None:
    """Put the WASM build of npm's package into the folder, if it is not there; no script of the package is run."""
    if all((folder / name).is_file() for name in WASM):
        return
    what = f"onnxruntime-web@{WEB}"
    _call(["npm", "pack", "--silent", what], what, folder)
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as held:
        for name in WASM:
            (folder / name).write_bytes(held.extractfile(f"package/dist/{name}").read())
    archive.unlink()


class _Served(SimpleHTTPRequestHandler):
    """Files with the types that WASM and modules need, isolated, so that the page's clock ticks in 5 microseconds."""

    def guess_type(self, path: str) -> str:
        return {".mjs": "text/javascript", ".wasm": "application/wasm"}.get(Path(path).suffix) or super().guess_type(
            path
        )

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def log_message(self, *words) -> None:
        pass


LIBRARY = """
return (async () => {
    const ort = await import('/ort.wasm.min.mjs');
    ort.env.wasm.numThreads = 1;
    ort.env.wasm.wasmPaths = '/';
    const bytes = async name => (await fetch(name, {cache: 'no-store'})).arrayBuffer();
    const arrays = {float32: Float32Array, int64: BigInt64Array};
    const sessions = {};
    window.open_model = async (key, file, extra) => {
        const content = new Uint8Array(await bytes(file));
        await sessions[key]?.release();
        const began = performance.now();
        const options = {executionProviders: ['wasm'], logSeverityLevel: 3, extra};
        sessions[key] = await ort.InferenceSession.create(content, options);
        return (performance.now() - began) / 1000;
    };
    const tensor = async (name, type, dims) => new ort.Tensor(type, new arrays[type](await bytes(name + '.bin')), dims);
    const feed = async inputs => {
        const given = {};
        for (const [name, type, dims] of inputs) given[name] = await tensor(name, type, dims);
        return given;
    };
    window.run_model = async (key, inputs) => {
        const {output} = await sessions[key].run(await feed(inputs));
        return {dims: output.dims, data: Array.from(output.data)};
    };
    window.stretch = async (key, inputs, seconds) => {
        const given = await feed(inputs), times = [], end = performance.now() + 1000 * seconds;
        while (!times.length || performance.now() < end) {
            const began = performance.now();
            await sessions[key].run(given);
            times.push((performance.now() - began) / 1000);
        }
        return times;
    };
    return [crossOriginIsolated, navigator.userAgent];
})()
"""
KEPT = {"optimization": {"constant_folding_max_output_size_in_bytes": "1"}}  # weights stay packed


class Web:
    """onnxruntime-web in a page of a server of our own: the folder's files and nothing else. One thread."""

    def __init__(self, folder: Path) -> None:
        if absent := chromium.missing():
            raise Missing(absent)
        self.folder = folder
        fetch_web(folder)
        (folder / "index.html").write_text("<!doctype html><title>onnxruntime-web</title>")
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Served, directory=str(folder)))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.window = chromium.Browser()
        self.address = f"127.0.0.1:{self.server.server_port}"
        self.window.open(f"http://{self.address}/index.html")
        isolated, self.agent = self.window.run(LIBRARY)
        assert isolated

    def __enter__(self) -> "Web":
        return self

    def __exit__(self, *error: object) -> None:
        self.window.close()
        self.server.shutdown()
        self.server.server_close()

    def open(self, path: Path, key: str, keep_packed: bool = False) -> float:
        """Make a session of an ONNX file; the seconds that took, without fetching."""
        (self.folder / "model.onnx").write_bytes(path.read_bytes())
        return self.window.run("return open_model(...arguments)", key, "model.onnx", KEPT if keep_packed else {})

    def _write(self, inputs: Inputs) -> list[tuple[str, str, list[int]]]:
        for name, value in inputs.items():
            (self.folder / f"{name}.bin").write_bytes(np.ascontiguousarray(value).tobytes())
        return [(name, str(value.dtype), list(value.shape)) for name, value in inputs.items()]

    def run(self, key: str, inputs: Inputs) -> np.ndarray:
        told = self.window.run("return run_model(...arguments)", key, self._write(inputs))
        return np.array(told["data"], np.float32).reshape(told["dims"])

    def times(self, key: str, inputs: Inputs, seconds: float) -> list[float]:
        """Seconds of each run, for so long, at least one."""
        return self.window.run("return stretch(...arguments)", key, self._write(inputs), seconds)


# --- the oldest ---

OLD_RUN = """
import sys
import numpy, onnxruntime
model, given, out = sys.argv[1:]
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
with numpy.load(given) as inputs:
    numpy.save(out, session.run(["output"], dict(inputs))[0])
print(onnxruntime.__version__)
"""


def _pythons() -> list[tuple[int, Path]]:
    """(x, an interpreter of Python 3.x), oldest first: those on the path and of pyenv that start, and this one."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [(sys.version_info.minor, Path(sys.executable))]
    for minor in OLDEST:
        named = shutil.which(f"python3.{minor}")
        paths = [Path(named)] if named else []
        for path in [*paths, *sorted(root.glob(f"versions/3.{minor}.*/bin/python"))]:
            if subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
                found.append((minor, path))
    return sorted(found, key=lambda pair: pair[0])


class Oldest:
    """The oldest ONNX Runtime with opset 18 that a Python of this machine can have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        minor, python = _pythons()[0]
        if minor not in OLDEST:
            raise Missing(f"no old ONNX Runtime is known for Python 3.{minor}")
        self.version, self.python = OLDEST[minor], folder / "venv" / "bin" / "python"
        if (folder / "made").exists():
            return
        what = f"ONNX Runtime {self.version}"
        _call([python, "-m", "venv", folder / "venv"], what, folder)
        words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
        _call([self.python, *words, f"onnxruntime=={self.version}", "numpy<2"], what, folder)
        (folder / "made").touch()

    def run(self, path: Path, inputs: Inputs) -> np.ndarray:
        np.savez(self.folder / "given.npz", **inputs)
        files = [str(path), str(self.folder / "given.npz"), str(self.folder / "out.npy")]
        words = [str(self.python), "-I", "-c", OLD_RUN, *files]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == self.version
        return np.load(files[-1])

"""Makes vLLM on a CPU keep plain matrices in programs that tests start, as engines on GPUs do.

`install` writes a `sitecustomize` into a folder, which Python imports at its start if the folder
lies on PYTHONPATH; see `plain_matrices` for what it changes.
"""

from pathlib import Path

_HOOK = """
import importlib.abc
import importlib.util
import sys


def product(left, right, *, scale_a, scale_b, out_dtype, **_):
    return (left.float() @ right.float() * (scale_a * scale_b)).to(out_dtype)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "vllm.model_executor.layers.utils":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_change(module):
            load(module)
            module.ops._supports_onednn = False
            module.check_cpu_sgl_kernel = lambda *_: False
            module.torch._scaled_mm = product

        spec.loader.exec_module = load_and_change
        return spec


sys.meta_path.insert(0, Finder())
"""


def install(folder: Path) -> Path:
    """Writes the hook; returns the folder for PYTHONPATH."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_HOOK)
    return folder

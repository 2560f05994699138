"""The real sources of Megatron-Bridge, on a machine without its GPU packages.

Bridge is a pure wheel. `tools/environment.py` puts it beside megatron-core 0.19.2, which it needs,
into a directory of its own. Its package imports dozens of models with packages of several GB. So
two of its packages are entered without their `__init__`, and stand-ins take the place of modules
that a small GPT never calls.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

#: Directory of the wheels; they are tested if it exists.
HOME = Path(os.environ.get("MEGATRON_BRIDGE", Path(sys.prefix) / "bridge"))

_BRIDGE = "megatron.bridge"
_STAND_INS = (
    *(f"{_BRIDGE}.models.hf_pretrained", f"{_BRIDGE}.models.conversion"),
    *(f"{_BRIDGE}.peft.lora", f"{_BRIDGE}.peft.lora_layers"),
    *("datasets", "megatron.energon", "modelopt", "nvdlfw_inspect", "nvidia_resiliency_ext"),
    *("omegaconf", "tensorboard", "toml", "torch.utils.tensorboard", "transformer_engine"),
)
_MODELS = {"GPTModelProvider": "gpt_provider", "T5ModelProvider": "t5_provider"}


class _No(type):
    """The class of stand-ins: a question to one of them, such as `is_converted`, has answer no."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _nothing


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for a function."""


class _StandIn(types.ModuleType):
    """A module in which every name is an empty class, or a function that returns None."""

    __path__: ClassVar[list[str]] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        item = {"__class_getitem__": classmethod(lambda cls, _: cls)}
        setattr(self, name, _nothing if name[0].islower() else _No(name, (), item))
        return getattr(self, name)


class _Entered(types.ModuleType):
    """A package of Bridge without the imports of its `__init__`."""

    def __getattr__(self, name: str) -> Any:
        if name in _MODELS:
            return getattr(importlib.import_module(f"{_BRIDGE}.models.{_MODELS[name]}"), name)
        raise AttributeError(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if any(name == stand_in or name.startswith(f"{stand_in}.") for stand_in in _STAND_INS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def enter() -> None:
    """Make Bridge's modules importable in this process."""
    # First, because megatron-core asks whether some of the packages are installed.
    for name in ("core.models.gpt", "core.optimizer", "training.models.gpt"):
        importlib.import_module(f"megatron.{name}")
    # The helpers index token files, and the wheel of another Python cannot compile them.
    importlib.import_module("megatron.core.datasets.utils").compile_helpers = lambda: None
    for name in (_BRIDGE, f"{_BRIDGE}.models"):
        package = _Entered(name)
        package.__path__ = [str(HOME / name.replace(".", "/"))]
        sys.modules[name] = package
    sys.meta_path.insert(0, _Finder())

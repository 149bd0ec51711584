"""Models as files a device can use: packed containers, ONNX, Core ML; running them; planning their size."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qupel.deploy.about import About, Input
    from qupel.deploy.budget import BudgetPlan, Planner, plan_budget
    from qupel.deploy.coreml import export_coreml
    from qupel.deploy.file import load, save
    from qupel.deploy.formats import exporters
    from qupel.deploy.header import FormatError
    from qupel.deploy.onnx import export_onnx
    from qupel.deploy.packed import Packed, empty
    from qupel.deploy.predict import open_model
    from qupel.deploy.runtime import keep_packed

__all__ = [
    "About",
    "BudgetPlan",
    "FormatError",
    "Input",
    "Packed",
    "Planner",
    "empty",
    "export_coreml",
    "export_onnx",
    "exporters",
    "keep_packed",
    "load",
    "open_model",
    "plan_budget",
    "save",
]

_HOMES = {"About": "about", "Input": "about", "FormatError": "header", "export_coreml": "coreml", "export_onnx": "onnx"}
_HOMES |= {"BudgetPlan": "budget", "Planner": "budget", "plan_budget": "budget", "load": "file", "save": "file"}
_HOMES |= {"exporters": "formats"}
_HOMES |= {"Packed": "packed", "empty": "packed", "open_model": "predict", "keep_packed": "runtime"}


def __getattr__(name: str) -> Any:
    """Names are fetched when they are used: the process that runs foreign files (`confined`) never loads torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'qupel.deploy' has no attribute {name!r}")
    return getattr(import_module(f"qupel.deploy.{_HOMES[name]}"), name)

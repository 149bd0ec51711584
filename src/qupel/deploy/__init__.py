"""Models as files a device can use: packed containers, ONNX, Core ML; running them; planning their size."""

from qupel.deploy.about import About
from qupel.deploy.budget import BudgetPlan, Planner, plan_budget
from qupel.deploy.coreml import export_coreml
from qupel.deploy.file import load, save
from qupel.deploy.header import FormatError
from qupel.deploy.onnx import export_onnx
from qupel.deploy.packed import Packed, empty
from qupel.deploy.predict import open_model
from qupel.deploy.runtime import keep_packed

__all__ = [
    "About",
    "BudgetPlan",
    "FormatError",
    "Packed",
    "Planner",
    "empty",
    "export_coreml",
    "export_onnx",
    "keep_packed",
    "load",
    "open_model",
    "plan_budget",
    "save",
]

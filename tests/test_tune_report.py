"""What the tune modules write."""

import json
import sys
import types

import torch

from olmo_core.nn.depth import tune_report


def test_a_report_names_the_machine_and_no_path(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "tune.py"), "--quick"])
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    report = {**tune_report.machine(), "table": [1]}
    assert report["device"] == "a GPU" and report["command"] == "python tune.py --quick"
    tune_report.write_json(None, report)
    tune_report.write_json(tmp_path / "out.json", report)
    assert json.loads((tmp_path / "out.json").read_text()) == report
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]

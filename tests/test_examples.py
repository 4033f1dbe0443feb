"""The examples and the code blocks of the README run as they stand."""

import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).parents[1]


def test_kernels_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "kernels.py"), run_name="__main__")
    assert "the mask removed" in capsys.readouterr().out


def test_readme_configuration_and_rows(tmp_path: Path) -> None:
    """The ten lines of the README are a valid configuration, and its rows load."""
    from headrace.questions.sets import load

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows, configuration = (re.search(rf"```{kind}\n(.*?)```", text, re.S)[1] for kind in ("json", "yaml"))
    (tmp_path / "mine.jsonl").write_text(rows)
    (tmp_path / "mine.yaml").write_text(configuration.replace("mine.jsonl", str(tmp_path / "mine.jsonl")))
    config = headrace.load_config(tmp_path / "mine.yaml")
    assert len(load(config.questions.train, config.run.seed, "train")) == 2


def test_readme_links_exist() -> None:
    links = re.findall(r"\]\(([\w/.]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


def test_slurm_script_starts_one_torchrun_over_all_nodes(tmp_path: Path) -> None:
    """With SLURM's commands replaced by ones that print, the script asks for what docs/topologies.md says."""
    for name, text in {"scontrol": "echo node-a; echo node-b", "srun": 'printf "%s " "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "node-[a-d]",
        "SLURM_NNODES": "4",
        "SLURM_JOB_ID": "7",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_ON_NODE": "96",
    }
    command = ["bash", str(ROOT / "examples/slurm.sh"), "configs/cge_qwen3vl_8b.yaml", "run.seed=1"]
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node-a:29500 --rdzv-id 7" in shown
    assert shown.rstrip().endswith("-m headrace train configs/cge_qwen3vl_8b.yaml run.seed=1")
    config = headrace.load_config(ROOT / "configs/cge_qwen3vl_8b.yaml")
    assert 4 * 8 - config.engine.rollout_ranks == 16

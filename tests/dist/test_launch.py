"""The processes of a launch, and the launcher's settings."""

import os
import re
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from forked import TIMEOUT, run_program, run_ranks, start
from small_runs import read_metrics
from torch.distributed.launcher.api import LaunchConfig

from vlm_grpo.cli import main
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.dist import launch
from vlm_grpo.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"


# Settings of the launcher.


def test_the_launch_files_are_valid_and_listed_in_the_guide():
    guide = (CONFIGS.parents[1] / "docs" / "scaling.md").read_text()
    named = set(re.findall(r"configs/accelerate/(\w+\.yaml)", guide))
    assert named == {path.name for path in CONFIGS.glob("*.yaml")}
    for name in named:  # an unknown key is an error
        assert load_config_from_file(str(CONFIGS / name)).mixed_precision == "no"


@pytest.mark.parametrize(
    ("world_size", "sizes", "message"),
    [
        ("8", {"DP_REPLICATE": "2", "DP_SHARD": "2"}, "dp_shard_size=2 must be the number"),
        ("4", {"DP_REPLICATE": "4"}, "dp_shard_size must be more than 1"),
        ("4", {"DP_SHARD": "2", "TP": "2"}, "tp_size, cp_size and sp_size must be 1"),
    ],
)
def test_other_parallelism_is_refused(world_size, sizes, message, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("WORLD_SIZE", world_size)
    for name, size in sizes.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", size)
    with pytest.raises(UserError, match=message):
        launch.get_dp_replicate_size()


SUPPORTED: dict[str, Any] = {
    "fsdp_version": 2, "cpu_ram_efficient_loading": False, "state_dict_type": "FULL_STATE_DICT",
}  # fmt: skip


def make_accelerator(**plugins: Any) -> Any:
    state = SimpleNamespace(**plugins)
    return SimpleNamespace(state=state, distributed_type=DistributedType.MULTI_GPU)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ({"fsdp_version": 1}, "fsdp_version must be 2"),
        ({"activation_checkpointing": True}, "policy.gradient_checkpointing does it"),
        ({"cpu_ram_efficient_loading": True}, "one process reads the model anyway"),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, "must be FULL_STATE_DICT"),
    ],
)
def test_unsupported_settings_of_fsdp_are_refused(plugin, message):
    accepted = FullyShardedDataParallelPlugin(**SUPPORTED)
    assert launch.get_fsdp_plugin(make_accelerator(fsdp_plugin=accepted)) is accepted
    refused = FullyShardedDataParallelPlugin(**{**SUPPORTED, **plugin})
    with pytest.raises(UserError, match=message):
        launch.get_fsdp_plugin(make_accelerator(fsdp_plugin=refused))


def test_deepspeed_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    # A launcher starts processes on GPUs like this; accelerate itself would raise first there.
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"DeepSpeed, which is not supported: .*fsdp2\.yaml"):
        launch.build_accelerator(load_settings("quickstart"))


SHARDED = {"fsdp_plugin": FullyShardedDataParallelPlugin(**SUPPORTED)}


@pytest.mark.parametrize(
    ("override", "plugins", "processes", "message"),
    [
        ("checkpoint.sharded=true", {}, 1, "sharded=true needs weights sharded by FSDP2"),
        ("rollout.cuda_graphs=true", SHARDED, 1, "cuda_graphs=true is not supported with sharded"),
        ("rollout.torch_compile=true", SHARDED, 1, "torch_compile=true is not supported with sh"),
        (
            "optim.prompts_per_step=2",
            {},
            3,
            "prompts_per_step=2 is less than the number of processes, 3",
        ),
    ],
)
def test_what_a_launch_cannot_do_is_refused(override, plugins, processes, message, monkeypatch):
    accelerator = make_accelerator(**plugins)
    accelerator.num_processes = processes
    monkeypatch.setattr(launch, "Accelerator", lambda **_: accelerator)
    launch.build_accelerator(load_settings("quickstart", ["optim.prompts_per_step=3"]))
    with pytest.raises(UserError, match=message):
        launch.build_accelerator(load_settings("quickstart", [override]))


def write_device(file: Path, is_told: bool) -> None:
    """Write this rank's device, and the number of processes that it finds."""
    if not is_told:
        del os.environ["ACCELERATE_USE_CPU"]
    torch.accelerator.is_available = lambda: is_told
    state: Any = launch.initialize_distributed()
    found = f"{state.device.type} {state.num_processes}"
    file.with_suffix(f".{state.process_index}").write_text(found)
    state.wait_for_everyone()  # the end of one would break the other's connection


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "without an accelerator"])
def test_processes_on_cpus_form_one_group(tmp_path, is_told):
    """With an accelerator, if the launcher tells them to use the CPU; or without one."""
    run_ranks(tmp_path / "log", 2, write_device, tmp_path / "found", is_told)
    assert [(tmp_path / f"found.{rank}").read_text() for rank in (0, 1)] == ["cpu 2"] * 2


# Runs of several processes.


def run_command(*words: str) -> None:
    """Run the command of a rank, of which a launcher would start an interpreter."""
    assert words[:3] == ("-u", "-m", "vlm_grpo.cli")
    try:
        main(words[3:])
    except SystemExit as end:
        if end.code:
            raise


def launch_run(folder: Path) -> None:
    """Launch a run on two processes as users do, and wait for its end. The ranks are forks of the
    launcher: four interpreters would take 40 seconds."""
    sys.argv = [
        *("accelerate launch", "--config_file", str(CONFIGS / "cpu.yaml")),
        *("--num_processes", "2", "--main_process_port", "0", "--max_restarts", "1"),
        *("-m", "vlm_grpo.cli", "train", "counting", "name=killed", f"output_dir={folder}"),
        *("optim.prompts_per_step=4", "optim.warmup_steps=0", "optim.max_steps=6"),
        *("evaluation.every=0", "data.eval=null", "data.eval_limit=null", "data.train_limit=24"),
        *("checkpoint.every=2", "checkpoint.keep_best=false", "resume=true"),
    ]
    torch_run: Any = import_module("torch.distributed.run")
    elastic_launch = torch_run.elastic_launch

    def launch_forks(config: LaunchConfig, entrypoint: str) -> Any:
        assert entrypoint == sys.executable
        config.start_method = "fork"
        return elastic_launch(config, run_command)

    torch_run.elastic_launch = launch_forks
    accelerate_launch.main()


@pytest.mark.slow
def test_the_launcher_continues_after_a_killed_process(tmp_path):
    log, checkpoints = tmp_path / "log", tmp_path / "killed" / "checkpoints"
    process = start(log, launch_run, tmp_path)
    while not (checkpoints / "step-2").exists():
        assert process.is_alive(), log.read_text()
        time.sleep(0.02)
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    ranks[1].kill()
    process.join(400)
    assert process.exitcode == 0, log.read_text()
    # The other process notices, or the launcher ends it first.
    texts = ("another process of this run has died", "SIGTERM: ")
    assert any(text in log.read_text() for text in texts)
    assert [row["step"] for row in read_metrics(tmp_path / "killed")] == list(range(6))
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-4", "step-6"]


@pytest.mark.slow
def test_a_killed_evaluation_resumes_with_another_number_of_processes(tmp_path):
    # 130 examples are three parts: one is on disk at the kill, two are left for the two ranks.
    script, log = Path(__file__).parents[2] / "perf" / "resumed_evaluation.py", tmp_path / "log"
    process = start(log, run_program, script, "--count", "130", "--tasks", "counting")
    process.join(TIMEOUT)
    assert process.exitcode == 0, log.read_text()[-3000:]
    assert "resumed on 2 ranks: identical to the byte" in log.read_text()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("LOCAL_RANK=3", "^LOCAL_RANK=3 is set, .* but not RANK, WORLD_SIZE, MAS"),
        ("WORLD_SIZE=2 RANK=0", "^WORLD_SIZE=2 is set, .* but not MASTER_ADDR, MASTER_PORT"),
        ("WORLD_SIZE=x", "^WORLD_SIZE='x' is set, .* should be a number; remove it"),
        ("LOCAL_RANK=", "^LOCAL_RANK='' is set, .* should be a number; remove it"),
        ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "^RANK=2 is set, .* but WORLD_SIZE=2"),
    ],
)
def test_a_part_of_a_launch_is_refused(variables, message, monkeypatch):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    with pytest.raises(UserError, match=message):
        launch.initialize_distributed()

#!/bin/bash
# The paper's run on 4 nodes of 8 GPUs, one torchrun over all of them: 16 learner ranks, then 16 rollout ranks with 8 servers.
#
#   sbatch examples/slurm.sh configs/cge_qwen3vl_8b.yaml [section.field=value …]
#
# The same command goes on where an earlier job stopped. One node of 8, without SLURM:
#
#   torchrun --nproc-per-node 8 -m headrace train configs/cge_qwen3vl_8b.yaml engine.rollout_ranks=4
#
#SBATCH --job-name=headrace
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@1200
#SBATCH --output=headrace-%j.log
set -euo pipefail

config=${1:?usage: sbatch examples/slurm.sh CONFIG [section.field=value ...]}
gpus=${SLURM_GPUS_ON_NODE:-8}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

export OMP_NUM_THREADS=$((${SLURM_CPUS_ON_NODE:-64} / gpus))
export HF_HUB_OFFLINE=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
# SLURM's SIGTERM comes twenty minutes before the end: the step in hand is finished and saved, which takes longer than torchrun's 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1100

# c10d and not a static rendezvous: after a crash all nodes meet again, as often as --max-restarts says.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "$gpus" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${hosts[0]}:${MASTER_PORT:-29500}" \
    --rdzv-id "$SLURM_JOB_ID" \
    --max-restarts 3 \
    -m headrace train "$config" "${@:2}"

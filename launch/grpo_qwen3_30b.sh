#!/usr/bin/env bash
# GRPO on Qwen3-30B-A3B, on one node of 8 GPUs of 80 GB.
#
#   MODEL=/models/FOLDER sbatch launch/grpo_qwen3_30b.sh
#   DRY_RUN=1 launch/grpo_qwen3_30b.sh         print what would run; needs neither Slurm nor a GPU
#
# Words after the script are settings, as of `rlhf train`: num_steps=10 optimizer.lr=2e-6.
#
# Variables of the job (default):
#   CONFIG          configuration, relative to PROJECT or absolute (configs/recipes/qwen3_30b_8.yaml)
#   MODEL           folder of the model, visible on every node (model.path of CONFIG)
#   PROJECT         folder of the project (where sbatch was called)
#   LOGS            folder for output: LOGS/NAME-JOB/attempt-N/rank00000.log (PROJECT/logs)
#   STARTER         node: one task per node starts the node's ranks; rank: one task per rank (node)
#   RANKS_PER_NODE  (as many as GPUs, 1 without)       GPUS_PER_NODE  (as many as were asked for)
#   PREFLIGHT       1: look at all nodes before anything is loaded; 0: do not (1)
#   MAX_RESTARTS    times that a failed run is requeued by itself (3); one that was asked to stop
#                   (near the time limit, or by scancel --batch --signal=USR1 JOB) always is
#   DRY_RUN         1: print, start nothing (0)
# Variables of the site: below.
#
#SBATCH --job-name=grpo_qwen3_30b
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:USR1@300

# --- site settings -----------------------------------------------------------------------------
# Account and partition are best given to sbatch: SBATCH_ACCOUNT, SBATCH_PARTITION.
CONTAINER=${CONTAINER:-none} # none, pyxis (enroot) or apptainer
IMAGE=${IMAGE:-}             # of the container, with what requirements/gpu.txt lists
MOUNTS=${MOUNTS:-}           # /host:/inside,/host2:/inside2: project, models, runs
PYTHON=${PYTHON:-}           # empty: .venv of the project; in a container python3
INTERFACE=${INTERFACE:-}     # network through which nodes meet, e.g. bond0; empty: the first found
IB_ADAPTERS=${IB_ADAPTERS:-} # e.g. mlx5_0,mlx5_1; empty: all
EXTRA_SRUN=${EXTRA_SRUN:-}   # further options of srun, e.g. --network=...
# -----------------------------------------------------------------------------------------------

CONFIG=${CONFIG:-configs/recipes/qwen3_30b_8.yaml}
PROJECT=${PROJECT:-${SLURM_SUBMIT_DIR:-$(cd "$(dirname "$0")/.." && pwd)}}
if [[ ! -f $PROJECT/slurm/job.sh ]]; then
  echo "PROJECT=$PROJECT has no slurm/job.sh: submit from the project's folder, or set PROJECT" >&2
  exit 1
fi
# shellcheck source=slurm/job.sh
source "$PROJECT/slurm/job.sh"
run_job "$@"

#!/usr/bin/env bash
# Any configuration on this machine, without Slurm: torchrun, one process per rank.
#
#   launch/local.sh                                         configs/demo.yaml (`make model` first)
#   CONFIG=my.yaml RANKS=8 launch/local.sh num_steps=10     another one, with a changed setting
#   DRY_RUN=1 launch/local.sh                               print what would run
#
# Words after the script are settings, as of `rlhf train`. `rlhf train CONFIG` does the same with a
# launcher of ours, which names a killed rank and ends with status 75 when it was asked to stop.
#
# Variables (default):
#   CONFIG   configuration (configs/demo.yaml)      MODEL  folder of the model (model.path of CONFIG)
#   RANKS    processes (as many as GPUs, 2 without)
#   PROJECT  folder of the project (that of this script)
#   PYTHON   (.venv of the project)                 DRY_RUN  1: print, start nothing (0)
set -euo pipefail

PROJECT=${PROJECT:-$(cd "$(dirname "$0")/.." && pwd)}
CONFIG=${CONFIG:-configs/demo.yaml}
PYTHON=${PYTHON:-$PROJECT/.venv/bin/python}
MODEL=${MODEL:-}
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
RANKS=${RANKS:-$((gpus > 0 ? gpus : 2))}

# shellcheck source=launch/env.sh
source "$PROJECT/launch/env.sh"
settings=("dist.ranks=$RANKS" "$@")
[[ -z $MODEL ]] || settings=("model.path=$MODEL" "${settings[@]}")
# a port that the kernel gives: two runs on one machine do not meet
command=("$PYTHON" -m torch.distributed.run --nproc-per-node="$RANKS" --rdzv-backend=c10d
  --rdzv-endpoint=127.0.0.1:0 -m rlhf.train "$CONFIG" "${settings[@]}")
if [[ ${DRY_RUN:-0} == 1 ]]; then
  echo "train: ${command[*]}"
  exit 0
fi
cd "$PROJECT"
exec "${command[@]}"

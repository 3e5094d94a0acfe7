# shellcheck shell=bash
# What the launch scripts share: check, preflight, one srun, stop,
# requeue. Sourced by a batch script
# after its settings; `run_job "$@"` does the rest. The settings are described in launch/grpo_600b.sh.

STOPPED=75 # exit status of ranks that were asked to stop and have saved (rlhf/dist/stop.py)
USAGE=2    # exit status of a wrong request: starting again would not help
UNFIT=3    # exit status of a preflight that found an unfit node

say() { echo "$(date +%H:%M:%S) $*"; }
fail() { echo "$*" >&2; exit 1; }

run_job() {
  set -euo pipefail
  defaults
  check_settings
  # shellcheck source=launch/env.sh
  source "$PROJECT/launch/env.sh"
  build_commands "$@"
  if [[ $DRY_RUN == 1 ]]; then print_commands; exit 0; fi
  [[ -n ${SLURM_JOB_ID:-} ]] || fail "not in a Slurm job: submit with sbatch, or set DRY_RUN=1"
  mkdir -p "$LOGS"
  cd "$PROJECT"
  say "job $SLURM_JOB_ID, attempt $ATTEMPT: $CONFIG on $NODES nodes x $RANKS_PER_NODE ranks" \
    "(${SLURM_JOB_NODELIST:-?}); output of the ranks: $LOGS"
  trap 'ask_to_stop USR1' USR1
  trap 'ask_to_stop TERM' TERM
  if [[ $PREFLIGHT == 1 ]]; then
    step "${preflight[@]}" || end_preflight "$step_status"
  fi
  step "${train[@]}" || true
  end_job "$step_status"
}

defaults() {
  DRY_RUN=${DRY_RUN:-0} PREFLIGHT=${PREFLIGHT:-1} STARTER=${STARTER:-node}
  CONTAINER=${CONTAINER:-none} IMAGE=${IMAGE:-} MOUNTS=${MOUNTS:-} MODEL=${MODEL:-}
  MAX_RESTARTS=${MAX_RESTARTS:-3} EXTRA_SRUN=${EXTRA_SRUN:-}
  if [[ $CONTAINER == none ]]; then PYTHON=${PYTHON:-$PROJECT/.venv/bin/python}; fi
  export PYTHON=${PYTHON:-python3} # of the image
  ATTEMPT=${SLURM_RESTART_COUNT:-0}
  NODES=${SLURM_NNODES:-$(header nodes)}
  GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-$(header gpus-per-node)}}
  RANKS_PER_NODE=${RANKS_PER_NODE:-$((GPUS_PER_NODE > 0 ? GPUS_PER_NODE : 1))}
  LOGS=${LOGS:-$PROJECT/logs}/${SLURM_JOB_NAME:-job}-${SLURM_JOB_ID:-0}/attempt-$ATTEMPT
  export LOGS CONFIG STARTER
}

header() { # option -> its value in the batch script's own header
  sed -n "s/^#SBATCH --$1=//p" "$0" | head -n 1
}

check_settings() {
  [[ -f $PROJECT/slurm/task.sh ]] || fail "PROJECT=$PROJECT has no slurm/task.sh: submit from the" \
    "project's folder, or set PROJECT to it"
  [[ -f $PROJECT/$CONFIG || -f $CONFIG ]] || fail "CONFIG=$CONFIG: no such file in $PROJECT"
  [[ $STARTER == node || $STARTER == rank ]] || fail "STARTER=$STARTER must be node or rank"
  case $CONTAINER in
    none) ;;
    pyxis | apptainer) [[ -n $IMAGE ]] || fail "CONTAINER=$CONTAINER needs IMAGE" ;;
    *) fail "CONTAINER=$CONTAINER must be none, pyxis or apptainer" ;;
  esac
  local name
  for name in NODES RANKS_PER_NODE GPUS_PER_NODE MAX_RESTARTS; do
    [[ ${!name} =~ ^[0-9]+$ ]] || fail "$name=${!name} must be a number"
  done
}

build_commands() { # overrides -> the arrays preflight and train
  local settings=("dist.ranks=$((NODES * RANKS_PER_NODE))" "$@")
  [[ -z $MODEL ]] || settings=("model.path=$MODEL" "${settings[@]}")
  # All GPUs of a node to every task, never bound one by one: the process that hosts an engine must
  # see all devices of its engine. CPUs likewise: ranks share them out themselves.
  local common=(srun --nodes="$NODES" --distribution=block --cpu-bind=none
    --mem-bind=none)
  ((GPUS_PER_NODE == 0)) || common+=(--gpus-per-node="$GPUS_PER_NODE" --gpu-bind=none)
  # several options in one setting
  # shellcheck disable=SC2206
  common+=($EXTRA_SRUN)
  local enter=()
  case $CONTAINER in
    # pyxis: one container per node and step, so all tasks of a node share IPC and PIDs
    pyxis) common+=(--container-image="$IMAGE" ${MOUNTS:+--container-mounts="$MOUNTS"}
      --container-workdir="$PROJECT") ;;
    # apptainer: no --pid, no --ipc, so tasks stay in the node's namespaces and share them
    apptainer) enter=(apptainer exec --nv ${MOUNTS:+--bind "$MOUNTS"} --pwd "$PROJECT" "$IMAGE") ;;
  esac
  # every node gets to say what is wrong with it
  preflight=("${common[@]}" --kill-on-bad-exit=0 "$(cpus_per_task 1)" --ntasks-per-node=1
    "${enter[@]}" bash "$PROJECT/slurm/task.sh" preflight "${settings[@]}")
  train=("${common[@]}" --kill-on-bad-exit=1)
  if [[ $STARTER == node ]]; then
    train+=("$(cpus_per_task 1)" --ntasks-per-node=1)
  else
    train+=("$(cpus_per_task "$RANKS_PER_NODE")" --ntasks-per-node="$RANKS_PER_NODE"
      --output="$LOGS/rank%5t.log")
  fi
  train+=("${enter[@]}" bash "$PROJECT/slurm/task.sh" train "${settings[@]}")
}

cpus_per_task() { # tasks on a node -> all its CPUs, shared out; without this a task gets one
  local cpus=$((${SLURM_CPUS_ON_NODE:-$1} / $1))
  echo "--cpus-per-task=$((cpus > 0 ? cpus : 1))"
}

print_commands() {
  [[ $PREFLIGHT != 1 ]] || echo "preflight: ${preflight[*]}"
  echo "train: ${train[*]}"
  echo "environment:"
  env | grep -E '^(CONFIG|LOGS|STARTER|PYTHON|HF_|OMP_|GOMP_|TORCH|PYTORCH|CUDA|NCCL|GLOO|TOKEN)' | sort
}

step_pid=
step() { # command: run it, pass signals on; its status in step_status
  "$@" &
  step_pid=$!
  while :; do
    step_status=0
    wait "$step_pid" || step_status=$?
    kill -0 "$step_pid" 2>/dev/null || break # a trap ended the wait, not the step
  done
  step_pid=
  return "$step_status"
}

ask_to_stop() { # signal: srun hands it to the tasks, which tell their ranks
  say "asked to stop by $1: ranks finish what they are in, save, and end"
  [[ -z $step_pid ]] || kill -s "$1" "$step_pid" 2>/dev/null || true
}

end_preflight() { # status
  local status=$1 unfit
  if ended_with "$USAGE"; then status=$USAGE; fi
  unfit=$(paste -sd, "$LOGS/unfit" 2>/dev/null || true)
  if ((status == UNFIT)) && [[ -n $unfit ]] && spares_last "$unfit"; then
    say "preflight: $unfit left out, started again on other nodes"
    restart_without "$unfit" "$status"
  fi
  say "preflight ended with status $status: nothing was loaded; the lines above name node and reason"
  exit "$status"
}

spares_last() { # unfit nodes -> whether idle nodes could take their place
  local idle
  idle=$(sinfo --noheader --states=idle --partition="$SLURM_JOB_PARTITION" --format=%D | paste -sd+)
  ((${idle:-0} >= $(tr ',' '\n' <<<"$1" | wc -l)))
}

restart_without() { # unfit nodes, status if Slurm refuses
  local before
  before=$(scontrol show job "$SLURM_JOB_ID" --oneliner | sed -n 's/.* ExcNodeList=\([^ (]*\).*/\1/p')
  # Slurm ends this script when the job is requeued, and its nodes can only be changed after that
  trap '' TERM
  scontrol requeuehold "$SLURM_JOB_ID" || exit "$2"
  scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${before:+$before,}$1" ||
    say "the unfit nodes could not be left out"
  scontrol release "$SLURM_JOB_ID"
  exit "$2"
}

end_job() { # status of the ranks: end well, go on later, or fail
  local status=$1
  if ended_with "$USAGE"; then status=$USAGE; fi
  if ((status == 0)) && ended_with "$STOPPED"; then status=$STOPPED; fi
  tell_causes
  case $status in
    0) say "done"; exit 0 ;;
    "$STOPPED") requeue "stopped and saved" "$STOPPED" ;;
    "$USAGE") say "refused: see the lines above"; exit "$USAGE" ;;
  esac
  if ((ATTEMPT < MAX_RESTARTS)); then
    requeue "failed with status $status, restart $((ATTEMPT + 1)) of $MAX_RESTARTS" "$status"
  fi
  say "failed with status $status after $ATTEMPT restarts; logs: $LOGS"
  exit "$status"
}

ended_with() { # status -> whether a task has ended with it
  local files=("$LOGS"/status-*)
  [[ -e ${files[0]} ]] && grep -qxh "$1" "${files[@]}"
}

tell_causes() { # the lines in which ranks said why, once each
  local logs=("$LOGS"/rank*.log)
  [[ -e ${logs[0]} ]] || return 0
  grep -hE '^stopped: ' "${logs[@]}" | sort -u || true
}

requeue() { # reason, status if Slurm refuses. A job that is being cancelled must not come back.
  local state
  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T 2>/dev/null || true)
  if [[ $state != RUNNING ]]; then
    say "$1; left to Slurm: the job is ${state:-gone}"
    exit "$2"
  fi
  say "$1: requeued; the next attempt goes on from the newest checkpoint"
  trap 'exit 0' TERM # with it Slurm ends this script
  scontrol requeue "$SLURM_JOB_ID" || { say "Slurm did not requeue the job: submit it again"; exit "$2"; }
  sleep 600 &
  wait
}

#!/usr/bin/env bash
# One task of srun: starts what slurm/job.sh asks for, in the container if there is one.
#
#   task.sh preflight SETTING...   is this node fit?
#   task.sh train SETTING...       STARTER=node: this node's ranks; STARTER=rank: one rank
#
# Reads CONFIG, STARTER, LOGS, PYTHON. Its status goes to a file in LOGS, as srun gives one for all
# tasks, and those that it kills count too. A rank that was asked to stop and has saved ends with 75:
# that is no failure, so the task ends with 0, or --kill-on-bad-exit would kill those still closing.
set -euo pipefail

what=$1
shift
case $what-$STARTER in
  preflight-*) command=("$PYTHON" -m rlhf.cli preflight "$CONFIG" "$@" --unfit "$LOGS/unfit") ;;
  train-node) command=("$PYTHON" -m rlhf.cli train "$CONFIG" "$@" --logs "$LOGS") ;;
  train-rank) command=("$PYTHON" -m rlhf.train "$CONFIG" "$@" --log-phases) ;;
  *) echo "task.sh: $what must be preflight or train, STARTER=$STARTER node or rank" >&2; exit 2 ;;
esac

# Slurm may signal this shell, or all processes of the task: until the program has a handler of its
# own, USR1 must not end it.
(
  trap '' USR1
  exec "${command[@]}"
) &
program=$!
trap 'kill -USR1 "$program" 2>/dev/null' USR1
trap 'kill -TERM "$program" 2>/dev/null' TERM
while :; do
  status=0
  wait "$program" || status=$?
  kill -0 "$program" 2>/dev/null || break # a trap ended the wait, not the program
done
echo "$status" >"$LOGS/status-$what-${SLURM_PROCID:-0}"
if ((status == 75)); then exit 0; fi
exit "$status"

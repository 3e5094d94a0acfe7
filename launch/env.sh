# shellcheck shell=bash
# Environment of every rank and engine, with the reason of each line. Sourced by slurm/job.sh and
# launch/local.sh; what is set already stays.

# --- project ---------------------------------------------------------------------------------
export PYTHONUNBUFFERED=1                       # a log shows the last line before a crash
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}      # models are folders; a thousand ranks must not ask a hub
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false} # its threads do not survive a fork

# --- CPU threads -------------------------------------------------------------------------------
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}    # ranks of a node share its cores; more threads only fight
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # waiting threads sleep instead of burning a core
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-0}      # the same for GNU's library

# --- torch -------------------------------------------------------------------------------------
# Phases release memory in pieces of all sizes; segments that grow keep the holes small. Engine hosts
# are started without it (torch_memory_saver refuses it, and such memory has no CUDA IPC handle).
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # Megatron orders its overlap of communication by it
export TORCH_NCCL_AVOID_RECORD_STREAMS=${TORCH_NCCL_AVOID_RECORD_STREAMS:-1} # a collective's buffers are free when it ends
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1} # a dead peer ends a collective, not only its timeout

# --- NCCL --------------------------------------------------------------------------------------
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}           # INFO when a start hangs: it names interfaces and rings
export NCCL_CUMEM_ENABLE=${NCCL_CUMEM_ENABLE:-0} # its own pool keeps gigabytes that engines need
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}  # in-switch reduction holds memory that cannot be released
# The interface through which nodes meet, and the InfiniBand adapters: site settings, see the header
# of the launch script. Without them NCCL and gloo take the first interface that they find.
if [[ -n ${INTERFACE:-} ]]; then
  export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE
fi
if [[ -n ${IB_ADAPTERS:-} ]]; then
  export NCCL_IB_HCA=$IB_ADAPTERS
fi

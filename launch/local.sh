#!/usr/bin/env bash
# Start ranks of train.py on this machine:
#
#     launch/local.sh 4 --attention mesh --tile 2x2 --seq-len 8192
#
# The first argument is the number of ranks, all others go to train.py (--help lists them). PYTHON names the
# interpreter; without it the repository's virtual environment is used if there is one.
set -euo pipefail

if [[ $# -lt 1 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: launch/local.sh RANKS [options of train.py]" >&2
    exit 2
fi
ranks=$1
shift

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
if [[ ! -x $(command -v "$python") ]]; then
    python=python3
fi

# Ranks that share this machine's cores share its threads too.
cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
# Idle threads sleep: spinning ones take the cores from whatever else runs here.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

exec "$python" "$here/start.py" "$ranks" "$@"

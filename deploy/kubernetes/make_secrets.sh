#!/usr/bin/env bash
# Prints the secrets of a run, from the files of make_certificates.sh: each role gets what it needs and no more.
#
#   deploy/kubernetes/make_secrets.sh RUN FOLDER | kubectl apply --filename -
set -euo pipefail

if [ $# -ne 2 ]; then
    echo "usage: $0 RUN FOLDER" >&2
    exit 2
fi
run=$1
cd "$2"

secret() {
    local name=$1
    shift
    kubectl create secret generic "$run-$name" --dry-run=client --output=yaml "${@/#/--from-file=}"
    echo ---
}

secret learner ca.pem token server.pem server.key metrics_token redis_controller_password
secret learner-node ca.pem token=trainer_token
secret rollout-server ca.pem token=rollout_server_token redis_rollout_password
secret queue ca.pem server.pem server.key redis.acl redis_controller_password

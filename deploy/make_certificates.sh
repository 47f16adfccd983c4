#!/usr/bin/env bash
# Makes what the services show each other: an authority, one server certificate, the tokens, the queue's passwords.
# It needs openssl and python3.
#
#   deploy/make_certificates.sh FOLDER HOST...
#
# HOST: the names and addresses under which others reach the controller and the queue. Run again on the same
# folder it keeps authority, token and passwords, and issues a new server certificate for the hosts then named.
set -euo pipefail
umask 077

if [ $# -lt 2 ]; then
    echo "usage: $0 FOLDER HOST..." >&2
    exit 2
fi
folder=$1
shift
days=365

names=
for host in "$@"; do
    if [[ $host =~ [^0-9A-Za-z.:-] ]]; then
        echo "$0: $host is neither a name nor an address" >&2
        exit 2
    elif [[ $host == *:* || $host =~ ^[0-9]+(\.[0-9]+){3}$ ]]; then
        names+="${names:+,}IP:$host"
    else
        names+="${names:+,}DNS:$host"
    fi
done

mkdir -p "$folder"
cd "$folder"
scratch=$(mktemp -d .new.XXXXXX)
trap 'rm -rf "$scratch"' EXIT

# What a full disk cut short never stands under its name: a later call would keep it.
authority=.
if [ ! -e ca.key ]; then
    authority=$scratch
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days $((10 * days)) \
        -subj "/CN=slipstream authority" -keyout "$scratch/ca.key" -out "$scratch/ca.pem" \
        -addext basicConstraints=critical,CA:TRUE,pathlen:0 -addext keyUsage=critical,keyCertSign,cRLSign \
        2> "$scratch/log" || { cat "$scratch/log" >&2; exit 1; }
fi

openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=slipstream" \
    -keyout "$scratch/server.key" -out "$scratch/request" 2> "$scratch/log" || { cat "$scratch/log" >&2; exit 1; }
cat > "$scratch/extensions" << EOF
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectAltName = $names
EOF
openssl x509 -req -in "$scratch/request" -CA "$authority/ca.pem" -CAkey "$authority/ca.key" -days $days \
    -extfile "$scratch/extensions" -out "$scratch/server.pem" 2> "$scratch/log" || { cat "$scratch/log" >&2; exit 1; }
# openssl ends with 0 also where it could write nothing.
openssl verify -CAfile "$authority/ca.pem" "$scratch/server.pem" > /dev/null
chmod 644 "$authority/ca.pem" "$scratch/server.pem"
[ "$authority" = . ] || mv "$scratch/ca.pem" "$scratch/ca.key" .
mv "$scratch/server.key" "$scratch/server.pem" .

for secret in token metrics_token redis_controller_password redis_rollout_password; do
    [ -s $secret ] || { openssl rand -hex 32 > "$scratch/$secret"; mv "$scratch/$secret" .; }
done
# A role's token is made from the run's (docs/security.md).
# By Python: openssl would take the run's token from its command line, which others may read.
python3 - << 'EOF'
import hmac
from pathlib import Path

token = Path("token").read_text().split()[0].encode()
for role in ("trainer", "rollout-server", "client", "reader"):
    digest = hmac.digest(token, f"slipstream {role}".encode(), "sha256").hex()
    Path(f"{role.replace('-', '_')}_token").write_text(f"{role}.{digest}\n")
EOF

# What each end of the queue may do, and on which keys (docs/security.md). Nobody enters as the
# default user, with whose rights many servers load their files.
digest() { tr -d '\n' < "$1" | openssl dgst -sha256 -r | cut -d' ' -f1; }
both="resetkeys resetchannels -@all +auth +hello +ping +select +client|setname"
both+=" +multi +exec +discard +unwatch"
stream="~slipstream:*:trajectories" bytes="~slipstream:*:bytes"
controller="+config|get (+xgroup|create +xreadgroup +xrange +xack +xdel +xinfo|stream $stream)"
controller+=" (+incrby +get $bytes)"
rollout="(+xadd $stream) (+watch +incrby +get $bytes)"
cat > redis.acl << EOF
user default off resetpass ~* &* +@all
user controller on #$(digest redis_controller_password) $both $controller
user rollout on #$(digest redis_rollout_password) $both $rollout
EOF

echo "$folder: server certificate for $names, valid for $days days"
echo "learner node 0 needs server.pem, server.key, ca.pem, token and redis_controller_password; further nodes ca.pem and,"
echo "as token, trainer_token; rollout servers ca.pem, redis_rollout_password and, as token, rollout_server_token."
echo "Keep ca.key off all of them."
